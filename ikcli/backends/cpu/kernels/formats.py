"""Weight formats by the name under which lowering knows them: `stored_name` of `lower.py`.

f32, f16, bf16 and bf16_r16 are only their names (`formats_float.py`, `embed.py`); others name the class that describes
them, with the numbers of the tensor type, so kernels need no table of types and are compiled anew only when something
of their own has changed.
"""

import functools

from ikcli.references import load


def is_float(name):
    """Whether it is a type without a format."""
    return "," not in name


@functools.cache
def weight_format(name):
    """The row or group format of a type."""
    ggml_name, reference, mode, *numbers, matmul_scale = name.split(",")
    return load(reference)(ggml_name, mode, *map(int, numbers), float(matmul_scale))
