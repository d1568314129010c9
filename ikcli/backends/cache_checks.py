"""Check the requirements of all backends on a block-quantized cache, worded in the options that chose its type."""

from __future__ import annotations

from ikcli.errors import UnsupportedError
from ikcli.gguf.types import TYPES
from ikcli.graph import Cache


def check_columns(cache: Cache, *columns: int) -> None:
    """Raise UnsupportedError for columns that are not read at halves of a block of 32."""
    if TYPES[cache.type].block_size > 1 and any(c % 16 for c in columns):
        raise UnsupportedError(
            f"a {_what(cache)} cache of type {TYPES[cache.type].name} needs head sizes that are multiples of 16; use "
            f"{_option(cache)} f16"
        )


def check_store(cache: Cache, cols: int, cache_offset: int) -> None:
    """Raise UnsupportedError unless whole blocks are written, and the whole row where it has one scale."""
    traits = TYPES[cache.type]
    if cols % traits.block_size or cache_offset % traits.block_size or cache.cols % traits.block_size:
        raise UnsupportedError(
            f"a {_what(cache)} cache of type {traits.name} needs rows that are multiples of {traits.block_size}, not "
            f"{cache.cols}; use {_option(cache)} f16"
        )
    if traits.row_meta_size and (cols, cache_offset) != (cache.cols, 0):
        raise UnsupportedError(f"rows of a {traits.name} cache have one scale and must be written at once")


def _what(cache: Cache) -> str:
    return {"k": "K", "v": "V"}.get(cache.content, "KV")


def _option(cache: Cache) -> str:
    return "-ctv" if cache.content in ("v", "kv_t") else "-ctk"
