"""Write many quants of one model in one pass: read every tensor once, and encode equal requests of several jobs once.

Each job writes one file under a temporary name, renamed when complete, with the bytes that `quantizer.run` would write.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ikcli.errors import IkError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.writer import GGUFWriter
from ikcli.quant.job import JobProgress, OutputPart, QuantizeJob
from ikcli.quant.output_check import check_output, check_room, existing_folder
from ikcli.quant.quantizer import (
    Bytes,
    Readers,
    Target,
    TensorEncoder,
    check,
    copied,
    output_parts,
    part_is_done,
    prepare_folder,
)
from ikcli.quant.recipes import TypeChoice


@dataclass(frozen=True, slots=True)
class MatrixJob:
    """A job of the matrix. Jobs with equal `data` (importance files, options of encoders) share what they encode."""

    job: QuantizeJob
    data: Hashable = None


@dataclass(slots=True)
class _Output:
    part: OutputPart
    job: MatrixJob
    writer: GGUFWriter
    next: int = 0

    def choice(self, name: str) -> TypeChoice | None:
        """Return the choice for the tensor if it is the next one of this file."""
        if self.next < len(self.part.choices) and self.part.choices[self.next].name == name:
            return self.part.choices[self.next]
        return None


def check_rooms(needs: Sequence[tuple[Path, int]]) -> None:
    """Raise IkError if a file system has less free space than the files (path, bytes) that go there need."""
    folders: dict[int, tuple[Path, int]] = {}
    for path, n_bytes in needs:
        folder = existing_folder(path)
        device = os.stat(folder).st_dev
        folders[device] = (folder, folders.get(device, (folder, 0))[1] + n_bytes)
    for folder, n_bytes in folders.values():
        check_room(folder, n_bytes)


def run_matrix(jobs: Sequence[MatrixJob], progress: JobProgress | None = None) -> list[Path]:
    """Write the files of all jobs, which share one model, and return the paths of those that were not skipped.

    `progress` gets the tensors and bytes of the model, not of each job. Raises the errors of `quantizer.run`.
    """
    hooks = progress or JobProgress()
    file = jobs[0].job.file
    for j in jobs:
        check(j.job)
    todo = []
    for j in jobs:
        (part,) = output_parts(j.job)
        check_output([part.path], file.paths)
        if j.job.skip_existing and part_is_done(part):
            hooks.skipped(part.path)
        else:
            todo.append((j, part))
    if len({part.path.resolve() for _, part in todo}) < len(todo):
        raise UsageError("two results have the same file name")
    if not todo:
        return []
    paths = [part.path for _, part in todo]
    _prepare([path for path in paths if path.parent.is_dir()])  # what killed runs left takes room
    check_rooms([(part.path, part.n_bytes) for _, part in todo])
    _prepare(paths)
    readers = Readers()
    n_threads = max(1, todo[0][0].job.n_threads)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(n_threads))
        outputs = [
            _Output(part, j, stack.enter_context(GGUFWriter(part.path, part.metadata, part.specs(), file.alignment)))
            for j, part in todo
        ]
        for number, name in enumerate(_names([part for _, part in todo]), 1):
            _tensor(name, number, outputs, pool, readers, hooks)
    return paths


def _prepare(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            prepare_folder([path])
        except OSError as problem:
            raise IkError(f"{path.parent}: {problem.strerror or problem}") from None


def _names(parts: Sequence[OutputPart]) -> list[str]:
    """Return the tensors of all files in order.

    A file may lack some of them (no copy of the output), but never has others between.
    """
    return [c.name for c in max(parts, key=lambda part: len(part.choices)).choices]


def _tensor(
    name: str, number: int, outputs: Sequence[_Output], pool: ThreadPoolExecutor, readers: Readers, hooks: JobProgress
) -> None:
    """Write one tensor to all files that have it."""
    groups: dict[tuple[GGMLType, Hashable], tuple[Target, list[GGUFWriter]]] = {}
    mine: list[_Output] = []
    for output in outputs:
        c = output.choice(name)
        if c is None:
            continue
        if not mine:
            hooks.tensor(number, c)
        mine.append(output)
        key = (c.new, output.job.data if c.changes else None)
        if key not in groups:
            groups[key] = (Target(output.job.job, c), [])
        groups[key][1].append(output.writer)
        output.writer.begin_tensor(name)
    targets = [target for target, _ in groups.values()]
    for pieces in _pieces(outputs[0].job.job, targets, pool, readers, hooks.advance):
        for (_, writers), piece in zip(groups.values(), pieces, strict=True):
            for writer in writers:
                writer.append(piece)
    for output in mine:
        output.writer.end_tensor()
        output.next += 1


def _pieces(
    job: QuantizeJob,
    targets: Sequence[Target],
    pool: ThreadPoolExecutor,
    readers: Readers,
    advance: Callable[[float], None],
) -> Iterator[list[Bytes]]:
    """Yield the new bytes of each target, piece by piece."""
    if all(not t.choice.changes for t in targets):
        for piece in copied(job.file, targets[0].info.name, advance):
            yield [piece]
        return
    yield from TensorEncoder(job.file, targets, max(1, job.n_threads), readers).run(pool, advance)
