"""tanh on f32x16, about two ulp."""

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.math import vexp
from ikcli.native.simd.vec import (
    bits_f32x16_i32,
    bits_i32x16_f32,
    select_less_i32,
    splat_f32x16,
    splat_i32x16,
    vabs,
    vadd,
    vand,
    vdiv,
    vfma,
    vmul,
    vor,
    vsub,
)

_F = np.float32
_ONE, _TWO = _F(1.0), _F(2.0)
_SMALL = int(_F(0.625).view(np.int32))
_SIGN = -(2**31)
_C0, _C1, _C2, _C3, _C4 = (
    _F(c) for c in (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
)


@inline
def vtanh(x):
    """Return the hyperbolic tangent: near 0 the Cephes tanhf polynomial, else 1 - 2 / (e**2|x| + 1).

    NaN and Inf give NaN.
    """
    size = vabs(x)
    square = vmul(x, x)
    p = vfma(splat_f32x16(_C0), square, splat_f32x16(_C1))
    p = vfma(p, square, splat_f32x16(_C2))
    p = vfma(p, square, splat_f32x16(_C3))
    p = vfma(p, square, splat_f32x16(_C4))
    near = vfma(vmul(p, square), x, x)
    one, two = splat_f32x16(_ONE), splat_f32x16(_TWO)
    far = vsub(one, vdiv(two, vadd(vexp(vmul(size, two)), one)))
    sign = vand(bits_f32x16_i32(x), splat_i32x16(_SIGN))
    far = bits_i32x16_f32(vor(bits_f32x16_i32(far), sign))
    return select_less_i32(bits_f32x16_i32(size), splat_i32x16(_SMALL), near, far)
