"""Error feedback: codes of a row chosen in order, each error made up for by the columns still to come.

What counts is the error of the product, e H e^T for an error e of a row and second moments H of the inputs. With
H = R R^T, R upper triangular, it is the squared length of e R, whose component j is e_j R_jj + sum(e_i R_ij, i < j). So
the best code for column j is the nearest one to w_j + sum(e_i R_ij, i < j) / R_jj: earlier errors are paid back as far
as inputs are correlated. That is GPTQ (arXiv:2210.17323) in the form of LDLQ (arXiv:2307.13304). Codes that stand for
several columns take these as one: R_jj is a small triangle, and its inverse takes the place of 1 / R_jj.

Scales come from the plain encoder, which is given the targets of a super-block when its turn comes, and R_jj^2, what a
square error costs that later columns cannot mend, as importance. Formats with a scale per row are encoded once before.
That done, columns behind can help as well: a few columns at a time are chosen anew, given all others, where that makes
e H e^T less (coordinate descent, a third of what feedback leaves on small models). Files are of the same types as ever.
At the end rows are made unbiased, now with respect to H.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.encoders.unbiased import unbias_metric
from ikcli.quant.feedback_codes import column_order, group_size
from ikcli.quant.feedback_metric import Metric
from ikcli.quant.feedback_search import choose

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def supports(type: GGMLType) -> bool:
    """Whether rows of a type can be written with error feedback."""
    return group_size(TYPES[type].base or type) > 0


def encode_with_feedback(values: Floats, type: GGMLType, metric: Metric) -> Bytes:
    """Rows (n_rows, ne0) float32 as the n_rows * row size bytes of a type that `supports` it."""
    base = TYPES[type].base
    if base is not None:
        from ikcli.quant.repack import repack_rows

        return repack_rows(encode_with_feedback(values, base, metric), type, values.shape[1]).reshape(-1)
    values = np.ascontiguousarray(values, np.float32)
    order = column_order(type, values.shape[1])
    if order is None:
        rows = choose(values, type, metric)
    else:
        rows = choose(np.ascontiguousarray(values[:, order]), type, metric.reordered(order))
    return unbias_metric(rows, values, type, metric.products(values))
