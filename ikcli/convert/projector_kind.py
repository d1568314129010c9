"""Describe a kind of projector: names, keys and checks of its checkpoint, and helpers that kinds share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ikcli.convert.json_files import read_json
from ikcli.errors import FormatError, UnsupportedError

Values = npt.NDArray[Any]
Change = Callable[[Values], Values]
Made = tuple[str, Change]
"""A GGUF name, and what becomes of the values of the tensor."""

BLOCKS = ("n_layers", "num_hidden_layers", "n_layer", "num_layers", "depth", "layers", "encoder_layers",
          "vt_num_hidden_layers")  # fmt: skip


@dataclass(slots=True)
class Settings:
    """config.json, its vision part, and the settings of the image processor."""

    directory: Path
    config: dict[str, Any]
    vision: dict[str, Any]
    processor: dict[str, Any]

    def number(self, *names: str, default: Any = None) -> Any:
        """Return a value of the vision part; raise FormatError if it is missing."""
        found = next((self.vision[name] for name in names if self.vision.get(name) is not None), default)
        if found is None:
            raise FormatError(f"{self.directory / 'config.json'}: key vision_config.{names[0]} is missing")
        return found[0] if isinstance(found, list) else found

    @property
    def text(self) -> dict[str, Any]:
        """Return the keys of the text model."""
        found = [self.config[k] for k in ("text_config", "llm_config") if isinstance(self.config.get(k), dict)]
        return {**self.config, **(found[0] if found else {})}


def same(x: Values) -> Values:
    return x


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of projector.

    `own`: prefixes of its tensors, without `model.`. `place` returns the tensors that one becomes, None where the map
    of gguf has its name. `renamed` gives the name to look up there. `f16` and `f32`: parts of names whose tensors keep
    that type in every file.
    """

    classes: tuple[str, ...]
    keys: Callable[[Settings, dict[str, Any]], None]
    own: tuple[str, ...]
    place: Callable[[Settings, str, tuple[int, ...]], list[Made] | None] = lambda s, name, shape: None
    renamed: Callable[[str], str] = lambda name: name
    prepare: Callable[[Settings], None] = lambda s: None
    f16: str = "$^"
    f32: str = "$^"
    towers: tuple[str, ...] = ()  # values of vision_config.model_type; none: any
    extra: Callable[[Settings, str], list[Made] | None] = lambda s, name: None
    colours: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # mean and deviation, if no file has them


def share(of: int, count: int) -> Change:
    """Return a change that takes one of `count` equal parts of the rows."""

    def take(x: Values) -> Values:
        n = x.shape[0] // count
        return x[of * n : (of + 1) * n]

    return take


def frames(name: str, shape: tuple[int, ...], directory: Path) -> list[Made]:
    """Cut a convolution over two frames into one per frame."""
    if len(shape) != 5 or shape[2] != 2:
        raise UnsupportedError(
            f"{directory}: tensor {name} has the shape {list(shape)}, not that of patches of two frames"
        )
    first, second = (lambda x: x[:, :, 0]), (lambda x: x[:, :, 1])
    return [("v.patch_embd.weight", first), ("v.patch_embd.weight.1", second)]


def token_id(directory: Path, text: str) -> int:
    path = directory / "tokenizer_config.json"
    added = (read_json(path) if path.is_file() else {}).get("added_tokens_decoder") or {}
    for token, about in added.items():
        if about.get("content") == text:
            return int(token)
    path = directory / "tokenizer.json"
    for about in (read_json(path) if path.is_file() else {}).get("added_tokens") or ():
        if about.get("content") == text:
            return int(about["id"])
    raise FormatError(f"{directory}: neither tokenizer_config.json nor tokenizer.json has the token {text}")


def activation(s: Settings) -> dict[str, Any]:
    act = s.vision.get("hidden_act")
    if act not in ("silu", "gelu"):
        raise UnsupportedError(
            f"{s.directory / 'config.json'}: key vision_config.hidden_act is {act}, not silu or gelu"
        )
    return {f"clip.use_{act}": True}


def looked_up(s: Settings, name: str) -> str:
    """Return the name that gguf has for a tensor; raise UnsupportedError if it has none."""
    import gguf

    n_blocks = max(int(s.number(*BLOCKS)), 4)  # the map has the layers of a projector as blocks, too
    found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, n_blocks).get_name(name, (".weight", ".bias"))
    if found is None:
        raise UnsupportedError(f"{s.directory}: tensor {name} has no place in a projector")
    return found
