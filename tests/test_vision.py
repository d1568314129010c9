"""Decode images, sizes of processors, positions and places of images, with small known answers."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.media import Media
from ikcli.errors import UnsupportedError
from ikcli.models.rope import RopeParams
from ikcli.vision.decode import MAX_BYTES, decode_image
from ikcli.vision.sizes import fill_area, round_to_area, round_up
from ikcli.vision.tower import Grid, patches

RED = (250, 10, 20)


def encoded(image: Image.Image, format_: str, **options: Any) -> bytes:
    data = BytesIO()
    image.save(data, format_, **options)
    return data.getvalue()


def png(width: int, height: int) -> bytes:
    """A PNG that ends after a header with these sizes."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + body + b"\0\0\x10\0IDAT"


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(format_: str) -> None:
    picture = decode_image(encoded(Image.new("RGB", (9, 5), RED), format_))
    assert (picture.width, picture.height, picture.rgb.dtype) == (9, 5, np.uint8)
    assert np.abs(picture.rgb.astype(int) - RED).max() <= 4


def test_modes() -> None:
    clear = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    assert decode_image(encoded(clear, "PNG")).rgb.tolist() == [[[255] * 3] * 2]
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert abs(int(decode_image(encoded(half, "PNG")).rgb[0, 0, 0]) - 127) <= 1
    deep = Image.fromarray(np.array([[0, 0x80FF, 0xFFFF]], np.uint16))
    assert decode_image(encoded(deep, "PNG")).rgb[0, :, 0].tolist() == [0, 0x80, 255]
    grey = Image.new("L", (1, 1), 77)
    assert decode_image(encoded(grey, "PNG")).rgb.tolist() == [[[77] * 3]]
    ink = Image.new("CMYK", (4, 4), (0, 255, 255, 0))
    assert np.abs(decode_image(encoded(ink, "JPEG")).rgb.astype(int) - (255, 0, 0)).max() <= 4


def test_orientation_and_first_frame() -> None:
    image = Image.new("RGB", (6, 2), RED)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(encoded(image, "JPEG", exif=exif)).rgb.shape == (6, 2, 3)
    frames = [Image.new("P", (2, 2), 1), Image.new("P", (2, 2), 2)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    moving = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(moving).rgb[0, 0].tolist() == [255, 0, 0]


def test_equal_pixels_have_equal_digests() -> None:
    image = Image.new("RGB", (3, 2), RED)
    same = decode_image(encoded(image, "PNG")).digest
    assert decode_image(encoded(image, "BMP")).digest == same
    assert decode_image(encoded(Image.new("RGB", (2, 3), RED), "PNG")).digest != same


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"not an image", "none of JPEG"),
        (b"\0" * (MAX_BYTES + 1), "65 MiB|64 MiB"),
        (png(100_000, 100_000), "more than 100 million|100000 x 100000"),
        (png(70_000, 2), "70000 x 2"),
        (png(10_000, 10), "one side is more than"),
        (png(8, 8), "damaged"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of"),
    ],
    ids=["empty", "text", "large", "bomb", "long", "thin", "cut", "svg"],
)
def test_broken_images(data: bytes, says: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^messages.0. .*({says})") as found:
        decode_image(data, "messages[0]")
    assert "\n" not in str(found.value)


def test_every_cut_of_a_file_is_one_sentence() -> None:
    whole = encoded(Image.effect_noise((24, 24), 50).convert("RGB"), "PNG")
    for n in range(0, len(whole) - 20, 61):
        with pytest.raises(UnsupportedError):
            decode_image(whole[:n])


def test_sizes() -> None:
    area = 28 * 28
    assert round_to_area(300, 180, 28, 8 * area, 4096 * area) == (308, 168)
    assert round_to_area(61, 47, 28, 8 * area, 4096 * area) == (112, 84)
    w, h = round_to_area(9000, 9000, 28, 8 * area, 4096 * area)
    assert w == h == 64 * 28
    assert round_to_area(4, 800, 28, 8 * area, 4096 * area)[0] == 28
    assert round_up(300, 180, 28, 1540) == (308, 196)
    assert round_up(61, 47, 28, 1540) == (84, 56)
    assert round_up(3080, 1540, 28, 1540) == (1540, 784)
    limit = 280 * 48 * 48
    assert fill_area(300, 180, 48, limit) == (1008, 576)
    assert fill_area(1008, 576, 48, limit) == (1008, 576)  # as resized before
    assert fill_area(61, 47, 48, limit) == (912, 672)
    assert fill_area(4000, 4, 48, limit)[1] == 48
    assert fill_area(4000, 4, 48, limit)[0] <= 280 * 48


def test_patches_of_a_token_are_adjacent() -> None:
    assert Grid(4, 4, 2).order().tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    pixels = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)
    found = patches(pixels, 2)
    assert found.shape == (2, 12)
    assert found[1, :4].tolist() == [6, 9, 18, 21]  # channel 0 of the second patch


def test_axes_of_pairs() -> None:
    assert RopeParams(sections=(1, 2, 1, 0)).axes(4) == [0, 1, 1, 2]
    assert RopeParams(sections=(3, 2, 2), interleaved=True).axes(7) == [0, 1, 2, 0, 1, 2, 0]


def test_positions_of_an_image() -> None:
    rows = np.zeros((6, 4), np.float32)
    media = Media(rows, "ab" * 32, (2, 3))
    assert media.advance == 3
    assert media.positions(10, 0, 6).tolist() == [[10, 10, 10], [10, 10, 11], [10, 10, 12], [10, 11, 10], [10, 11, 11],
                                                  [10, 11, 12]]  # fmt: skip
    plain = Media(rows, "ab" * 32)
    assert plain.advance == 6
    assert plain.positions(10, 2, 4).tolist() == [[12] * 3, [13] * 3]
    assert media.token < 0


def test_batches_with_images() -> None:
    media = Media(np.zeros((4, 2), np.float32), "cd" * 32, both=True)
    batch = Batch.mixed([[1, 2], media, [3, 4, 5]])
    assert batch.tokens.tolist() == [1, 2, *[media.token] * 4, 3, 4, 5]
    assert batch.cuts(5) == [(0, 2), (2, 7), (7, 9)]  # the image is whole
    assert batch.cuts(3) == [(0, 2), (2, 5), (5, 8), (8, 9)]  # it does not fit
    causal = Batch.mixed([[1, 2], Media(media.rows, media.digest), [3, 4, 5]])
    assert causal.cuts(5) == [(0, 5), (5, 9)]
    piece = causal.slice(4, 8)
    assert [p.start for p in piece.media] == [-2]
    assert not causal.slice(6, 9).media
