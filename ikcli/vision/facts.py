"""Read the metadata of a projector file (`clip.vision.*`) with checks that name file and key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.reader import GGUFFile

_MOST = {"embedding_length": 1 << 16, "feed_forward_length": 1 << 18, "block_count": 512, "attention.head_count": 1024,
         "image_size": 1 << 14, "patch_size": 256, "projection_dim": 1 << 17}  # fmt: skip

_ANY_SIZE = ("dots_ocr",)  # types whose files have the image size 0


@dataclass(frozen=True, slots=True)
class Facts:
    """The numbers of a vision tower; `image_size` and lengths in pixels, `act` the activation of its layers."""

    source: str
    type: str
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    image_size: int
    patch: int
    eps: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    act: str
    metadata: dict[str, Any]

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def integer(self, name: str, default: int, least: int = 1, most: int = 1 << 20) -> int:
        """Return an integer of `clip.vision`."""
        return _integer(self.metadata, self.source, name, default, least, most)

    def check_merge(self, merge: int) -> None:
        """Raise FormatError unless the image size is a whole number of tokens of merge x merge patches."""
        if self.image_size % (self.patch * merge):
            raise self.fail(f"clip.vision.image_size {self.image_size} is not a multiple of patches ({self.patch}) x "
                            f"clip.vision.projector.scale_factor ({merge})")  # fmt: skip

    def fail(self, what: str) -> FormatError:
        """Return an error about the file."""
        return FormatError(f"{self.source}: {what}")


def projector_type(file: GGUFFile) -> str:
    """Return the projector type of a file; raise FormatError if it is not a vision projector."""
    source, values = str(file.paths[0]), file.metadata
    if values.get("general.architecture") != "clip":
        found = values.get("general.architecture", "no architecture")
        raise FormatError(f"{source}: a projector file has the architecture clip, this one has {found}")
    if values.get("clip.has_vision_encoder", False) is not True:
        if values.get("clip.has_audio_encoder", False) is True:
            raise UnsupportedError(f"{source}: the projector encodes audio, which is not supported")
        raise FormatError(f"{source}: the projector has no vision encoder (clip.has_vision_encoder); images need one")
    for key in ("clip.vision.projector_type", "clip.projector_type"):
        if isinstance(found := values.get(key), str) and found:
            return found
    raise FormatError(f"{source}: metadata key clip.projector_type is missing or not text")


def read_facts(file: GGUFFile) -> Facts:
    """Return the numbers of a projector file."""
    source, values = str(file.paths[0]), dict(file.metadata)

    def integer(name: str) -> int:
        return _integer(values, source, name, None, 1, _MOST[name])

    kind = projector_type(file)
    image_size = _integer(values, source, "image_size", None, int(kind not in _ANY_SIZE), _MOST["image_size"])
    n_embd, n_head = integer("embedding_length"), integer("attention.head_count")
    if n_embd % n_head:
        raise FormatError(f"{source}: clip.vision.attention.head_count {n_head} does not divide the width {n_embd}")
    eps = values.get("clip.vision.attention.layer_norm_epsilon", 1e-6)
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise FormatError(f"{source}: clip.vision.attention.layer_norm_epsilon is {eps}; it must be a small number")
    act = "gelu" if _flag(values, source, "use_gelu") else "silu" if _flag(values, source, "use_silu") else "gelu_quick"
    return Facts(
        source, kind, n_embd, integer("feed_forward_length"), integer("block_count"), n_head,
        image_size, integer("patch_size"), float(eps), _colours(values, source, "image_mean", 0.0),
        _colours(values, source, "image_std", 1e-6), act, values,
    )  # fmt: skip


def _flag(values: dict[str, Any], source: str, name: str) -> bool:
    found = values.get(f"clip.{name}", False)
    if not isinstance(found, bool):
        raise FormatError(f"{source}: metadata key clip.{name} is {found}; it must be true or false")
    return found


def _integer(values: dict[str, Any], source: str, name: str, default: int | None, least: int, most: int) -> int:
    value = values.get(f"clip.vision.{name}", default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        what = "is missing" if value is None else f"is {value}; it must be a whole number from {least} to {most}"
        raise FormatError(f"{source}: metadata key clip.vision.{name} {what}")
    return int(value)


def _colours(values: dict[str, Any], source: str, name: str, least: float) -> tuple[float, float, float]:
    found = values.get(f"clip.vision.{name}")
    try:
        r, g, b = (float(x) for x in found)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise FormatError(f"{source}: metadata key clip.vision.{name} must hold three numbers") from None
    if not all(least <= x < 1e3 for x in (r, g, b)):
        raise FormatError(f"{source}: metadata key clip.vision.{name} holds {str(found)[:80]}, which are no colours")
    return r, g, b
