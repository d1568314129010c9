"""Parse names of models (`user/repo[:quant]`), find the quants of a repository and the one that is meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ikcli.errors import IkError, UsageError
from ikcli.suggest import nearest

DEFAULT_QUANT = "Q4_K_M"
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+))?")
_PART = re.compile(r"(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_TYPE = re.compile(
    r"(?:^|[-._])(?P<type>(?:UD-)?(?:(?:IQ|TQ|Q|MXFP|NVFP)\d[A-Z0-9_]*|BF16|F16|F32|FP16|FP32))(?=$|[-.])",
    re.IGNORECASE,
)
_NO_MODELS = ("mmproj", "imatrix")
_PROJECTORS = ("F16", "FP16", "BF16", "F32", "FP32", "Q8_0")


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model name: a repository, and optionally a quant or a file of it."""

    repo: str
    quant: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else f"{self.repo}/{self.file}" if self.file else self.repo


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: `digest` is its SHA-256, or its git blob id outside large file storage."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Quant:
    """A model file with all its parts, under a name that is unique in its repository."""

    name: str
    files: tuple[RemoteFile, ...]

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(file.size for file in self.files)


def parse_ref(text: str, file: str = "") -> ModelRef:
    """Parse `user/repo[:quant]`; raise a UsageError for anything else."""
    found = _NAME.fullmatch(text.strip())
    if found is None or ".." in text:
        raise UsageError(f'"{text}" is not user/repo or user/repo:quant, for example bartowski/SmolLM2-GGUF:Q4_K_M')
    if file and found["quant"]:
        raise UsageError(f"{text} names a quant and --hf-file a file; drop one of them")
    return ModelRef(found["repo"], found["quant"] or "", file)


def is_model(path: str) -> bool:
    """Return whether a file holds a language model, judging by its name."""
    name = PurePosixPath(path).name.lower()
    return name.endswith(".gguf") and not any(word in name for word in _NO_MODELS)


def projector_of(files: Iterable[RemoteFile], model: str) -> RemoteFile | None:
    """Return the projector (mmproj) of a repository for a model file; None if there is none.

    One in the folder of the model comes first, then F16, BF16, F32 and others, as their names say.
    """
    found = [f for f in files if f.path.lower().endswith(".gguf") and "mmproj" in PurePosixPath(f.path).name.lower()]

    def order(file: RemoteFile) -> tuple[bool, int, str]:
        kind = _type_name(file.path[: -len(".gguf")])
        rank = _PROJECTORS.index(kind) if kind in _PROJECTORS else len(_PROJECTORS)
        return PurePosixPath(file.path).parent != PurePosixPath(model).parent, rank, file.path

    return min(found, key=order, default=None)


def part_of(path: str) -> tuple[str, int, int]:
    """Return the name without part numbers and extension, the number of the part (from 1), and the number of parts."""
    found = _PART.fullmatch(path)
    if found is None:
        return path[: -len(".gguf")] if path.lower().endswith(".gguf") else path, 1, 1
    return found["prefix"], int(found["no"]), int(found["count"])


def part_names(path: str) -> list[str]:
    """Return the names of all parts of a model, given any of them."""
    prefix, _, count = part_of(path)
    return (
        [path]
        if _PART.fullmatch(path) is None
        else [f"{prefix}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    )


def quants_of(files: Iterable[RemoteFile]) -> list[Quant]:
    """Return the models of a repository in file order, with their parts; skip projectors and importance matrices."""
    groups: dict[tuple[str, int], list[RemoteFile]] = {}
    for file in files:
        if is_model(file.path):
            prefix, _, count = part_of(file.path)
            groups.setdefault((prefix, count), []).append(file)
    names = _unique_names([prefix for prefix, _ in groups])
    return [
        Quant(name, tuple(sorted(members, key=lambda file: part_of(file.path)[1])))
        for name, members in zip(names, groups.values(), strict=True)
    ]


def _unique_names(prefixes: Sequence[str]) -> list[str]:
    """Return the last type in the file name; if several share it, the directory, the stem, or the whole path."""
    choices = [
        [_type_name(p), PurePosixPath(p).parent.name or PurePosixPath(p).name, PurePosixPath(p).name, p]
        for p in prefixes
    ]
    names = [options[0] for options in choices]
    for level in range(1, 4):
        taken = [name.lower() for name in names]
        names = [
            options[level] if taken.count(name.lower()) > 1 else name
            for name, options in zip(names, choices, strict=True)
        ]
    return names


def _type_name(prefix: str) -> str:
    stem = PurePosixPath(prefix).name
    found = [match["type"] for match in _TYPE.finditer(stem)]
    return found[-1].upper() if found else stem


def choose(ref: ModelRef, quants: Sequence[Quant]) -> Quant:
    """Return the named quant, else Q4_K_M, else the first; raise an IkError that names the nearest and lists all."""
    if not quants:
        raise IkError(
            f"{ref.repo} has no GGUF model; if it has safetensors, ik pull --checkpoint {ref.repo} fetches them for "
            "ik convert"
        )
    if ref.file:
        found = next((q for q in quants if any(f.path == ref.file for f in q.files)), None)
        found = found or next((q for q in quants if any(PurePosixPath(f.path).name == ref.file for f in q.files)), None)
        listed = [file.path for q in quants for file in q.files[:1]]
    else:
        found = _by_name(ref.quant or DEFAULT_QUANT, quants)
        found = quants[0] if found is None and not ref.quant else found
        listed = [q.name for q in quants]
    if found is None:
        wanted = ref.file or ref.quant
        near = nearest(wanted, listed)
        hint = f"did you mean {near}? " if near else ""
        raise IkError(f"{ref.repo} has no {wanted}; {hint}it has {', '.join(listed)}")
    _check_parts(ref, found)
    return found


def _by_name(wanted: str, quants: Sequence[Quant]) -> Quant | None:
    """Return the quant of this name, or one whose name or file ends in it."""
    low = wanted.lower()
    for quant in quants:
        if quant.name.lower() == low:
            return quant
    for quant in quants:
        ends = (quant.name.lower(), PurePosixPath(part_of(quant.files[0].path)[0]).name.lower())
        if any(end.endswith(f"{mark}{low}") for end in ends for mark in "-._"):
            return quant
    return None


def _check_parts(ref: ModelRef, quant: Quant) -> None:
    expected = part_names(quant.files[0].path)
    if lacking := sorted(set(expected) - {file.path for file in quant.files}):
        raise IkError(f"{ref.repo} lacks {len(lacking)} of {len(expected)} parts of {quant.name}: {', '.join(lacking)}")
