"""Tensor names and shapes of full-size DeepSeek models, so that sizes and rules can be checked without their files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ikcli.engine.run.log_lines import TensorRow
from ikcli.gguf.types import TYPES, tensor_n_bytes

TYPES = {traits.name: type for type, traits in TYPES.items()}


@dataclass(frozen=True)
class Dims:
    n_layer: int
    n_embd: int
    n_ff: int
    n_ff_exp: int
    n_expert: int
    n_shared: int
    n_dense: int
    n_head: int
    q_lora: int
    n_vocab: int
    has_bias: bool


V3 = Dims(61, 7168, 18432, 2048, 256, 1, 3, 128, 1536, 129280, True)
V25 = Dims(60, 5120, 12288, 1536, 160, 2, 1, 128, 1536, 102400, False)
LITE = Dims(27, 2048, 10944, 1408, 64, 2, 1, 16, 0, 102400, False)


def shapes(d: Dims, layout: str = "ik") -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor; layout is ik, legacy (kv_b only) or mainline (k_b and v_b only)."""
    out: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (d.n_embd, d.n_vocab))]
    for il in range(d.n_layer):
        block: list[tuple[str, tuple[int, ...]]] = [("attn_norm.weight", (d.n_embd,))]
        if d.q_lora:
            block += [("attn_q_a.weight", (d.n_embd, d.q_lora)), ("attn_q_a_norm.weight", (d.q_lora,))]
            block += [("attn_q_b.weight", (d.q_lora, d.n_head * 192))]
        else:
            block += [("attn_q.weight", (d.n_embd, d.n_head * 192))]
        block += [("attn_kv_a_mqa.weight", (d.n_embd, 576)), ("attn_kv_a_norm.weight", (512,))]
        if layout != "mainline":
            block += [("attn_kv_b.weight", (512, d.n_head * 256))]
        if layout != "legacy":
            block += [("attn_k_b.weight", (128, 512 * d.n_head)), ("attn_v_b.weight", (512, 128 * d.n_head))]
        block += [("attn_output.weight", (d.n_head * 128, d.n_embd)), ("ffn_norm.weight", (d.n_embd,))]
        if il < d.n_dense:
            block += _ffn("", d.n_embd, d.n_ff, ())
        else:
            block += [("ffn_gate_inp.weight", (d.n_embd, d.n_expert))]
            block += [("exp_probs_b.bias", (d.n_expert,))] if d.has_bias else []
            block += _ffn("_exps", d.n_embd, d.n_ff_exp, (d.n_expert,))
            block += _ffn("_shexp", d.n_embd, d.n_ff_exp * d.n_shared, ())
        out += [(f"blk.{il}.{name}", shape) for name, shape in block]
    return [*out, ("output_norm.weight", (d.n_embd,)), ("output.weight", (d.n_embd, d.n_vocab))]


def _ffn(suffix: str, n_embd: int, n_ff: int, extra: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    wide, tall = (n_embd, n_ff, *extra), (n_ff, n_embd, *extra)
    return [(f"ffn_gate{suffix}.weight", wide), (f"ffn_down{suffix}.weight", tall), (f"ffn_up{suffix}.weight", wide)]


def names(d: Dims = V3, layout: str = "ik") -> list[str]:
    return [name for name, _ in shapes(d, layout)]


def rows(d: Dims, layout: str, type_of: Callable[[str], str]) -> list[TensorRow]:
    """Tensors with types chosen by name; norms, router and bias are always f32."""
    out: list[TensorRow] = []
    for name, shape in shapes(d, layout):
        fixed = "_norm" in name or "ffn_gate_inp" in name or name.endswith(".bias")
        type_name = "f32" if fixed else type_of(name)
        out.append(TensorRow(name, shape, type_name, tensor_n_bytes(TYPES[type_name], shape)))
    return out


def expert_types(gate_up: str, down: str, rest: str = "q8_0") -> Callable[[str], str]:
    def type_of(name: str) -> str:
        if "_exps" in name:
            return down if "down" in name else gate_up
        return rest

    return type_of
