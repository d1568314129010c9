"""Tables behind the presets of `ik quantize`: the type of each kind of tensor for each file type.

`PLANS` lists groups of parts. The first group that knows the file type is used. In it, the first part whose name
pattern occurs in the tensor name decides, and in that part the first rule that applies. A tensor without a rule keeps
the default type of its file type. Corresponds to `llama_tensor_get_type` of ik_llama.cpp (src/llama-quantize.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ikcli.gguf.constants import FILE_TYPES, GGMLType

T = GGMLType
_NUMBERS = {name: f.number for f in FILE_TYPES.values() for name in f.names}


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts that a rule may use: the model, the tensor's place in it and the type chosen so far."""

    gqa: int  # query heads per KV head of block 0, 0 without KV heads
    n_expert: int
    has_imatrix: bool
    has_output: bool  # the model has a separate output.weight
    falcon: bool
    is_70b: bool
    large_vocab: bool  # an 8B or 70B model with a vocabulary of 128 thousand or more
    keeps_attn_v: bool  # the draft architecture whose attn_v is not raised
    row_fits: bool  # rows are a multiple of 256
    i: int  # block, or how many tensors of this kind came before
    n: int  # of how many
    type: GGMLType

    @property
    def early(self) -> bool:
        """Return whether the block is in the first eighth of the blocks."""
        return self.i < self.n // 8

    @property
    def more_bits(self) -> bool:
        """Return whether the block is in the first or last eighth, or every third block in between."""
        return self.early or self.i >= 7 * self.n // 8 or (self.i - self.n // 8) % 3 == 2

    @property
    def middle(self) -> bool:
        """Return whether the block is between the first and the last eighth."""
        return self.n // 8 <= self.i < 7 * self.n // 8


Condition = Callable[[Situation], bool]
Target = GGMLType | Mapping[GGMLType, GGMLType] | None


def _always(s: Situation) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class TypeRule:
    """A rule for these file types (None: all): if its condition holds, use the type, or map the present one."""

    file_types: frozenset[int] | None
    target: Target  # None: keep the present type
    when: Condition = _always

    def applies(self, file_type: int, s: Situation) -> bool:
        return (self.file_types is None or file_type in self.file_types) and self.when(s)

    def result(self, s: Situation) -> GGMLType:
        if isinstance(self.target, GGMLType):
            return self.target
        return self.target.get(s.type, s.type) if self.target is not None else s.type


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Tensors whose name contains one of `names`; `flag`: the overriding option, `counts`: the counter."""

    names: tuple[str, ...]
    rules: tuple[TypeRule, ...]
    flag: str = ""
    counts: str = ""
    min_experts: int = 0
    by_block: bool = True  # in models with experts `i` is the block number, not the counter


@dataclass(frozen=True, slots=True)
class KindGroup:
    """Rules for some file types; None stands for all types that no earlier group lists."""

    file_types: frozenset[int] | None
    parts: tuple[TensorKind, ...]


def numbers(names: str) -> frozenset[int]:
    """Return the file type numbers of blank-separated names."""
    return frozenset(_NUMBERS[name] for name in names.split())


def on(file_types: str, target: Target, when: Condition = _always) -> TypeRule:
    """Return a rule for the named file types; an empty text means all."""
    return TypeRule(numbers(file_types) if file_types else None, target, when)


def _gqa2(s: Situation) -> bool:
    return s.gqa >= 2


def _gqa4(s: Situation) -> bool:
    return s.gqa >= 4


def _experts4(s: Situation) -> bool:
    return s.n_expert >= 4


def _few_experts(s: Situation) -> bool:
    return s.n_expert < 4


def _early(s: Situation) -> bool:
    return s.early


def _more_bits(s: Situation) -> bool:
    return s.more_bits


def _early_blind(s: Situation) -> bool:
    return s.early and not s.has_imatrix


def _blind(s: Situation) -> bool:
    return not s.has_imatrix


# output.weight, or token_embd.weight of a model that uses it as output.
_SMALL_OUTPUT = (
    "IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ2_S IQ2_M IQ1_M IQ2_K IQ3_K IQ2_KS IQ3_K_R4 IQ3_KS IQ2_K_R4 IQ3_XXS_R4 IQ2_KL "
    "IQ2_M_R4 IQ1_S_R4 IQ1_M_R4 IQ2_KT IQ3_KT IQ1_KT"
)
_GOOD_OUTPUT = (T.Q8_0, T.Q8_0_R8, T.IQ6_K, T.Q6_K_R4, T.Q8_K_R8, T.Q8_KV, T.Q8_KV_R8)
OUTPUT = TensorKind(
    ("output.weight",),
    (
        on("", T.Q8_0, lambda s: s.falcon or not s.row_fits),
        on(_SMALL_OUTPUT, T.Q5_K, lambda s: s.has_output),
        on(_SMALL_OUTPUT, T.IQ4_K),
        on("IQ2_XXS_R4 IQ2_XS_R4", T.Q5_K_R4, lambda s: s.has_output),
        on("IQ2_XXS_R4 IQ2_XS_R4", T.IQ4_K_R4),
        on("IQ3_S IQ3_M IQ3_KL IQ4_XS IQ3_S_R4 IQ4_KS IQ4_KSS IQ4_KS_R4", T.IQ5_K, lambda s: not s.has_output),
        on("", T.Q6_K, lambda s: s.type not in _GOOD_OUTPUT),
    ),
    flag="output_tensor_type",
)

_EMBEDDING = (
    on("IQ2_XXS IQ2_XS IQ1_S IQ1_M IQ2_XXS_R4 IQ2_XS_R4 IQ1_S_R4 IQ1_M_R4", T.Q2_K),
    on("IQ2_S IQ2_M IQ2_M_R4 IQ3_XXS IQ3_KT", T.IQ3_S),
    on("IQ3_XXS_R4", T.IQ3_K),
    on("IQ1_BN IQ2_BN IQ2_BN_R4", T.IQ4_NL),
    on("TQ1_0 TQ2_0", T.Q4_K),  # as llama.cpp does
)
TOKEN_EMBD = TensorKind(("token_embd.weight",), _EMBEDDING, flag="token_embedding_type")
PER_LAYER_TOKEN_EMBD = TensorKind(("per_layer_token_embd.weight",), _EMBEDDING, flag="per_layer_token_embedding_type")

_FIRST_FFN = ("blk.0.ffn_down", "blk.0.ffn_gate", "blk.0.ffn_up")


def _low_bits(
    v: tuple[T, T, T], qk: T, first_ffn: T, qkv: T, shexp: T, down: T, out: tuple[T, T]
) -> tuple[TensorKind, ...]:
    """Return the plan shared by IQ1_S_R4, IQ1_M_R4 and IQ2_KT."""
    return (
        TensorKind(
            ("attn_v.weight",),
            (on("", v[0], lambda s: s.n_expert >= 4 or s.gqa >= 4), on("", v[1], _gqa2), on("", v[2])),
            counts="attn_v",
        ),
        TensorKind(("attn_k",), (on("", qk),), min_experts=8),
        TensorKind(_FIRST_FFN, (on("", first_ffn),), min_experts=8),
        TensorKind(("attn_q",), (on("", qk),), min_experts=8),
        TensorKind(("attn_qkv.weight",), (on("", qkv),)),
        TensorKind(("_shexp.weight",), (on("", shexp),)),
        TensorKind(("ffn_down",), (on("", down, _early),), flag="ffn_down_type", counts="ffn_down"),
        TensorKind(("attn_output.weight",), (on("", out[0], _experts4), on("", out[1]))),
    )


_S = "IQ2_S IQ2_M IQ2_M_R4"
_LOW_2_BITS = (
    TensorKind(
        ("attn_v.weight",),
        (
            on("", T.IQ4_K, lambda s: s.n_expert >= 4 or s.gqa >= 4),
            on("", T.IQ3_K, lambda s: s.n_expert >= 2 or s.gqa >= 2),
            on(_S, T.IQ3_S),
            on("", T.Q2_K),
        ),
        counts="attn_v",
    ),
    TensorKind(("attn_k",), (on("", T.Q4_K),), min_experts=8),
    TensorKind(("attn_q",), (on("", T.Q4_K),), min_experts=8),
    TensorKind(("attn_qkv.weight",), (on(_S, T.IQ3_XXS), on("", T.IQ2_K))),
    TensorKind(("ffn_down",), (on(_S, T.IQ3_S, _early), on("", T.Q2_K, _early)), counts="ffn_down", by_block=False),
    TensorKind(
        ("attn_output.weight",),
        (on("", T.Q5_K, _experts4), on("IQ1_S IQ1_M", T.IQ2_K), on(_S, T.IQ3_S)),
        flag="attn_output_type",
    ),
)

_RAISED: dict[GGMLType, GGMLType] = {
    **dict.fromkeys((T.Q2_K, T.IQ3_XXS), T.IQ3_S),
    **dict.fromkeys((T.Q2_K_R4, T.IQ3_XXS_R4), T.IQ3_K_R4),
    **dict.fromkeys((T.Q3_K, T.IQ3_S), T.Q4_K),
    T.IQ3_K: T.IQ4_K,
    **dict.fromkeys((T.IQ3_KS, T.IQ2_KL), T.IQ4_KS),
    **dict.fromkeys((T.IQ3_S_R4, T.Q3_K_R4), T.Q4_K_R4),
    **dict.fromkeys((T.Q4_K, T.IQ4_XS, T.IQ4_NL, T.IQ4_NL_R4, T.IQ4_XS_R8), T.Q5_K),
    **dict.fromkeys((T.IQ4_K, T.IQ4_KS), T.IQ5_K),
    T.Q5_K: T.Q6_K,
    **dict.fromkeys((T.IQ5_K, T.IQ5_KS), T.IQ6_K),
}

_ATTN_V = (
    on("", T.Q8_0, _experts4),
    on("", {T.Q3_K: T.Q5_K, T.Q4_K: T.Q5_K, T.IQ3_K: T.IQ5_K}, lambda s: s.is_70b),
    on("Q2_K", T.Q4_K, _gqa4),
    on("Q2_K", T.Q3_K),
    on("IQ2_K", T.IQ4_K, _gqa2),
    on("IQ2_K", T.IQ3_K),
    on("IQ2_K_R4", T.IQ4_K_R4, _gqa2),
    on("IQ2_K_R4", T.IQ3_K_R4),
    on("Q2_K_S", T.Q4_K, _gqa4),
    on("Q2_K_R4", T.Q4_K_R4, _gqa4),
    on("IQ3_XXS", T.Q4_K, _gqa4),
    on("IQ3_XXS", T.IQ3_K, _gqa2),
    on("IQ3_XXS", T.IQ3_S, _blind),
    on("IQ3_XXS", T.IQ3_XXS),
    on("IQ3_KT", T.IQ4_K, _gqa4),
    on("IQ3_KT", T.IQ3_K),
    on("IQ4_KT", T.IQ5_K, _gqa4),
    on("IQ4_KT", T.IQ4_K),
    on("IQ3_XXS_R4", T.Q4_K_R4, _gqa4),
    on("IQ3_XXS_R4", T.IQ3_K_R4, _gqa2),
    on("IQ3_XXS_R4", T.IQ3_K_R4, _blind),
    on("IQ3_XXS_R4", T.IQ3_XXS_R4),
    on("IQ3_XS IQ3_S IQ3_K", T.IQ4_K, _gqa2),
    on("IQ3_S_R4 IQ3_K_R4", T.IQ4_K_R4, _gqa2),
    on("IQ3_KS IQ2_KL", T.IQ4_KS, _gqa2),
    on("IQ3_KL IQ3_M", T.IQ5_K, _gqa2),
    on("IQ3_KL IQ3_M", T.IQ4_K),
    on("Q3_K_M", T.Q5_K, lambda s: s.i < 2),
    on("Q3_K_M", T.Q4_K),
    on("Q3_K_L", T.Q5_K),
    on("IQ4_NL IQ4_XS IQ4_NL_R4 IQ4_XS_R8 IQ4_KS IQ4_KSS IQ4_K IQ4_K_R4", T.IQ5_K, _gqa2),
    on("IQ4_KS_R4", T.IQ5_K_R4, _gqa2),
    on("Q4_K_M Q5_K_M", T.Q6_K, _more_bits),
    on("Q4_K_S Q4_K_R4", T.Q5_K, lambda s: s.i < 4),
    on("Q5_K_S", T.Q6_K, lambda s: s.large_vocab),
    on("IQ5_K IQ5_KS", T.IQ6_K, lambda s: s.large_vocab),
    on("Q5_K_S IQ5_K IQ5_KS", None),
    on("Q4_K_M Q5_K_M", None, lambda s: s.keeps_attn_v),
    on("", _RAISED, _gqa4),
)

_FFN_DOWN = (
    on("Q2_K", T.Q3_K),
    on("Q2_K_S", T.Q4_K, _early),
    on("Q2_K_R4", T.Q4_K_R4, _early),
    on("IQ3_XXS", T.Q4_K, _early_blind),
    on("IQ3_XXS", T.Q3_K, _blind),
    on("IQ3_KT", T.IQ4_K, _early_blind),
    on("IQ3_KT", T.IQ3_K, _blind),
    on("IQ3_XXS_R4", T.Q4_K_R4, _early_blind),
    on("IQ3_XXS_R4", T.IQ3_K_R4, _blind),
    on("Q3_K_M", T.Q5_K, lambda s: s.i < s.n // 16),
    on("Q3_K_M", T.Q4_K, lambda s: not s.falcon or s.more_bits),
    on("Q3_K_M", T.Q3_K),
    on("IQ3_M", T.IQ4_K, lambda s: s.early or (s.n_expert >= 4 and s.more_bits)),
    on("Q3_K_L", T.Q4_K, lambda s: s.falcon),
    on("Q3_K_L", T.Q5_K),
    on("IQ3_KL", T.IQ4_KS, _more_bits),
    on("IQ3_KL", T.IQ3_K),
    on("Q4_K_M", T.Q6_K, lambda s: s.i < s.n // 16 if s.falcon else s.more_bits),
    on("Q4_K_M", T.Q5_K, lambda s: s.falcon and s.more_bits),
    on("Q4_K_M", T.Q4_K, lambda s: s.falcon),
    on("IQ4_NL IQ4_XS IQ4_KS IQ4_KSS IQ4_NL_R4 IQ4_XS_R8", T.Q5_K, _early_blind),
    on("IQ4_KS_R4", T.Q5_K_R4, _early_blind),
    on("Q5_K_M", T.Q6_K, _more_bits),
    on("Q4_K_S Q4_K_R4", T.Q5_K, lambda s: s.early and not s.falcon),
    on("Q4_0", T.Q4_1, lambda s: s.early and s.has_imatrix),
    on("Q5_0", T.Q5_1, lambda s: s.early and s.has_imatrix),
    on("Q4_0_R8", T.IQ4_NL_R4, lambda s: s.early and s.has_imatrix),
)

_ATTN_OUTPUT = (
    on("Q3_K_L", T.Q4_K, lambda s: s.falcon),
    on("", None, lambda s: s.falcon),
    on(
        "Q2_K IQ3_XS IQ3_XXS Q3_K_S Q3_K_M IQ4_NL Q4_K_S Q4_K_M IQ3_S IQ3_M IQ4_XS IQ4_K IQ4_KSS IQ4_KS IQ4_KS_R4 "
        "IQ5_KS IQ5_KS_R4 IQ2_K IQ3_K IQ3_KL Q4_K_R4 IQ4_NL_R4 IQ4_XS_R8 Q3_K_R4 IQ3_KT IQ3_KS Q2_K_R4 IQ4_K_R4 "
        "IQ3_K_R4 IQ2_K_R4 IQ3_XXS_R4 IQ3_S_R4",
        T.Q5_K,
        _experts4,
    ),
    on("IQ2_KL", T.IQ4_KS, _experts4),
    on("Q2_K", T.Q3_K, _few_experts),
    on("IQ3_XXS", T.IQ3_S, _few_experts),
    on("IQ3_KT", T.IQ3_K, lambda s: s.n_expert < 4 and s.gqa >= 4),
    on("IQ3_XXS_R4", T.IQ3_K_R4, _few_experts),
    on("Q3_K_M", T.Q4_K, _few_experts),
    on("Q3_K_L", T.Q5_K, _few_experts),
    on("IQ3_M", T.IQ4_K, _few_experts),
    on("IQ2_K", T.IQ3_K, _few_experts),
    on("IQ2_K_R4", T.IQ3_K_R4, _few_experts),
    on("IQ3_KL", T.IQ4_KS, _few_experts),
)

_GATE_UP = (on("IQ3_XS", T.IQ3_XXS, lambda s: s.middle), on("IQ3_KL", T.IQ4_KS, _more_bits))

_ALL_OTHERS = (
    TensorKind(("attn_v.weight",), _ATTN_V, flag="attn_v_type", counts="attn_v"),
    TensorKind(
        ("attn_k",),
        (on("", T.Q8_0, _experts4), on("IQ3_XS", T.IQ3_XXS), on("IQ3_XXS IQ3_XXS_R4", T.IQ2_S)),
        flag="attn_k_type",
    ),
    # attn_qkv is caught here as well, which is why --attn-qkv-type has no effect.
    TensorKind(
        ("attn_q",),
        (
            on("IQ3_XS", T.IQ3_XXS),
            on("IQ3_XXS IQ3_XXS_R4", T.IQ2_S),
            on("Q5_K_S", T.Q4_K, lambda s: s.large_vocab),
            on("IQ5_K", T.IQ4_K, lambda s: s.large_vocab),
            on("IQ5_KS", T.IQ4_KS, lambda s: s.large_vocab),
        ),
        flag="attn_q_type",
    ),
    TensorKind(("ffn_down",), _FFN_DOWN, flag="ffn_down_type", counts="ffn_down"),
    TensorKind(("attn_output.weight",), _ATTN_OUTPUT, flag="attn_output_type"),
    TensorKind(("ffn_gate",), _GATE_UP, flag="ffn_gate_type", counts="ffn_gate"),
    TensorKind(("ffn_up",), _GATE_UP, flag="ffn_up_type", counts="ffn_up"),
)

PLANS = (
    KindGroup(
        numbers("IQ1_S_R4 IQ1_M_R4"),
        _low_bits(
            (T.IQ4_K_R4, T.IQ3_K_R4, T.Q2_K_R4),
            T.Q4_K_R4,
            T.IQ3_K_R4,
            T.IQ2_K_R4,
            T.IQ4_K_R4,
            T.Q2_K_R4,
            (T.Q5_K_R4, T.IQ2_K_R4),
        ),
    ),
    KindGroup(
        numbers("IQ2_KT"),
        _low_bits((T.IQ4_K, T.IQ3_K, T.Q2_K), T.Q4_K, T.IQ3_K, T.IQ3_K, T.IQ4_K, T.IQ3_K, (T.Q5_K, T.IQ3_K)),
    ),
    KindGroup(numbers("IQ2_XXS IQ2_XS IQ1_S IQ2_S IQ2_M IQ1_M IQ2_KS IQ2_XXS_R4 IQ2_XS_R4 IQ2_M_R4"), _LOW_2_BITS),
    KindGroup(None, _ALL_OTHERS),
)

# File types that are useless without importance weights; of single tensors: `TensorType.needs_imatrix`.
NEEDS_IMATRIX = numbers("IQ2_XS IQ2_XXS IQ2_S IQ2_XXS_R4 Q2_K_S IQ2_XS_R4 IQ1_S IQ1_S_R4 IQ1_M_R4 IQ1_M")
