"""Sizes as text: one reading of units for every option and file that takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikcli.cli.parser import parse
from ikcli.commands._target import _amount
from ikcli.settings.values import parse_device_spec, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2G", 2 << 30), ("2g", 2 << 30), ("2GiB", 2 << 30), ("2GB", 2 * 10**9), (" 300M ", 300 << 20), ("1K", 1024),
        ("900 mib", 900 << 20), ("1.5GB", 1_500_000_000), (".5 kib", 512), ("1.T", 1 << 40), ("3TB", 3 * 10**12),
        ("7b", 7), ("4096B", 4096),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1G",
        "1PB",
        "0",
        "0M",
        "0.1B",
        "1,5G",
        "1.2.3G",
        "1e3M",
        "nanG",
        "1iB G",
        "1 parsec",
        "9" * 400 + "G",
    ],
)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="has the size"):
        parse_size(text)


def test_a_number_alone_is_ambiguous() -> None:
    with pytest.raises(ValueError, match='has the size "24"; write it with a unit, 24GiB or 24GB'):
        parse_size("24")


@pytest.mark.parametrize(("text", "size"), [("2G", 2 << 30), ("2GB", 2 * 10**9)])
def test_all_options_read_the_same(text: str, size: int, tmp_path: Path) -> None:
    assert parse("gguf-split", ["a", "b", "--split-max-size", text]).config.max_size == size
    assert parse("convert", ["a", "--split-max-size", text]).config.split_max_size == size
    assert parse("publish", ["a", "--split-max-size", text]).config.split_max_size == size
    assert parse_device_spec(f"cuda:{text}")[0].n_bytes == size
    assert _amount("--target-size", text).n_bytes == size
    assert _amount("--target-size", str(size)).n_bytes == size  # bytes, as before there were units
