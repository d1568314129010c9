"""Conversions of heads that draft for another model: names, keys and values, and drafts of what was converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, N_VOCAB, bf16, drawn, llama_tensors, write_checkpoint
from draft_answers import check_answers
from external_heads import Seen, rms, rotated, softmax

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.mtp import Draft
from ikcli.engine.run.session import Session
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.main import main
from ikcli.settings.run import RunConfig
from ikcli.settings.server import ServerConfig
from ikcli.settings.values import parse_spec_type

Arrays = dict[str, np.ndarray]
WIDTH, N_IDS = 64, 40
MODEL = LLAMA | {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 32,
                 "max_position_embeddings": 2048}  # fmt: skip
EAGLE = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1,
    "head_dim": 32, "rope_theta": 700.0, "draft_vocab_size": N_IDS, "target_hidden_size": WIDTH,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": N_VOCAB,
    "rms_norm_eps": 1e-5, "rope_theta": 700.0, "max_position_embeddings": 2048, "block_size": 6,
    "num_target_layers": 6, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
}  # fmt: skip
DSPARK = DFLASH | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 16, "markov_head_type": "vanilla"}
TOKENS = np.random.default_rng(1).integers(0, N_VOCAB, 40).astype(np.int32)


def eagle_tensors(n: int = 96, prefix: str = "midlayer.") -> Arrays:
    """An EAGLE-3 head of its own width, with embeddings of its own and a part of the vocabulary."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (n, 3 * WIDTH), "norm": (n,), "lm_head": (N_IDS, n), "embed_tokens": (N_VOCAB, n),
        f"{prefix}hidden_norm": (n,), f"{prefix}input_layernorm": (n,), f"{prefix}post_attention_layernorm": (n,),
        f"{prefix}self_attn.q_proj": (128, 2 * n), f"{prefix}self_attn.k_proj": (64, 2 * n),
        f"{prefix}self_attn.v_proj": (64, 2 * n), f"{prefix}self_attn.o_proj": (n, 128),
        f"{prefix}mlp.gate_proj": (64, n), f"{prefix}mlp.up_proj": (64, n), f"{prefix}mlp.down_proj": (n, 64),
    }  # fmt: skip
    ids = np.sort(np.random.default_rng(3).choice(N_VOCAB, N_IDS, replace=False))
    mask = np.zeros(N_VOCAB, np.uint8)
    mask[ids] = 1
    found = {f"{name}.weight": drawn(name, shape) for name, shape in shapes.items()}
    return found | {"d2t": ids.astype(np.int64) - np.arange(N_IDS), "t2d": mask}


def dflash_tensors(*, markov: bool = False) -> Arrays:
    """A DFlash head of two layers, of the model's embeddings; with DSpark's matrices if `markov`."""
    shapes: dict[str, tuple[int, ...]] = {"fc": (WIDTH, 2 * WIDTH), "hidden_norm": (WIDTH,), "norm": (WIDTH,)}
    for il in range(2):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,), "self_attn.q_norm": (32,),
            "self_attn.k_norm": (32,), "self_attn.q_proj": (128, WIDTH), "self_attn.k_proj": (64, WIDTH),
            "self_attn.v_proj": (64, WIDTH), "self_attn.o_proj": (WIDTH, 128), "mlp.gate_proj": (96, WIDTH),
            "mlp.up_proj": (96, WIDTH), "mlp.down_proj": (WIDTH, 96),
        }  # fmt: skip
        shapes |= {f"layers.{il}.{name}": shape for name, shape in layer.items()}
    if markov:
        shapes |= {"markov_head.markov_w1": (N_VOCAB, 16), "markov_head.markov_w2": (N_VOCAB, 16),
                   "confidence_head.proj": (1, WIDTH + 16), "embed_tokens": (N_VOCAB, WIDTH)}  # fmt: skip
    found = {f"{name}.weight": drawn(name, shape) for name, shape in shapes.items()}
    return found | ({"confidence_head.proj.bias": np.zeros(1, np.float32)} if markov else {})


def model(folder: Path) -> Path:
    """A checkpoint to draft for, and its file beside it."""
    source = write_checkpoint(folder / "model", MODEL, llama_tensors(MODEL))
    assert main(["convert", str(source), "--outfile", str(folder / "model.gguf"), "--outtype", "f32"]) == 0
    return source


def converted(folder: Path, config: dict[str, Any], tensors: Arrays, outtype: str = "f32") -> Path:
    """The file of a head."""
    source = write_checkpoint(folder / "head", config, tensors)
    (source / "tokenizer.json").unlink()  # the vocabulary is the model's
    out = folder / "head.gguf"
    target = folder / "model" if (folder / "model").exists() else model(folder)
    words = ["--outfile", str(out), "--target-model-dir", str(target), "--outtype", outtype]
    assert main(["convert", str(source), *words]) == 0
    return out


# --- what converters of llama.cpp and ik_llama.cpp write --------------------------------------------------------------
@pytest.mark.parametrize("form", ["flat", "nested"])
def test_an_eagle3_head(form: str, tmp_path: Path) -> None:
    """As SpecForge and EAGLE write it, and as speculators does."""
    config: dict[str, Any] = EAGLE
    tensors = eagle_tensors(prefix="layers.0." if form == "nested" else "midlayer.")
    wanted = [2, 3, 3]
    if form == "nested":
        outer = {"draft_vocab_size", "target_hidden_size", "architectures", "tie_word_embeddings"}
        inner = {k: v for k, v in EAGLE.items() if k not in outer}
        config = {k: v for k, v in EAGLE.items() if k in outer} | {
            "architectures": ["Eagle3Speculator"], "transformer_layer_config": inner, "norm_before_residual": True,
            "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 5], "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
        }  # fmt: skip
        tensors["input_norm.weight"] = drawn("input_norm", (3 * WIDTH,))
        wanted = [1, 4, 5]
    made = open_gguf(converted(tmp_path, config, tensors))
    keys = {k.removeprefix("eagle3."): v for k, v in made.metadata.items() if k.startswith("eagle3.")}
    assert np.array_equal(keys.pop("extract_layers"), wanted) and np.array_equal(keys.pop("target_layers"), wanted)
    assert keys.pop("norm_before_residual") is (form == "nested")
    assert keys.pop("norm_before_fc", False) is (form == "nested")
    assert keys == {
        "block_count": 1, "context_length": 2048, "embedding_length": 96, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.value_length": 32, "attention.layer_norm_rms_epsilon": pytest.approx(1e-5), "rope.freq_base": 700.0,
        "rope.dimension_count": 32, "vocab_size": N_VOCAB, "target_hidden_size": WIDTH,
    }  # fmt: skip
    file = open_gguf(tmp_path / "model.gguf")
    assert made.get("tokenizer.ggml.tokens") == file.get("tokenizer.ggml.tokens")
    assert set(made.tensors) == {
        "fc.weight", "output_norm.weight", "output.weight", "token_embd.weight", "d2t",
        *(f"blk.0.{part}.weight" for part in (
            "attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up",
            "ffn_down")),
    } | ({"enc.output_norm.weight"} if form == "nested" else set())  # fmt: skip
    assert made.tensors["d2t"].type == GGMLType.I64
    ids = tensors["d2t"] + np.arange(N_IDS)
    assert np.array_equal(made.data("d2t").view(np.int64), ids) and np.array_equal(np.flatnonzero(tensors["t2d"]), ids)


def test_a_llama_class_with_a_part_of_a_vocabulary_is_eagle3(tmp_path: Path) -> None:
    config = EAGLE | {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    tensors = {name: bf16(x) if x.dtype == np.float32 else x for name, x in eagle_tensors().items()}
    made = open_gguf(converted(tmp_path, config, tensors, "auto"))
    assert made.arch == "eagle3" and made.tensors["rope_freqs.weight"].shape == (16,)
    assert made.tensors["fc.weight"].type == GGMLType.BF16


@pytest.mark.parametrize("markov", [False, True], ids=["dflash", "dspark"])
def test_a_dflash_head(markov: bool, tmp_path: Path) -> None:
    tensors = dflash_tensors(markov=markov)
    more = {"attention_value_scale": 0.7, "backbone_rotary_base": 300.0}
    config = (DSPARK if markov else DFLASH) | {"dflash_config": DFLASH["dflash_config"] | more}
    made = open_gguf(converted(tmp_path, config, tensors))
    keys = {k.removeprefix("dflash-draft."): v for k, v in made.metadata.items() if k.startswith("dflash-draft.")}
    assert np.array_equal(keys.pop("dflash.target_layer_ids"), [0, 2])
    assert keys == {
        "block_count": 2, "context_length": 2048, "embedding_length": WIDTH, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.value_length": 32, "attention.layer_norm_rms_epsilon": pytest.approx(1e-5), "rope.freq_base": 700.0,
        "rope.dimension_count": 32, "attention.causal": False, "attention.value_scale": pytest.approx(0.7),
        "dflash.backbone_rotary_base": 300.0, "dflash.block_size": 6, "dflash.mask_token_id": 7,
        "dflash.n_target_features": 2 * WIDTH,
    }  # fmt: skip
    layer = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm",
             "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down")  # fmt: skip
    wanted = {f"blk.{il}.{part}.weight" for il in range(2) for part in layer}
    wanted |= {"dflash_fc.weight", "dflash_hidden_norm.weight", "output_norm.weight"}
    if markov:
        wanted |= {"markov_w1.weight", "markov_w2.weight", "conf_proj.weight", "conf_proj.bias"}
        assert made.tensors["conf_proj.weight"].shape == (WIDTH + 16,)
    assert set(made.tensors) == wanted
    got = made.data("blk.1.attn_q.weight").view(np.float32).reshape(128, WIDTH)
    assert np.array_equal(got, tensors["layers.1.self_attn.q_proj.weight"])


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = model(tmp_path)

    def says(config: dict[str, Any], tensors: Arrays, *words: str) -> str:
        source = write_checkpoint(tmp_path / "bad", config, tensors)
        capsys.readouterr()
        assert main(["convert", str(source), *words, "--dry-run"]) in (1, 2)
        return capsys.readouterr().err

    eagle, beside = eagle_tensors(), ("--target-model-dir", str(target))
    assert "with --target-model-dir" in says(EAGLE, eagle)
    assert "--target-model-dir is for heads" in says(MODEL, llama_tensors(MODEL), *beside)
    assert "config.json" in says(EAGLE, eagle, "--target-model-dir", str(tmp_path))
    assert "has ids outside the vocabulary" in says(EAGLE, eagle | {"d2t": eagle["d2t"] + N_VOCAB}, *beside)
    assert "two tokens of the same id" in says(EAGLE, eagle | {"d2t": -np.arange(N_IDS)}, *beside)
    assert "'fc.weight' has wrong shape" in says(EAGLE, eagle | {"fc.weight": eagle["fc.weight"][:, :-1]}, *beside)
    short = {k: v for k, v in eagle.items() if k != "midlayer.hidden_norm.weight"}
    assert "'blk.0.attn_norm_2.weight' is missing" in says(EAGLE, short, *beside)
    odd = eagle | {"midlayer.self_attn.v_proj.bias": np.zeros(64, np.float32)}
    assert "blk.0.attn_v.bias has no use" in says(EAGLE, odd, *beside)
    assert "key norm_output (True) is not understood" in says(EAGLE | {"norm_output": True}, eagle, *beside)
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 6]}
    assert "should be layers of the model" in says(EAGLE | layers, eagle, *beside)
    assert "of another model" in says(EAGLE | {"target_hidden_size": 96}, eagle, *beside)
    dflash = dflash_tensors()
    assert "heads with windows" in says(DFLASH | {"use_sliding_window": True, "sliding_window": 8}, dflash, *beside)
    assert "key mask_token_id is None" in says(DFLASH | {"dflash_config": {"target_layer_ids": [1]}}, dflash, *beside)
    assert "markov_head.markov_w1.weight is missing" in says(DSPARK, dflash, *beside)
    assert "a DFlash head with windows" in says(
        DFLASH | {"architectures": ["DFlashLagunaForCausalLM"]}, dflash, *beside
    )


# --- logits of checkpoints, written out from their code -------------------------------------------------------------
def causal(q: Any, k: Any, v: Any) -> Any:
    """Attention of rows to themselves and those before, with two heads per key."""
    scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, 2, 1)) / np.sqrt(q.shape[-1])
    p = softmax(np.where(np.tri(len(q), dtype=bool), scores, -np.inf))
    return np.einsum("hij,jhd->ihd", p, np.repeat(v, 2, 1)).reshape(len(q), -1)


def eagle_rows(w: Arrays, tokens: Any, states: Any) -> tuple[Any, Any]:
    """Logits and states of EAGLE's code at positions 0.., which rotates halves of heads."""
    n, eps, freqs = len(tokens), 1e-5, 700.0 ** (-np.arange(0, 32, 2) / 32)
    layer = {k.removeprefix("midlayer."): v for k, v in w.items() if k.startswith("midlayer.")}
    embedded = rms(w["embed_tokens.weight"][tokens], layer["input_layernorm.weight"], eps)
    both = np.concatenate([embedded, rms(states, layer["hidden_norm.weight"], eps)], 1)
    q, k, v = ((both @ layer[f"self_attn.{x}_proj.weight"].T).reshape(n, -1, 32) for x in "qkv")
    q, k = (rotated(x, np.arange(n), freqs) for x in (q, k))
    x = states + causal(q, k, v) @ layer["self_attn.o_proj.weight"].T
    y = rms(x, layer["post_attention_layernorm.weight"], eps)
    gate = y @ layer["mlp.gate_proj.weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"], eps) @ w["lm_head.weight"].T, x


def block_logits(w: Arrays, table: Any, output: Any, features: Any, token: int, n_past: int, n: int) -> Any:
    """Logits of the n tokens after `token`, a block that the code of DFlash computes at once."""
    eps, freqs = 1e-5, 700.0 ** (-np.arange(0, 32, 2) / 32)
    given = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = table[[token, *[7] * n]]
    for il in range(2):
        layer = {k.removeprefix(f"layers.{il}."): v for k, v in w.items() if k.startswith(f"layers.{il}.")}
        own = rms(x, layer["input_layernorm.weight"], eps)
        rows, pos = np.concatenate([given, own]), np.arange(n_past + n + 1)
        k, v = ((rows @ layer[f"self_attn.{c}_proj.weight"].T).reshape(len(rows), -1, 32) for c in "kv")
        q = (own @ layer["self_attn.q_proj.weight"].T).reshape(n + 1, -1, 32)
        q = rotated(rms(q, layer["self_attn.q_norm.weight"], eps), pos[n_past:], freqs)
        k = rotated(rms(k, layer["self_attn.k_norm.weight"], eps), pos, freqs)
        p = softmax(np.einsum("ihd,jhd->hij", q, np.repeat(k, 2, 1)) / np.sqrt(32))
        cur = np.einsum("hij,jhd->ihd", p, np.repeat(v, 2, 1)).reshape(n + 1, -1)
        x = x + cur @ layer["self_attn.o_proj.weight"].T
        y = rms(x, layer["post_attention_layernorm.weight"], eps)
        gate = y @ layer["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"], eps)[1:] @ output.T


def drafted(folder: Path, head: Path, kind: str, n_past: int) -> Draft:
    """A draft of three tokens after n_past + 1 tokens."""
    server = ServerConfig(spec_type=parse_spec_type(kind), model_draft=head)
    config = RunConfig(model=folder / "model.gguf", server=server, n_threads=2, n_threads_batch=2, warmup=False,
                       n_ctx=256, type_k="f32", type_v="f32")  # fmt: skip
    with Session.open(config, n_step=8) as session:
        assert session.heads is not None
        session.decode(Batch.single(TOKENS[:n_past]))
        draft = Draft(0, TOKENS[: n_past + 1], 3, 0.0, [], [])
        session.heads.draft([draft])
    return draft


def chances(logits: Any) -> Any:
    """The probability of the best token of every row."""
    return softmax(np.asarray(logits, np.float64)).max(-1)


def test_an_eagle3_head_drafts_what_the_checkpoint_says(tmp_path: Path) -> None:
    tensors = eagle_tensors()
    head = converted(tmp_path, EAGLE, tensors)
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    seen, ids, n_past = Seen(tmp_path / "model.gguf", TOKENS), tensors["d2t"] + np.arange(N_IDS), 20
    given = np.concatenate([seen.values[f"l_out-{il - 1}"][:n_past] for il in (2, 3, 3)], 1) @ w["fc.weight"].T
    draft = drafted(tmp_path, head, "eagle3", n_past)
    text, found = TOKENS[1 : n_past + 1].tolist(), []
    for _ in range(3):
        logits, states = eagle_rows(w, text, given)
        found.append(logits[-1])
        text, given = [*text, int(ids[logits[-1].argmax()])], np.concatenate([given, states[-1:]])
    assert draft.found == text[n_past:]
    assert np.allclose(draft.probabilities, chances(found), rtol=2e-3)


def test_a_dflash_head_drafts_what_the_checkpoint_says(tmp_path: Path) -> None:
    tensors, n_past = dflash_tensors(), 20
    head = converted(tmp_path, DFLASH, tensors)
    w, trunk = ({k: v.astype(np.float64) for k, v in t.items()} for t in (tensors, llama_tensors(MODEL)))
    seen = Seen(tmp_path / "model.gguf", TOKENS)
    features = np.concatenate([seen.values[f"l_out-{il}"][:n_past] for il in (0, 2)], 1)
    wanted = block_logits(w, trunk["model.embed_tokens.weight"], trunk["lm_head.weight"], features,
                          int(TOKENS[n_past]), n_past, 3)  # fmt: skip
    draft = drafted(tmp_path, head, "dflash", n_past)
    assert draft.found == wanted.argmax(1).tolist()
    assert np.allclose(draft.probabilities, chances(wanted), rtol=2e-3)


@pytest.mark.slow("as heads that tests make")
@pytest.mark.parametrize("kind", ["draft-eagle3", "draft-dflash", "draft-dspark"])
def test_drafts_of_converted_heads_change_no_token(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"draft-eagle3": (EAGLE, eagle_tensors()), "draft-dflash": (DFLASH, dflash_tensors()),
             "draft-dspark": (DSPARK, dflash_tensors(markov=True))}  # fmt: skip
    head = converted(tmp_path, *heads[kind])
    spec = {"spec_type": parse_spec_type(f"{kind}:p_min=0"), "model_draft": head, "spec_autotune": False}
    check_answers(spec, {"model": tmp_path / "model.gguf", "n_ctx": 1024, "n_ubatch": 32}, monkeypatch)
