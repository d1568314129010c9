"""Name the parameters of kernels whose launches a later node reads or changes.

Names and their order are those of the sources (`tests/test_cuda_parameters.py` compares them). Kernels whose launches
nothing touches are not listed.
"""

from __future__ import annotations

ROWS = "st symbol factor"
ROTATION = f"{ROWS} table dim offset n_rot neox"
HEADS = "x x_cols b biased w normed out heads eps"  # of a value whose heads are rotated
FORMATS = "q8 q8_bytes bf16 bf16_bytes wanted"  # of kernels that make activation rows of `out`
_SUMS = f"y sum1 z sum2 w out width eps {FORMATS}"
MV = (
    f"{ROWS} w gate row_bytes matrix_bytes n_rows nb x x_row x_head y y_row y_head tiles n_tiles order divisor table "
    "split w1 n_rows1 y1 y1_row w2 n_rows2 y2 y2_row"
)

KERNELS = {
    "layer_add": f"{ROWS} x y y_cols out cols",
    "layer_swiglu": f"{ROWS} gate up out cols {FORMATS}",
    "layer_glu": f"{ROWS} gate up out cols kind limit alpha {FORMATS}",
    "layer_norm_rows": f"{ROWS} x x_cols {_SUMS}",
    "layer_norm_experts": f"{ROWS} experts route position moe n_used {_SUMS}",
    "layer_norm_groups": f"{ROWS} x x_cols w out groups width eps",
    "layer_gated_norm": f"{ROWS} x w gate out groups width eps kind {FORMATS}",
    "layer_heads": f"{ROTATION} {HEADS} x2 x2_cols b2 biased2 w2 normed2 out2 heads2 eps2",
    "layer_latent": f"{ROTATION} {HEADS} kv kv_w kv_eps rank latent rotated kvr {FORMATS}",
    "layer_moe_sum": f"{ROWS} y route position out cols n_used",
}
_PLACES = {kernel: {name: i for i, name in enumerate(names.split())} for kernel, names in KERNELS.items()}
_MV_PLACES = {name: i for i, name in enumerate(MV.split())}


def places(kernel: str) -> dict[str, int] | None:
    """Return the argument index of every parameter of a kernel; None if the kernel is not listed."""
    return _MV_PLACES if kernel.startswith("mv_") else _PLACES.get(kernel)


def place(kernel: str, name: str) -> int:
    """Return the argument index of a parameter."""
    found = places(kernel)
    if found is None:
        raise KeyError(f"the parameters of the kernel {kernel} have no names")
    if name not in found:
        raise KeyError(f"the kernel {kernel} has no parameter {name!r}; it has {', '.join(found)}")
    return found[name]
