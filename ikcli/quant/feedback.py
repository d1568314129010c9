"""Encode rows with GPTQ/LDLQ error feedback: choose codes in column order and let later columns make up for each error.

The error that counts is that of the product: e H e^T, for the error e of a row and the second moments H of the inputs.
With H = R R^T, R upper triangular, it is the squared length of e R, whose component j is e_j R_jj + sum(e_i R_ij, i <
j). The best code for column j is therefore the one nearest to w_j + sum(e_i R_ij, i < j) / R_jj: earlier errors are
paid back as far as inputs are correlated. This is GPTQ (arXiv:2210.17323) in the form of LDLQ (arXiv:2307.13304). Codes
that stand for several columns treat these as one column: R_jj is then a small triangle, and its inverse replaces 1 /
R_jj.

The plain encoder finds the scales. It gets the targets of a super-block just before its columns are chosen, and R_jj^2,
the cost of a squared error that later columns cannot mend, as importance. Formats with a scale per row are encoded once
before. A second search then lets later columns help earlier ones: it chooses a few columns at a time again, given all
others, where that lowers e H e^T (coordinate descent; it leaves a third of the error on small models). Files have the
same types as without feedback. At the end rows are made unbiased, now with respect to H.
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
    """Return whether rows of a type can be written with error feedback."""
    return group_size(TYPES[type].base or type) > 0


def encode_with_feedback(values: Floats, type: GGMLType, metric: Metric) -> Bytes:
    """Encode rows (n_rows, ne0) float32 into n_rows * row size bytes of a type that `supports` accepts."""
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
