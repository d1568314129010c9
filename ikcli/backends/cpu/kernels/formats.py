"""Every weight format of the integer kernels, by ggml name; `format_api.py` makes their kernels."""

from ikcli.backends.cpu.kernels.formats_iqk import FORMATS as _IQK
from ikcli.backends.cpu.kernels.formats_iquants import FORMATS as _IQUANTS
from ikcli.backends.cpu.kernels.formats_kquants import FORMATS as _KQUANTS
from ikcli.backends.cpu.kernels.formats_legacy import FORMATS as _LEGACY
from ikcli.backends.cpu.kernels.formats_r4 import FORMATS as _R4
from ikcli.backends.cpu.kernels.formats_r4_grid import FORMATS as _R4_GRID
from ikcli.backends.cpu.kernels.formats_r4_iqk import FORMATS as _R4_IQK
from ikcli.backends.cpu.kernels.formats_trellis import FORMATS as _TRELLIS

FORMATS = _LEGACY | _KQUANTS | _IQUANTS | _IQK | _TRELLIS | _R4 | _R4_IQK | _R4_GRID
