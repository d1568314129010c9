"""Checkpoints as they are published in FP8, FP4, NVFP4 and INT4: what is kept bit for bit, and what is refused.

Codes are random; what they mean is written out here, value by value.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, MOE, N_VOCAB, bf16, build, drawn, llama_tensors, write_checkpoint
from factories import MemoryModel
from tiny_architectures import tiny

from ikcli.convert.kept_blocks import FACTORED
from ikcli.convert.pieces import NewRows, Numbers, TensorRows
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.main import main
from ikcli.models import GraphConfig
from ikcli.quant.decode import dequantize

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = np.array(
    [(-1) ** (c >> 7) * (np.ldexp(8 + c % 8, (c >> 3 & 15) - 10) if c >> 3 & 15 else np.ldexp(c % 8, -9))
     for c in range(256)], np.float32,
)  # fmt: skip
Checkpoint = dict[str, Any]
Rng = np.random.Generator


def ik(*args: object) -> int:
    return main([str(a) for a in args])


def convert(folder: Path, config: Checkpoint, tensors: Checkpoint, *options: object) -> GGUFFile:
    write_checkpoint(folder, config, tensors)
    out = folder / "out.gguf"
    assert ik("convert", folder, "--outfile", out, *options) == 0
    return open_gguf(out)


def values(file: GGUFFile, name: str) -> np.ndarray:
    t = file.tensors[name]
    if t.type == GGMLType.I32:
        return file.data(name).view(np.int32)
    return dequantize(file.data(name), t.type, t.shape)


def pairs(codes: np.ndarray) -> np.ndarray:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def fp8(rng: Rng, base: str, shape: tuple[int, int], block: int, scale: str) -> tuple[Checkpoint, np.ndarray]:
    """8-bit floats with a power of two for every square block; the tensors and their values."""
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[codes & 127 == 127] = 3
    powers = rng.integers(112, 124, [-(-n // block) for n in shape]).astype(np.uint8)
    full = np.repeat(np.repeat(powers, block, 0), block, 1)[: shape[0], : shape[1]]
    tensors = {f"{base}.weight": ("F8_E4M3", codes), f"{base}.{scale}": ("F8_E8M0", powers)}
    return tensors, E4M3[codes] * np.ldexp(np.float32(1), full.astype(np.int32) - 127)


def fp4(rng: Rng, base: str, shape: tuple[int, int]) -> tuple[Checkpoint, np.ndarray]:
    """Pairs of 4-bit floats as signed bytes, with a power of two for 32 of a row, as DeepSeek V4's experts."""
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    powers = rng.integers(112, 124, (shape[0], shape[1] // 32)).astype(np.uint8)
    tensors = {f"{base}.weight": pairs(codes).view(np.int8), f"{base}.scale": ("F8_E8M0", powers)}
    return tensors, E2M1[codes] * np.ldexp(np.float32(1), np.repeat(powers, 32, 1).astype(np.int32) - 127)


V4: Checkpoint = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 192, "vocab_size": N_VOCAB,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 16,
    "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2, "moe_intermediate_size": 160, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "num_hash_layers": 1, "num_nextn_predict_layers": 1,
    "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 5, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 8,
    "compress_ratios": [0, 4, 0], "compress_rope_theta": 160000, "rope_theta": 10000, "sliding_window": 128,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32,
                     "beta_slow": 1},
    "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "swiglu_limit": 10.0, "hidden_act": "silu",
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "expert_dtype": "fp4", "use_cache": True, "initializer_range": 0.02, "bos_token_id": 0, "eos_token_id": 1,
    "transformers_version": "4.57.1",
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
}  # fmt: skip


def v4_tensors(rng: Rng) -> tuple[Checkpoint, Checkpoint]:
    """The tensors of a small V4 as published, and the same with plain values."""
    n, ff, made, plain = V4["hidden_size"], V4["moe_intermediate_size"], {}, {}

    def put(tensors: Checkpoint, name: str, x: np.ndarray) -> None:
        made.update(tensors)
        plain[name] = x

    def half(name: str, *shape: int) -> None:
        bits = bf16(drawn(name, shape))
        put({name: bits}, name, (bits.astype(np.uint32) << 16).view(np.float32))

    def full(name: str, *shape: int) -> None:
        x = drawn(name, shape)
        put({name: x}, name, x)

    def eight(base: str, *shape: int) -> None:
        put(*(t := fp8(rng, base, (shape[0], shape[1]), 128, "scale"))[:1], f"{base}.weight", t[1])

    half("embed.weight", N_VOCAB, n)
    half("norm.weight", n)
    half("head.weight", N_VOCAB, n)
    for part, shape in (("fn", (4, 4 * n)), ("base", (4,)), ("scale", (1,))):
        full(f"hc_head_{part}", *shape)
    for block, ratio in (("layers.0", 0), ("layers.1", 4), ("mtp.0", 0)):
        for name, shape in (("wq_a", (64, n)), ("wq_b", (256, 64)), ("wkv", (64, n)), ("wo_a", (64, 128)),
                            ("wo_b", (n, 64))):  # fmt: skip
            eight(f"{block}.attn.{name}", *shape)
        for name, shape in (("attn_norm.weight", (n,)), ("ffn_norm.weight", (n,)), ("attn.q_norm.weight", (64,)),
                            ("attn.kv_norm.weight", (64,)), ("ffn.gate.weight", (8, n))):  # fmt: skip
            half(f"{block}.{name}", *shape)
        full(f"{block}.attn.attn_sink", 4)
        for which in ("attn", "ffn"):
            for part, shape in (("fn", (24, 4 * n)), ("base", (24,)), ("scale", (3,))):
                full(f"{block}.hc_{which}_{part}", *shape)
        if block == "layers.0":
            table = drawn("tid2eid", (N_VOCAB, 2))
            put({f"{block}.ffn.gate.tid2eid": table}, f"{block}.ffn.gate.tid2eid", table)
        else:
            full(f"{block}.ffn.gate.bias", 8)
        for e in range(8):
            for name, shape in (("w1", (ff, n)), ("w2", (n, ff)), ("w3", (ff, n))):
                base = f"{block}.ffn.experts.{e}.{name}"
                tensors, x = fp4(rng, base, shape)
                put(tensors, f"{base}.weight", x)
        for name, shape in (("w1", (ff, n)), ("w2", (n, ff)), ("w3", (ff, n))):
            eight(f"{block}.ffn.shared_experts.{name}", *shape)
        if ratio:
            for part, width in (("attn.compressor", 64), ("attn.indexer.compressor", 32)):
                full(f"{block}.{part}.ape", ratio, 2 * width)
                half(f"{block}.{part}.norm.weight", width)
                half(f"{block}.{part}.wgate.weight", 2 * width, n)
                half(f"{block}.{part}.wkv.weight", 2 * width, n)
            eight(f"{block}.attn.indexer.wq_b", 128, 64)
            half(f"{block}.attn.indexer.weights_proj.weight", 4, n)
        if block == "mtp.0":
            eight(f"{block}.e_proj", n, n)
            half(f"{block}.enorm.weight", n)
    return made, plain


def test_deepseek_v4_as_published(tmp_path: Path, rng: Rng) -> None:
    """Experts stay MXFP4, FP8 becomes bfloat16, and no value differs from those of a plain checkpoint."""
    made, plain = v4_tensors(rng)
    found = convert(tmp_path / "a", V4, made)
    config = {key: value for key, value in V4.items() if key != "quantization_config"}
    wanted = convert(tmp_path / "b", config, plain, "--outtype", "f32")
    assert list(found.tensors) == list(wanted.tensors) and len(found.tensors) > 50
    for name in wanted.tensors:
        np.testing.assert_array_equal(values(found, name), values(wanted, name), err_msg=name)
    types = {name.split(".", 2)[2]: t.type for name, t in found.tensors.items() if name.startswith("blk.1.")}
    assert {types[f"ffn_{part}_exps.weight"] for part in ("gate", "down", "up")} == {GGMLType.MXFP4}
    assert {types[f"{part}.weight"] for part in ("attn_q_a", "attn_kv", "ffn_up_shexp", "indexer.attn_q_b")} == {
        GGMLType.BF16
    }
    assert found.metadata["general.file_type"] == 38
    keys = {k: v for k, v in found.metadata.items() if not k.startswith("general.")}
    assert all(np.array_equal(v, wanted.metadata[k]) for k, v in keys.items()) and len(keys) > 30


def test_deepseek_v4_in_another_type(tmp_path: Path, rng: Rng) -> None:
    made, plain = v4_tensors(rng)
    found = convert(tmp_path / "a", V4, made, "--outtype", "bf16")
    config = {key: value for key, value in V4.items() if key != "quantization_config"}
    wanted = convert(tmp_path / "b", config, plain, "--outtype", "bf16")
    for name, t in found.tensors.items():
        assert t.type == wanted.tensors[name].type
        np.testing.assert_array_equal(found.data(name), wanted.data(name), err_msg=name)


@pytest.mark.slow("encodes q8_0 and mxfp4")
def test_deepseek_v4_keeps_its_experts_by_a_rule(tmp_path: Path, rng: Rng) -> None:
    made, plain = v4_tensors(rng)
    found = convert(tmp_path, V4, made, "--outtype", "q8_0", "--custom-q", "exps=mxfp4")
    wanted = np.stack([plain[f"layers.1.ffn.experts.{e}.w2.weight"] for e in range(8)])
    assert found.tensors["blk.1.ffn_down_exps.weight"].type == GGMLType.MXFP4
    assert found.tensors["blk.1.attn_q_a.weight"].type == GGMLType.Q8_0
    np.testing.assert_array_equal(values(found, "blk.1.ffn_down_exps.weight"), wanted)


def test_factors_are_multiplied_by_those_of_the_model(tmp_path: Path) -> None:
    """Gemma 4 has a factor per expert under the name that those of NVFP4 experts have."""
    name, own, factors = "blk.0.ffn_down_exps.scale", np.array([0.5, 2, 3], np.float32), np.arange(1, 4, dtype="f4")
    places = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
    m = build(tmp_path, LLAMA, dict(zip(places, (bf16(own), factors), strict=True)))
    m.tensors[name] = NewRows(name, (3,), GGMLType.F32, (TensorRows(places[0], 1, 3),))
    m.numbers[name] = Numbers(tuple((places[1], i) for i in range(3)))
    m.add_numbers()
    assert m.tensors[name].shape == (3,)
    np.testing.assert_array_equal(m.tensors[name].read(m.source, 0, 1), [own * factors])


def test_deepseek_v4_with_experts_in_fp8(tmp_path: Path, rng: Rng) -> None:
    made, plain = v4_tensors(rng)
    for base in [name.removesuffix(".weight") for name in plain if ".experts." in name]:
        shape = plain[f"{base}.weight"].shape
        tensors, plain[f"{base}.weight"] = fp8(rng, base, shape, 128, "scale")
        made |= tensors
    found = convert(tmp_path / "a", V4 | {"expert_dtype": "fp8"}, made)
    assert found.metadata["general.file_type"] == 32
    np.testing.assert_array_equal(
        values(found, "blk.1.ffn_up_exps.weight"),
        np.stack([plain[f"layers.1.ffn.experts.{e}.w3.weight"] for e in range(8)]),
    )


W1 = "layers.1.ffn.experts.3.w1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{W1}.scale": None}, rf"{W1}\.weight is of a kind that is not understood: it has no scale beside it"),
        ({"layers.1.attn.wkv.scale": None}, r"layers\.1\.attn\.wkv\.weight is of a kind .* no scale beside it"),
        ({"layers.1.attn.wkv.weight": None}, r"layers\.1\.attn\.wkv\.scale is of a kind that is not understood"),
        (
            {f"{W1}.scale": ("F8_E8M0", np.full((160, 5), 120, np.uint8))},
            rf"{W1}\.scale: scales of \[160, 5\] do not fit",
        ),
        (
            {f"{W1}.scale": ("F8_E8M0", np.full((160, 6), 255, np.uint8))},
            rf"{W1}\.scale: a scale is not a finite number",
        ),
        (
            {"layers.1.attn.wkv.scale": ("F8_E8M0", np.array([[120, 255]], np.uint8))},
            r"layers\.1\.attn\.wkv\.scale: a scale is not a finite number",
        ),
        (
            {"layers.1.attn.wkv.scale": ("F8_E8M0", np.full((3, 2), 120, np.uint8))},
            r"wkv\.scale: scales of \[3, 2\] do not fit layers\.1\.attn\.wkv\.weight of \[64, 192\] in blocks of",
        ),
    ],
    ids=["fp4", "fp8", "weight", "grid4", "nan4", "nan8", "grid8"],
)
def test_scales_that_lack_or_do_not_fit_are_named(
    tmp_path: Path, rng: Rng, capsys: pytest.CaptureFixture[str], changes: Checkpoint, message: str
) -> None:
    made, _ = v4_tensors(rng)
    tensors = {name: x for name, x in (made | changes).items() if x is not None}
    write_checkpoint(tmp_path / "a", V4, tensors)
    assert ik("convert", tmp_path / "a", "--outfile", tmp_path / "out.gguf") == 1
    text = capsys.readouterr().err
    assert re.search(message, text) and "Traceback" not in text
    assert not list(tmp_path.glob("*.gguf*"))


class NvFp4:
    """Writes weights as ModelOpt or compressed-tensors has NVFP4, and knows what the codes mean."""

    def __init__(self, rng: Rng, producer: str) -> None:
        self.rng, self.modelopt = rng, producer == "modelopt"
        self.tensors: Checkpoint = {}
        self.codes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.factors: dict[str, np.float32] = {}
        self.inputs: dict[str, np.float32] = {}

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        base = name.removesuffix("weight")
        codes = self.rng.integers(0, 16, shape).astype(np.uint8)
        scales = self.rng.integers(0, 127, (*shape[:-1], shape[-1] // 16)).astype(np.uint8)
        factor, inputs = self.rng.integers(1, 64, 2).astype(np.float32) / np.float32(4096)
        self.codes[name], self.factors[name], self.inputs[name] = (codes, scales), factor, inputs
        self.tensors[f"{base}weight_scale"] = ("F8_E4M3", scales)
        if self.modelopt:
            self.tensors |= {
                name: pairs(codes),
                f"{base}weight_scale_2": np.array(factor),
                f"{base}input_scale": np.array(inputs),
            }
        else:
            factor, inputs = (np.float32(1) / np.array([x]) for x in (factor, inputs))
            self.tensors |= {f"{name}_packed": pairs(codes), f"{name}_global_scale": factor}
            self.tensors[f"{base}input_global_scale"] = inputs
            self.factors[name], self.inputs[name] = np.float32(1) / factor[0], np.float32(1) / inputs[0]

    def blocks(self, name: str) -> np.ndarray:
        """What the codes mean, without the factor."""
        codes, scales = self.codes[name]
        return E2M1[codes] * np.repeat(E4M3[scales], 16, -1)

    @property
    def config(self) -> Checkpoint:
        settings: Checkpoint = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
        if not self.modelopt:
            weights = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
            settings = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                        "config_groups": {"group_0": {"weights": weights}}}  # fmt: skip
        return {"quantization_config": settings}


def nvfp4_checkpoint(rng: Rng, producer: str, config: Checkpoint) -> tuple[NvFp4, Checkpoint]:
    made, others = NvFp4(rng, producer), {}
    for name, x in llama_tensors(config).items():
        if name.endswith("_proj.weight"):
            made.add(name, x.shape)
        else:
            others[name] = bf16(x)
    return made, others


PLACES = {"self_attn.q": "attn_q", "self_attn.k": "attn_k", "self_attn.v": "attn_v", "self_attn.o": "attn_output",
          "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down"}  # fmt: skip


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_nvfp4_is_kept_with_its_factors(tmp_path: Path, rng: Rng, producer: str) -> None:
    made, others = nvfp4_checkpoint(rng, producer, LLAMA)
    found = convert(tmp_path, LLAMA | made.config, others | made.tensors)
    assert found.metadata["general.file_type"] == 39
    for il in range(2):
        for old, new in PLACES.items():
            name, place = f"model.layers.{il}.{old}_proj.weight", f"blk.{il}.{new}"
            wanted = made.blocks(name)
            if new in ("attn_q", "attn_k"):  # rotated pairs become adjacent
                heads = len(wanted) // 64
                wanted = wanted.reshape(heads, 2, 32, -1).swapaxes(1, 2).reshape(wanted.shape)
            assert found.tensors[f"{place}.weight"].type == GGMLType.NVFP4
            np.testing.assert_array_equal(values(found, f"{place}.weight"), wanted)
            assert values(found, f"{place}.scale").tolist() == [made.factors[name]]
            assert values(found, f"{place}.input_scale").tolist() == [made.inputs[name]]
    assert {found.tensors[f"{n}.weight"].type for n in ("token_embd", "output")} == {GGMLType.BF16}


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_nvfp4_experts_have_factors_each(tmp_path: Path, rng: Rng, producer: str) -> None:
    made, others = nvfp4_checkpoint(rng, producer, MOE)
    found = convert(tmp_path, MOE | made.config, others | made.tensors)
    for part in ("gate", "up", "down"):
        names = [f"model.layers.1.mlp.experts.{e}.{part}_proj.weight" for e in range(4)]
        place = f"blk.1.ffn_{part}_exps"
        assert found.tensors[f"{place}.weight"].type == GGMLType.NVFP4
        np.testing.assert_array_equal(values(found, f"{place}.weight"), np.stack([made.blocks(n) for n in names]))
        assert values(found, f"{place}.scale").tolist() == [made.factors[n] for n in names]
        assert values(found, f"{place}.input_scale").tolist() == [made.inputs[n] for n in names]


def int4_checkpoint(rng: Rng, group: int, scale: str = "BF16") -> tuple[Checkpoint, dict[str, np.ndarray]]:
    """Experts as compressed-tensors packs symmetric integers of 4 bits, and their values."""
    tensors, wanted = {}, {}
    for name, x in llama_tensors(MOE).items():
        if ".experts." not in name:
            tensors[name] = bf16(x)
            continue
        n, m = x.shape
        numbers = rng.integers(-8, 8, (n, m))
        words = np.zeros((n, m // 8), np.uint32)
        for i in range(8):
            words |= (numbers[:, i::8] + 8).astype(np.uint32) << np.uint32(4 * i)
        scales = bf16(rng.random((n, m // group)) * 0.01 + 0.0001)
        values = (scales.astype(np.uint32) << 16).view(np.float32)
        tensors |= {f"{name}_packed": words.view(np.int32), f"{name}_shape": np.array([n, m])}
        tensors[f"{name}_scale"] = scales if scale == "BF16" else values
        wanted[name] = numbers.astype(np.float32) * np.repeat(values, group, axis=1)
    return tensors, wanted


def int4_config(group: int) -> Checkpoint:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return {"quantization_config": settings | {"config_groups": {"group_0": {"weights": weights}}}}


@pytest.mark.parametrize("group", [32, 128])
def test_int4_is_kept_as_q4_0(tmp_path: Path, rng: Rng, group: int) -> None:
    tensors, wanted = int4_checkpoint(rng, group)
    found = convert(tmp_path, MOE | int4_config(group), tensors)
    assert found.metadata["general.file_type"] == 2
    assert found.tensors["blk.1.attn_q.weight"].type == GGMLType.BF16
    for part in ("gate", "up", "down"):
        name = f"blk.1.ffn_{part}_exps.weight"
        assert found.tensors[name].type == GGMLType.Q4_0 and f"blk.1.ffn_{part}_exps.scale" not in found.tensors
        parts = [wanted[f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"] for e in range(4)]
        np.testing.assert_array_equal(values(found, name), np.stack(parts))


def test_int4_with_scales_of_32_bits_gets_16_bits(tmp_path: Path, rng: Rng) -> None:
    tensors, _ = int4_checkpoint(rng, 32, "F32")
    found = convert(tmp_path, MOE | int4_config(32), tensors)
    assert {t.type for t in found.tensors.values()} == {GGMLType.F32, GGMLType.BF16}
    assert found.metadata["general.file_type"] == 32


def test_a_scale_that_q4_0_cannot_hold_is_named(tmp_path: Path, rng: Rng, capsys: pytest.CaptureFixture[str]) -> None:
    tensors, _ = int4_checkpoint(rng, 32)
    name = "model.layers.0.mlp.experts.2.up_proj.weight_scale"
    tensors[name][3, 1] = 0x7F00
    write_checkpoint(tmp_path, MOE | int4_config(32), tensors)
    assert ik("convert", tmp_path, "--outfile", tmp_path / "out.gguf") == 1
    assert f"tensor {name}: a scale is not a number below 65536" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gguf*"))


def test_settings_of_modelopt_in_a_file_of_their_own(tmp_path: Path, rng: Rng) -> None:
    """Attention in FP8 beside an NVFP4 feed-forward part gets 16 bits, not 32."""
    made, others = NvFp4(rng, "modelopt"), {}
    for name, x in llama_tensors(LLAMA).items():
        if "mlp" in name:
            made.add(name, x.shape)
        elif name.endswith("_proj.weight"):
            codes = rng.integers(0, 120, x.shape).astype(np.uint8)
            others |= {name: ("F8_E4M3", codes), f"{name}_scale": np.array(0.5, np.float32)}
        else:
            others[name] = bf16(x)
    (tmp_path / "a").mkdir()
    settings = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "a" / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    found = convert(tmp_path / "a", LLAMA, others | made.tensors)
    types = {name: t.type for name, t in found.tensors.items()}
    assert types["blk.1.attn_v.weight"] == GGMLType.BF16 and types["blk.1.ffn_up.weight"] == GGMLType.NVFP4
    codes = others["model.layers.1.self_attn.v_proj.weight"][1]
    np.testing.assert_array_equal(values(found, "blk.1.attn_v.weight"), E4M3[codes] / 2)


@pytest.mark.slow("records graphs of many architectures")
@pytest.mark.parametrize("arch", ["cohere2", "falcon-h1", "gemma3", "glm4moe", "gpt-oss", "jamba", "phi3", "qwen3next"])
def test_architectures_apply_the_factors_that_a_conversion_keeps(arch: str) -> None:
    def logits(model: MemoryModel) -> np.ndarray:
        batch = Batch.single(np.arange(5, dtype=np.int32), logits="all")
        return np.array(ReferenceSession(model, GraphConfig(n_ctx=16)).decode(batch))

    wanted, model = logits(tiny(arch)), tiny(arch)
    names = [n for n, t in model.tensors.items() if FACTORED.fullmatch(n) and len(t.shape) > 1]
    assert len(names) > 6
    for name in names:
        shape = model.tensors[name].shape
        model.set(name, model.values(name) / 2)
        factors = np.full(shape[2] if len(shape) > 2 else 1, 2, np.float32)
        model.set(name.replace(".weight", ".scale"), factors)
    np.testing.assert_allclose(logits(model), wanted, atol=1e-4 * np.abs(wanted).max())
