"""The options of `ik quantize` and `ik repack`, in the order of their help."""

from __future__ import annotations

from ikcli.commands._target import TARGET_OPTIONS
from ikcli.commands._tool_argv import ToolOption

USAGE = "ik quantize [options] in.gguf [out.gguf] TYPE [nthreads]"
TYPE_FLAGS = {
    "output-tensor": "output.weight, whatever the other rules say",
    "token-embedding": "token_embd.weight, whatever the other rules say",
    "per-layer-token-embedding": "per_layer_token_embd.weight, whatever the other rules say",
    "ffn-gate-inp": "the routers (ffn_gate_inp), which otherwise stay as they are",
    "attn-q": "attn_q, where the mix of TYPE decides",
    "attn-k": "attn_k, where the mix of TYPE decides",
    "attn-v": "attn_v, where the mix of TYPE decides",
    "attn-qkv": "attn_qkv; accepted, but attn_q rules decide about it",
    "attn-output": "attn_output, where the mix of TYPE decides",
    "ffn-gate": "ffn_gate, where the mix of TYPE decides",
    "ffn-down": "ffn_down, where the mix of TYPE decides",
    "ffn-up": "ffn_up, where the mix of TYPE decides",
}
OPTIONS = (
    ToolOption(("--imatrix",), "FILE", "importance matrix, legacy .dat or GGUF", example="imatrix.dat"),
    ToolOption(
        ("--covariance",),
        "FILE",
        "second moments of inputs (ik imatrix --covariance): errors are made up for by later columns",
        example="covariance.gguf",
    ),
    ToolOption(("--hide-imatrix",), "", "do not record the importance matrix in the result"),
    ToolOption(
        ("--ignore-imatrix-rules",),
        "",
        "allow IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S (and _R4), IQ1_KT, IQ2_KT and Q2_K_S without importance matrix; "
        "they are refused otherwise because the result is hardly usable",
    ),
    ToolOption(("--include-weights",), "TEXT", "use only importance entries whose name contains TEXT", repeat=True),
    ToolOption(("--exclude-weights",), "TEXT", "use no importance entries whose name contains TEXT", repeat=True),
    ToolOption(("--allow-requantize",), "", "accept tensors that are quantized already; this loses quality"),
    ToolOption(("--leave-output-tensor",), "", "keep output.weight as it is"),
    ToolOption(("--pure",), "", "the type of TYPE for all tensors, without its mix and without --custom-q"),
    *(
        ToolOption((f"--{name}-type",), "TYPE", f"tensor type of {what}", example="q8_0")
        for name, what in TYPE_FLAGS.items()
    ),
    ToolOption(
        ("--custom-q",),
        "RE=TYPE[,RE=TYPE...]",
        "type of tensors whose name matches, first match wins; @FILE reads rules from a file with # comments",
        repeat=True,
        example='"attn_k=q8_0,ffn_down=iq4_k"',
    ),
    *TARGET_OPTIONS,
    ToolOption(("--extra-output-tensor",), "TYPE", "also write output_extra.weight, a smaller copy of the output"),
    ToolOption(("--repack",), "", "only regroup rows into interleaved types; TYPE may be missing and is ignored"),
    ToolOption(("--unrepack",), "", "the inverse of --repack"),
    ToolOption(
        ("--repack-pattern",), "RE[,RE...]", "regroup only matching tensors, copy the rest", repeat=True, example="exps"
    ),
    ToolOption(("--keep-split",), "", "write as many files as the input has, with the same tensors in each"),
    ToolOption(("--partial-requant",), "", "skip output files that exist already: resume after an interruption"),
    ToolOption(
        ("--override-kv",), "KEY=TYPE:VALUE", "change a metadata key; TYPE int, float, bool or str", repeat=True
    ),
    ToolOption(("--symmetric-q40",), "", "q4_0 codes from -7 to 7 only, without importance weights"),
    ToolOption(("--least-squares",), "", "scales of least squared error, which shrink rows, instead of unbiased ones"),
    ToolOption(("--slow-iq2ks",), "", "the exhaustive and slow search for iq2_ks"),
    ToolOption(("--force",), "", "allow ternary types for weights that are not ternary"),
    ToolOption(("--dry-run",), "", "print the type and size of every tensor and the total, write nothing"),
    ToolOption(
        ("--preflight",),
        "",
        "check everything that can be known before a run, name tensors and experts without importance data, write "
        "nothing; exit code 1 if the run would fail or be refused",
    ),
    ToolOption(("-t", "--threads"), "N", "threads, as the positional nthreads; default physical cores", example="8"),
    ToolOption(("-v", "--verbose"), "", "also print which rule decided about which tensor"),
)
