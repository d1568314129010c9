"""The sizes to which processors resize images, and resizing."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""(height, width, 3)"""
_RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}


def resized(rgb: Pixels, width: int, height: int, resample: str) -> Pixels:
    """Return pixels at another size."""
    from PIL import Image

    if rgb.shape[:2] == (height, width):
        return rgb
    return np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling(_RESAMPLE[resample])))


def cut(rgb: Pixels, side: int) -> list[list[Pixels]]:
    """Return the rows of square tiles of an image in whole tiles."""
    return cut_grid(rgb, side, side)


def cut_grid(rgb: Pixels, width: int, height: int) -> list[list[Pixels]]:
    """Return the rows of tiles of an image in whole tiles of a size."""
    return [
        [rgb[y : y + height, x : x + width] for x in range(0, rgb.shape[1] - width + 1, width)]
        for y in range(0, rgb.shape[0] - height + 1, height)
    ]


def padded(rgb: Pixels, width: int, height: int) -> Pixels:
    """Return pixels with black margins at the right and below."""
    if rgb.shape[:2] == (height, width):
        return rgb
    out = np.zeros((height, width, 3), np.uint8)
    out[: rgb.shape[0], : rgb.shape[1]] = rgb
    return out


def squared(rgb: Pixels, colour: tuple[float, float, float]) -> Pixels:
    """Return pixels in the middle of a square of a colour, whose parts are from 0 to 1."""
    (height, width), side = rgb.shape[:2], max(rgb.shape[:2])
    out = np.empty((side, side, 3), np.uint8)
    out[:] = [min(int(x * 255), 255) for x in colour]
    y, x = (side - height) // 2, (side - width) // 2
    out[y : y + height, x : x + width] = rgb
    return out


def closest_grid(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return the columns and rows of least to most tiles whose aspect is closest to that of an image.

    Of equally close ones, a larger one is taken if the image fills more than half of it.
    """
    shapes = sorted(
        ((w, h) for w in range(1, most + 1) for h in range(1, most + 1) if least <= w * h <= most),
        key=lambda shape: shape[0] * shape[1],
    )
    aspect, best, found = width / height, math.inf, (1, 1)
    for w, h in shapes:
        off = abs(aspect - w / h)
        if off < best or (off == best and width * height > side * side * w * h / 2):
            best, found = off, (w, h)
    return found


def round_to_area(width: int, height: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Return the nearest size in whole units whose area is from `least` to `most` (Qwen's rule)."""
    w, h = round(width / unit) * unit, round(height / unit) * unit
    if max(w, unit) * max(h, unit) > most:
        beta = math.sqrt(height * width / most)
        h = max(unit, math.floor(height / beta / unit) * unit)
        w = max(unit, math.floor(width / beta / unit) * unit)
    elif h * w < least:
        beta = math.sqrt(least / (height * width))
        h, w = math.ceil(height * beta / unit) * unit, math.ceil(width * beta / unit) * unit
    return max(w, unit), max(h, unit)


def round_up(width: int, height: int, unit: int, longest: int) -> tuple[int, int]:
    """Return the size in whole units, rounded up, after shrinking the longest edge to `longest` (Pixtral's rule)."""
    ratio = max(width / longest, height / longest)
    if ratio > 1:
        width, height = max(math.floor(width / ratio), 1), max(math.floor(height / ratio), 1)
    return -(-width // unit) * unit, -(-height // unit) * unit


def fill_area(width: int, height: int, unit: int, area: int) -> tuple[int, int]:
    """Return the largest size of the same aspect in whole units whose area is at most `area` (Gemma 4's rule).

    A size that the rule makes of other images is kept, so that resizing an image twice changes nothing.
    """
    if width % unit == 0 and height % unit == 0 and width * height <= area < (width + unit) * (height + unit):
        return width, height
    factor = math.sqrt(area / (width * height))
    w, h = (math.floor(factor * x / unit) * unit for x in (width, height))
    most = area // unit**2 * unit
    if not h:
        return min(math.floor(width / height) * unit, most), unit
    if not w:
        return unit, min(math.floor(height / width) * unit, most)
    return w, h
