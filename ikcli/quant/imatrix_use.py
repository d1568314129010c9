"""Apply an importance matrix to the tensors of a model: sizes, experts with few rows, blocks that never ran.

Blocks of multi-token prediction (MTP, NextN) have no data where they did not run while the matrix was collected, as in
files of other programs. Their tensors then borrow the entry of
the tensor of the same name and shape in the last ordinary block that has one: the residual stream that feeds most of
them changes little from block to block. Experts borrow the mean over the experts of that block, because experts of two
blocks have only their numbers in common. `nextn.*` tensors have no counterpart and stay without data.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ikcli.gguf.heads import head_blocks
from ikcli.gguf.reader import TensorInfo
from ikcli.gguf.types import TYPES
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.imatrix_lookup import DRAW, is_experts, layer_share, without_data
from ikcli.quant.recipes import TypeChoice

FEW_ROWS = int(9 * DRAW)  # with fewer the mean of the layer makes up more than a tenth
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class ExpertData:
    """How many experts of one tensor saw no row, or few rows, with the least and the median number of rows.

    Rows are None where one count stands for all experts (`.dat` files).
    """

    name: str
    n_experts: int
    n_empty: int
    n_few: int
    least: float | None = None
    median: float | None = None


def why_missing(name: str, names: Container[str], mtp: Iterable[int]) -> str:
    """Explain why an importance matrix has no data for a tensor of a model with these names and MTP blocks."""
    if any(name.startswith(f"blk.{il}.") for il in mtp):
        return "MTP (did not run while collecting)"
    if name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in names):
        return "output (collected with --process-output)"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "embeddings (rows are looked up, not multiplied)"
    if ".indexer." in name or ".attn_indexer_" in name:
        return "indexer (runs where the context is longer than its top-k)"
    if ".vis_" in name:
        return "visual experts (collected with --mmproj and --image)"
    return "no data"


def with_borrowed(imatrix: Imatrix, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any]) -> Imatrix:
    """Return the matrix with entries of the last ordinary blocks for tensors of MTP blocks that have none."""
    blocks = head_blocks(tensors, metadata)
    ordinary = sorted({int(m[1]) for n in tensors if (m := _BLOCK.match(n))} - blocks, reverse=True)
    borrowed: dict[str, str] = {}
    for name, t in tensors.items():
        m = _BLOCK.match(name)
        if m is None or int(m[1]) not in blocks or len(t.shape) < 2 or name in imatrix.dropped:
            continue
        if imatrix.find(name, t.shape) is not None:
            continue
        for il in ordinary:
            other = f"blk.{il}.{m[2]}"
            same = other in tensors and tensors[other].shape == t.shape
            found = imatrix.find(other, t.shape) if same else None
            if found is not None:
                borrowed[name] = found
                break
    return replace(imatrix, borrowed=borrowed) if borrowed else imatrix


def weighted_choices(choices: Sequence[TypeChoice]) -> list[TypeChoice]:
    """Return the choices whose result depends on importance weights: quantized in this run, not only regrouped."""
    return [
        c
        for c in choices
        if c.changes and TYPES[c.new].is_quantized and TYPES[c.new].base != c.old and TYPES[c.old].base != c.new
    ]


def check_sizes(imatrix: Imatrix, choices: Sequence[TypeChoice]) -> None:
    """Raise FormatError for the first tensor to be changed whose entry has another size."""
    for c in choices:
        if c.changes:
            imatrix.fits(c.source or c.name, c.shape)


def expert_data(imatrix: Imatrix, choices: Sequence[TypeChoice]) -> list[ExpertData]:
    """Return the data of expert tensors that are quantized with their own weights, in the order of `choices`."""
    found: list[ExpertData] = []
    for c in weighted_choices(choices):
        n = c.shape[2] if len(c.shape) > 2 else 1
        name = imatrix.find(c.name, c.shape)
        if n < 2 or not is_experts(c.name) or name is None or c.name in imatrix.borrowed:
            continue
        entry = imatrix.entries[name]
        if entry.sums.size != n * c.shape[0]:
            continue
        empty = without_data(entry.sums, entry.counts, n)
        if len(entry.counts) != n:
            found.append(ExpertData(c.name, n, int(empty.sum()), 0))
            continue
        few = ~empty & (layer_share(entry.counts) > layer_share(np.array([FEW_ROWS], np.float32)))
        least, median = float(entry.counts.min()), float(np.median(entry.counts))
        found.append(ExpertData(c.name, n, int(empty.sum()), int(few.sum()), least, median))
    return found


def expert_lines(data: Sequence[ExpertData], verbose: bool = False) -> list[str]:
    """Describe what becomes of experts with few or no data.

    One line, plus one per tensor if `verbose`; empty if all experts have data.
    """
    scarce = [d for d in data if d.n_empty or d.n_few]
    if not scarce:
        return []
    empty, few = sum(d.n_empty for d in scarce), sum(d.n_few for d in scarce)
    mean = "the mean of their layer"
    parts = [f"{empty} without data get {mean}"] if empty else []
    if few:
        parts.append(f"{few} with fewer than {FEW_ROWS} rows are drawn towards {'it' if empty else mean}")
    total = sum(d.n_experts for d in data)
    lines = [f"importance matrix: of {total} experts in {len(data)} tensors, {', '.join(parts)}"]
    if verbose:
        lines += [f"  {d.name}: {d.n_empty} of {d.n_experts} experts without data{_few_text(d)}" for d in scarce]
    return lines


def _few_text(d: ExpertData) -> str:
    if d.median is None:
        return ""
    return f", {d.n_few} with fewer than {FEW_ROWS} rows (median {d.median:.0f})"


def borrowed_lines(imatrix: Imatrix, choices: Sequence[TypeChoice], metadata: Mapping[str, Any]) -> list[str]:
    """Describe which tensors of MTP blocks borrow data of another block, and which have none at all."""
    blocks = head_blocks([c.name for c in choices], metadata)
    mine = [c for c in weighted_choices(choices) if (m := _BLOCK.match(c.name)) and int(m[1]) in blocks]
    lines: list[str] = []
    have = [c.name for c in mine if c.name in imatrix.borrowed]
    if have:
        sources = sorted({int(m[1]) for n in have if (m := _BLOCK.match(imatrix.borrowed[n]))})
        where = ", ".join(str(il) for il in sources)
        lines.append(
            f"{len(have)} tensors of MTP blocks, which did not run while the matrix was collected, are weighted like "
            f"those of block {where}: {', '.join(name_patterns(have))}"
        )
    none = [c.name for c in mine if imatrix.find(c.name, c.shape) is None]
    if none:
        lines.append(f"MTP tensors without importance data get equal weights: {', '.join(name_patterns(none))}")
    return lines


def name_patterns(names: Iterable[str]) -> list[str]:
    """Join the block numbers of equal names: `blk.{0..2,5}.attn_k_b.weight`; other names stay as they are."""
    blocks: dict[str, list[int]] = {}
    for name in names:
        m = _BLOCK.match(name)
        blocks.setdefault(m[2] if m else name, []).extend([int(m[1])] if m else [])
    return [f"blk.{_ranges(found)}.{rest}" if found else rest for rest, found in blocks.items()]


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
    return text if text.isdigit() else f"{{{text}}}"
