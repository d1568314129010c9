"""Find weight formats by the name that lowering uses: `stored_name` of `lower.py`.

f32, f16, bf16 and bf16_r16 are only names (`formats_float.py`, `embed.py`). Others name the class that describes them,
with the numbers of the tensor type, so kernels need no table of types and are compiled again only when something that
they use has changed.
"""

import functools

from ikcli.references import load


def is_float(name):
    """Return whether it is a type without a format."""
    return "," not in name


@functools.cache
def weight_format(name):
    """Return the row or group format of a type."""
    ggml_name, reference, mode, *numbers, matmul_scale = name.split(",")
    return load(reference)(ggml_name, mode, *map(int, numbers), float(matmul_scale))
