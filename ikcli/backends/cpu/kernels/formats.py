"""Every weight format of the integer kernels, by ggml name: (rows, dot, unpack).

`rows` is the number of rows stored together: 1, or 4, 8, 16 for the interleaved types. `w` is the address of such a
group, `k` the number of columns.
    dot(w, a, k, out)      out[0:rows] = the rows times one quantized activation row; None: go through a tile
    unpack(w, tile, r, k)  writes rows r .. r+rows-1 of a 16-row tile
Tile modes and layout: `tile_modes.py`. Activation rows: `activations.py`.
"""

from ikcli.backends.cpu.kernels.formats_iqk import FORMATS as _IQK
from ikcli.backends.cpu.kernels.formats_iquants import FORMATS as _IQUANTS
from ikcli.backends.cpu.kernels.formats_kquants import FORMATS as _KQUANTS
from ikcli.backends.cpu.kernels.formats_legacy import FORMATS as _LEGACY
from ikcli.backends.cpu.kernels.formats_r4 import FORMATS as _R4
from ikcli.backends.cpu.kernels.formats_r4_grid import FORMATS as _R4_GRID
from ikcli.backends.cpu.kernels.formats_r4_iqk import FORMATS as _R4_IQK
from ikcli.backends.cpu.kernels.formats_trellis import FORMATS as _TRELLIS

FORMATS = _LEGACY | _KQUANTS | _IQUANTS | _IQK | _TRELLIS | _R4 | _R4_IQK | _R4_GRID
