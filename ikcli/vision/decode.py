"""Turn the bytes of an image file into pixels, after checks that cost nothing."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from io import BytesIO
from typing import Self

import numpy as np
import numpy.typing as npt

from ikcli.errors import UnsupportedError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_BYTES = 64 << 20
MAX_PIXELS = 100_000_000
MAX_SIDE = 65_535
MAX_ASPECT = 200
_WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """Pixels, (height, width, 3) of 8 bits, and a digest of them."""

    rgb: npt.NDArray[np.uint8]
    digest: str

    @classmethod
    def of(cls, rgb: npt.NDArray[np.uint8]) -> Self:
        """Make a picture of pixels."""
        rgb = np.ascontiguousarray(rgb)
        size = f"{rgb.shape[1]}x{rgb.shape[0]}:".encode()
        return cls(rgb, hashlib.sha256(size + rgb.tobytes()).hexdigest())

    @property
    def width(self) -> int:
        return int(self.rgb.shape[1])

    @property
    def height(self) -> int:
        return int(self.rgb.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Tile(Picture):
    """A picture, or a part of one, at the size that a tower reads; it is not resized any more.

    `shown`: rows and columns of its patches that are in the text, where a tower cuts margins off.
    """

    shown: tuple[int, int] | None = None


def decode_image(data: bytes, where: str = "the image") -> Picture:
    """Decode JPEG, PNG, WebP, GIF (first frame) or BMP; raise UnsupportedError with one sentence that begins with
    `where`.

    Bytes, format and size are checked before pixels are decoded. EXIF orientation is applied; transparent pixels are
    drawn on white; 16 bits become 8.
    """
    from PIL import Image, ImageOps

    if not data:
        raise UnsupportedError(f"{where} is empty")
    if len(data) > MAX_BYTES:
        raise UnsupportedError(f"{where} has {len(data) / 2**20:.0f} MiB; at most {MAX_BYTES >> 20} MiB are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked here
            image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise UnsupportedError(f"{where} has more than {MAX_PIXELS // 10**6} million pixels") from None
    except Exception:
        raise UnsupportedError(f"{where} is none of {', '.join(FORMATS)}, or it is damaged") from None
    width, height = image.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise UnsupportedError(
            f"{where} has {width} x {height} pixels; at most {MAX_PIXELS // 10**6} million are read, and "
            f"{MAX_SIDE} on a side"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise UnsupportedError(f"{where} has {width} x {height} pixels; one side is more than {MAX_ASPECT} x the other")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
            return Picture.of(_rgb(ImageOps.exif_transpose(image)))
    except Exception as e:
        why = " ".join(str(e).split()) or type(e).__name__
        raise UnsupportedError(f"{where} is a damaged {image.format} file: {why}") from None


def _rgb(image: object) -> npt.NDArray[np.uint8]:
    """Return 8-bit RGB of an image in any mode."""
    from PIL import Image

    assert isinstance(image, Image.Image)
    if image.mode.startswith("I"):  # 16 bits of grey
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        drawn = image.convert("RGBA")
        under = Image.new("RGBA", drawn.size, (*_WHITE, 255))
        return np.array(Image.alpha_composite(under, drawn).convert("RGB"))
    return np.array(image.convert("RGB"))
