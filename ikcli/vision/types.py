"""The projector types, by the name that files have."""

from __future__ import annotations

from ikcli.errors import UnsupportedError
from ikcli.vision.cogvlm import CogVlm
from ikcli.vision.dots import DotsOcr
from ikcli.vision.gemma import Gemma3, Gemma4
from ikcli.vision.glm4v import Glm4v
from ikcli.vision.glm_edge import GlmEdge
from ikcli.vision.idefics import Idefics3
from ikcli.vision.internvl import InternVl
from ikcli.vision.lfm2 import Lfm2Vl
from ikcli.vision.llama4 import Llama4
from ikcli.vision.llava import JanusPro, LlavaMlp, MobileVlm, MobileVlm2
from ikcli.vision.minicpmv import MiniCpmV
from ikcli.vision.minicpmv46 import MiniCpmV46
from ikcli.vision.minimax import MiniMaxM3, MiniMaxM3Vl
from ikcli.vision.moonvit import KimiK25, KimiVl
from ikcli.vision.muse import MuseGlimmer
from ikcli.vision.paddleocr import PaddleOcr
from ikcli.vision.pixtral import LightOnOcr, Pixtral
from ikcli.vision.qwen import Exaone45, Qwen2Vl, Qwen3Vl, Qwen25Vl
from ikcli.vision.tower import Tower

TYPES: dict[str, type[Tower]] = {
    "qwen2vl_merger": Qwen2Vl,
    "qwen2.5vl_merger": Qwen25Vl,
    "qwen2.5o": Qwen25Vl,
    "qwen3vl_merger": Qwen3Vl,
    "exaone4_5": Exaone45,
    "gemma3": Gemma3,
    "gemma4v": Gemma4,
    "pixtral": Pixtral,
    "internvl": InternVl,
    "idefics3": Idefics3,
    "llama4": Llama4,
    "glm4v": Glm4v,
    "kimivl": KimiVl,
    "kimik25": KimiK25,
    "lfm2": Lfm2Vl,
    "resampler": MiniCpmV,
    "minicpmv4_6": MiniCpmV46,
    "minimax_m3_vl": MiniMaxM3Vl,
    "minimax_m3": MiniMaxM3,
    "mlp": LlavaMlp,
    "ldp": MobileVlm,
    "ldpv2": MobileVlm2,
    "janus_pro": JanusPro,
    "lightonocr": LightOnOcr,
    "muse-glimmer": MuseGlimmer,
    "adapter": GlmEdge,
    "cogvlm": CogVlm,
    "dots_ocr": DotsOcr,
    "paddleocr": PaddleOcr,
}

_LEFT_OUT = {"deepseekocr": "DeepSeek-OCR", "hunyuanocr": "HunyuanOCR", "hunyuanvl": "HunyuanOCR"}


def tower_of(name: str, source: str) -> type[Tower]:
    """Return the tower of a projector type; raise UnsupportedError that names those that are supported."""
    found = TYPES.get(name)
    if found is None:
        model = f" ({_LEFT_OUT[name]})" if name in _LEFT_OUT else ""
        raise UnsupportedError(
            f"{source}: projectors of type {name!r}{model} are not supported; supported: {', '.join(TYPES)}"
        )
    return found
