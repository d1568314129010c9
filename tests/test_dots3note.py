"""dots3 note: configurations of both kinds, layers for further tokens, sequences in caches of two widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import drawn, write_checkpoint
from gguf_files import write_model
from tiny_architectures import tiny

from ikcli.convert.tool import OpenCheckpoint, open_checkpoint
from ikcli.engine.plan import sizes
from ikcli.engine.plan.model_rules import check_indexer
from ikcli.engine.run import sequences
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.models import GraphConfig, HParams, find
from ikcli.models.heads import mtp
from ikcli.settings.run import RunConfig

ANSWERS = json.loads((Path(__file__).parent / "data" / "convert_answers.json").read_text())
SAVED = next(m for m in ANSWERS["models"] if m["name"] == "dots3note")
PREFIX = "dots3note."
TEXTS = np.random.default_rng(3).integers(0, 96, (2, 300)).astype(np.int32)


def opened(folder: Path, config: dict[str, Any], shapes: dict[str, Any], **changes: Any) -> OpenCheckpoint:
    tensors = {name: drawn(name, shape) for name, shape in shapes.items()}
    return open_checkpoint(write_checkpoint(folder, config | changes, tensors))


def released() -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and tensors of the same model as its publisher writes them, with a layer for further tokens."""
    config = {k: v for k, v in SAVED["config"].items() if k not in ("head_dim", "rope_parameters", "mlp_layer_types")}
    own = next(iter(config.pop("per_layer_config").values()))
    config |= {f"swa_{k}": v for k, v in own.items()} | {"swa_q_lora_rank": 24, "swa_qk_rope_head_dim": 16}
    config["layer_types"] = [kind.replace("indexed", "full") for kind in config["layer_types"]]
    config |= {
        "architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note", "rope_theta": 1e4,
        "swa_rope_theta": 500.0, "moe_layer_freq": 1, "first_k_dense_replace": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "sliding_window_size": config.pop("sliding_window"), "apply_mla_qkv_lora_rescale": True, "use_dsa": True,
        "attention_gate_type": "headwise", "swa_attention_gate_type": "headwise", "normalization": "RMSNorm",
    }  # fmt: skip
    config["moe_shared_expert_intermediate_size"] = config.pop("shared_experts_intermediate_size")
    shapes = dict(SAVED["tensors"]) | {"vision_encoder.blocks.0.mlp.fc1.weight": [4, 4]}
    block = {n: s for n, s in shapes.items() if ".layers.4." in n and ".mlp." not in n}
    shapes |= {n.replace(".layers.4.", ".layers.5."): s for n, s in block.items()}
    dense = {f"model.layers.5.mlp.{n}": s for n, s in (("gate_proj", [96, 64]), ("up_proj", [96, 64]))}
    head = {"eh_proj": [64, 128], "enorm": [64], "hnorm": [64], "mlp.down_proj": [64, 96], "shared_head.norm": [64]}
    shapes |= {f"{n}.weight": s for n, s in (dense | {f"model.layers.5.{n}": s for n, s in head.items()}).items()}
    return config, shapes | {"model.mtp.embed_tokens.weight": [320, 64]}


def test_the_released_names(tmp_path: Path) -> None:
    """The file is that of the checkpoint which transformers saves, and has the head beside it, which does not run."""
    saved = opened(tmp_path / "saved", SAVED["config"], SAVED["tensors"])
    other = opened(tmp_path / "released", *released())
    more = set(other.file.tensors) - set(saved.file.tensors)
    assert not set(saved.file.tensors) - set(other.file.tensors) and {name[:6] for name in more} == {"blk.5."}
    assert {"blk.5.nextn.eh_proj.weight", "blk.5.nextn.embed_tokens.weight", "blk.5.attn_k_b.weight"} <= more
    keys, others = ({k: v for k, v in found.file.metadata.items() if k.startswith(PREFIX)} for found in (saved, other))
    changed = {PREFIX + "block_count": 6, PREFIX + "nextn_predict_layers": 1}
    heads = {PREFIX + "attention.head_count": [4, 4, 2, 2, 2, 2]}
    assert others == keys | changed | heads
    names = ("kv_lora_rank", "key_length", "value_length", "key_length_mla", "value_length_mla")
    sizes_of = [[keys[f"{PREFIX}attention.{name}{end}"] for name in names] for end in ("", "_swa")]
    assert sizes_of == [[32, 48, 32, 32, 16], [48, 64, 48, 48, 32]]
    hp = HParams.from_gguf(other.file.metadata, other.file.tensors, "x.gguf")
    assert hp.n_layer == 5 and hp.index_owners == {0, 1} and hp.at(2).rope.freq_base == 500
    reason = mtp.why_not(find("dots3note"), hp, other.file.tensors)
    assert reason is not None and "MTP layers of dots3note models is not supported" in reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swa_qk_rope_head_dim": 32}, "swa_qk_rope_head_dim is 32; known is qk_rope_head_dim"),
        ({"swa_q_lora_rank": 32}, "swa_q_lora_rank is 32; known is q_lora_rank"),
        ({"attention_gate_type": "elementwise"}, "attention_gate_type"),
        ({"layer_types": ["full_attention"] * 5}, "known is an indexer in every layer without a window"),
        ({"layer_types": ["full_attention"] * 4}, "full_attention or sliding_attention for every layer"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling .* known is a plain rotation"),
        ({"use_dsa": False}, "use_dsa"),
    ],
)
def test_what_cannot_be_converted(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        opened(tmp_path / "model", *released(), **changes)


def test_numbers_of_the_file() -> None:
    """Layers without a window choose for themselves, so that stages can compute them; a file may lack the indexer."""
    metadata = tiny("dots3note").metadata
    hp, notices = HParams.from_gguf(metadata, {}, "x.gguf"), list[str]()
    assert [hp.at(il).window for il in range(4)] == [6, 0, 6, 0] and hp.index_owners == {1, 3}
    assert [(hp.at(il).n_head, hp.at(il).kv_row, hp.at(il).head_dim_v) for il in (0, 1)] == [(2, 64, 48), (4, 80, 32)]
    config = RunConfig()
    staged = config.__class__(**{f: getattr(config, f) for f in config.__slots__} | {
        "fleet": config.fleet.__class__(stages=2)})  # fmt: skip
    check_indexer(staged, hp, (), notices)
    assert not notices
    dense = HParams.from_gguf({k: v for k, v in metadata.items() if ".indexer." not in k}, {}, "x.gguf")
    check_indexer(staged, dense, (), notices)
    assert not dense.index_top_k and "attention covers all positions: x.gguf has no indexer" in notices[0]
    with pytest.raises(FormatError, match="gives layers with a window an indexer, or others none"):
        HParams.from_gguf(metadata | {PREFIX + "attention.indexer.types": np.array([True] * 4)}, {}, "x.gguf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A model and the logits of both texts; all experts are used, as choices among near ties differ."""
    made = tiny("dots3note", expert_used_count=8, **{"attention.indexer.top_k": 140})
    path = write_model(made, tmp_path_factory.mktemp("models") / "tiny.gguf")
    f32 = GGMLType.F32
    reference = ReferenceSession(path, GraphConfig(n_ctx=512, type_k=f32, type_v=f32, type_index=f32))
    wanted = [np.array(reference.decode(Batch.single(TEXTS[0], logits="all")))]
    reference = ReferenceSession(path, GraphConfig(n_ctx=512, type_k=f32, type_v=f32, type_index=f32))
    return path, np.array([*wanted, np.array(reference.decode(Batch.single(TEXTS[1], logits="all")))])


def config_of(path: Path, **changes: Any) -> RunConfig:
    usual = {"n_threads": 2, "n_threads_batch": 2, "type_k": "f32", "type_v": "f32", "type_index": "f32"}
    return RunConfig(model=path, n_ctx=512, warmup=False, **(usual | changes))


MODES: list[dict[str, Any]] = [
    {}, {"mla": 0}, {"mla": 1}, {"mla": 2}, {"mla": 1, "flash_attn": False}, {"mla": 0, "flash_attn": False},
    {"n_ubatch": 64}, {"n_ubatch": 7}, {"k_hadamard": True},
]  # fmt: skip


@pytest.mark.parametrize("changes", MODES, ids=str)
def test_modes_of_attention_and_sizes_of_batches(model: tuple[Path, np.ndarray], changes: dict[str, Any]) -> None:
    """A prompt that sees no more than may be chosen, one that does, and single tokens."""
    path, wanted = model
    with Session.open(config_of(path, **changes)) as session:
        found = [np.array(session.decode(Batch.single(TEXTS[0][:130], logits="all")))]
        found.append(np.array(session.decode(Batch.single(TEXTS[0][130:294], 130, logits="all"))))
        found += [np.array(session.decode(Batch.single(TEXTS[0][i : i + 1], i))) for i in range(294, 300)]
    assert np.abs(np.concatenate(found) - wanted[0]).max() < 1e-3 * wanted.std()


@pytest.mark.parametrize("mla", [0, 3])
def test_sequences(model: tuple[Path, np.ndarray], mla: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts share micro-batches in caches of windows; one is rolled back, saved, and loaded again."""
    monkeypatch.setattr(sizes, "SPARE", 8)
    monkeypatch.setattr(sequences, "SPARE", 4)
    path, wanted = model
    bound = 1e-3 * wanted.std()
    with Session.open(config_of(path, mla=mla, n_ubatch=16), n_ctx=1024, n_seq_max=2) as session:
        assert session.graph_config.n_window

        def check(*parts: tuple[int, int, int]) -> None:
            tokens = np.concatenate([TEXTS[i][first:end] for i, first, end in parts])
            pos = np.concatenate([np.arange(first, end) for _, first, end in parts]).astype(np.int32)
            seq = np.concatenate([np.full(end - first, i) for i, first, end in parts]).astype(np.int32)
            found = np.array(session.decode(Batch(tokens, pos, seq, np.ones(len(pos), bool))))
            assert np.abs(found - np.concatenate([wanted[i][first:end] for i, first, end in parts])).max() < bound

        check((0, 0, 133), (1, 0, 121))
        check((0, 133, 140), (1, 121, 180))
        session.decode(Batch.single(TEXTS[1][:3], 140))
        check((0, session.truncate(0, 140), 250))
        saved = session.sequences.save(0, 250)
        check((0, session.truncate(0, 10), 30), (1, 180, 181))
        session.sequences.load(0, saved)
        check((0, 250, 300), (1, 181, 300))
