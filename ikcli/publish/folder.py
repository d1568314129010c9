"""Make a folder for a hub from quants of one model: named and split files, digests, recipes, results, a model card.

Everything is checked and measured first; the folder is made under a temporary name and renamed when it is complete. It
contains a digest of its inputs, by which a later run recognizes the folder of an earlier one.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ikcli import log
from ikcli.errors import IkError, UsageError
from ikcli.files import written_whole
from ikcli.gguf import digests
from ikcli.gguf.constants import FILE_TYPE_GUESSED, FILE_TYPES
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.gguf.split import copy_tensors, split, tensor_specs
from ikcli.gguf.writer import SPLIT_KEYS, GGUFWriter, plan_splits
from ikcli.publish.checksums import MADE_OF, write_sums
from ikcli.publish.model_card import card, quality_plot
from ikcli.publish.records import Published, PublishedQuant, PublishOptions, PublishPlan
from ikcli.quant.output_check import check_room, existing_folder
from ikcli.quant.recipes import RecipeOptions, choose_types
from ikcli.quant.target_report import recipe_rules
from ikcli.report.read import read_results

_F16 = 1
_FLOATS = re.compile(r"[-._](f16|bf16|f32|fp16|fp32)$", re.I)
_FACTS = ("PPL", "Mean KLD")


def plan_publish(options: PublishOptions) -> PublishPlan:
    """Plan the folder; IkError for models that do not belong together, names that clash, unusable files."""
    out = options.out
    is_made = options.reuse and _is_made(options)
    if not is_made and out.exists() and (not out.is_dir() or any(out.iterdir())):
        way = "; without models it is uploaded as it is" if options.reuse and out.is_dir() else ""
        raise UsageError(
            f"--out {out} is there already{way and ', made of other files or options'}; name a new or empty folder{way}"
        )
    if out.absolute().resolve() == Path.cwd().resolve():  # replaced, and a shell would stay in the old one
        raise UsageError(f"--out {out} is the current folder; name another one")
    if not os.access(existing_folder(out), os.W_OK | os.X_OK) or not existing_folder(out).is_dir():
        raise UsageError(f"--out {out}: {existing_folder(out)} takes no files; choose another folder")
    for path in (options.imatrix, *options.sources):
        if path is not None and not path.is_file():
            raise UsageError(f"{path} is not a file")
    files = [open_gguf(path) for _, path in options.models]
    first = files[0]
    for file in files[1:]:
        if file.arch != first.arch or _shapes(file) != _shapes(first):
            raise UsageError(f"{file.paths[0]} is not of the same model as {first.paths[0]}: other tensors")
    name = _file_name(options.name or _text(first, "general.name"))
    stems = [re.sub(r"-\d{5}-of-\d{5}$", "", path.stem) for _, path in options.models]
    name = name or _common_name(stems[0], _type_of(first))
    labels = [
        given or _label(stem, name, file) for (given, _), stem, file in zip(options.models, stems, files, strict=True)
    ]
    for i, label in enumerate(labels):
        if not re.fullmatch(r"[\w.+-]+", label):
            raise UsageError(f'"{label}" cannot be a label in a file name; use letters, digits, - and _')
        if label in labels[:i]:
            raise UsageError(
                f"{options.models[labels.index(label)][1]} and {options.models[i][1]} are both called {label}; "
                "give one a name: LABEL=FILE"
            )
    splits = [plan_splits(tensor_specs(file), max_bytes=options.max_bytes) for file in files]
    qualities = _qualities(options, name, labels, stems)
    quants = [
        PublishedQuant(
            label, _paths(f"{name}-{label}", len(parts)), _type_of(file), file.n_bytes,
            8 * file.n_bytes / file.n_elements, f"recipes/{name}-{label}.txt", found,
        )
        for label, parts, file, found in zip(labels, splits, files, qualities, strict=True)
    ]  # fmt: skip
    imatrix = f"{name}-imatrix{options.imatrix.suffix}" if options.imatrix is not None else ""
    made = Published(
        out, name, options.base_model or _base_model(first), options.license or _text(first, "general.license"),
        _texts(first, "general.tags"), _texts(first, "general.languages"), imatrix, tuple(options.notes), (),
        tuple(quants),
    )  # fmt: skip
    return PublishPlan(options, files, splits, made, is_made)


def publish(plan: PublishPlan, advance: Callable[[float], None] = lambda n_bytes: None) -> Published:
    """Make the folder; `advance` gets the bytes of models as they are copied. A failed run leaves nothing behind."""
    options, out = plan.options, plan.options.out.absolute()
    if plan.is_made:
        return plan.made
    copied = [f.n_bytes for f, parts in zip(plan.files, plan.splits, strict=True) if not _as_it_is(plan, f, parts)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        check_room(out.parent, sum(copied))
        sources = tuple((path.name, digests.of_file(path)) for path in options.sources)
        made = replace(plan.made, sources=sources)
        with written_whole(out) as temporary:
            temporary.mkdir()
            _fill(temporary, plan, made, advance)
    except OSError as problem:
        raise IkError(f"{out}: cannot be written ({problem.strerror or problem})") from None
    return made


def _as_it_is(plan: PublishPlan, file: GGUFFile, parts: Sequence[int]) -> bool:
    return plan.options.link and len(parts) == 1 and len(file.paths) == 1


def _fill(folder: Path, plan: PublishPlan, made: Published, advance: Callable[[float], None]) -> None:
    options = plan.options
    (folder / "recipes").mkdir()
    for file, parts, quant in zip(plan.files, plan.splits, made.quants, strict=True):
        target = folder / quant.paths[0]
        target.parent.mkdir(exist_ok=True)
        if len(parts) > 1:
            split(str(file.paths[0]), str(target.parent / f"{made.name}-{quant.label}"), max_bytes=options.max_bytes,
                  advance=advance)  # fmt: skip
        elif len(file.paths) > 1:
            keys = {k: v for k, v in file.typed_metadata().items() if k not in SPLIT_KEYS}
            with GGUFWriter(target, keys, tensor_specs(file), alignment=file.alignment) as writer:
                copy_tensors(file, writer, advance)
        else:
            _place(file.paths[0], target, options.link)
            advance(file.n_bytes)
        text = "\n".join(recipe_of_file(file)) + "\n"
        (folder / quant.recipe).write_text(text, encoding="utf-8")
    if options.imatrix is not None:
        shutil.copyfile(options.imatrix, folder / made.imatrix)
    plot = quality_plot(made.quants)
    if plot:
        (folder / "quality.svg").write_text(plot, encoding="utf-8")
    text = card(made, "quality.svg" if plot else "")
    (folder / "README.md").write_text(text, encoding="utf-8", errors="replace")
    write_sums(folder)
    (folder / MADE_OF).write_text(_fingerprint(options) + "\n", encoding="utf-8")


def _is_made(options: PublishOptions) -> bool:
    """Return whether the folder is complete and was made with these options from the current files."""
    try:
        return (options.out / MADE_OF).read_text(encoding="utf-8").strip() == _fingerprint(options)
    except (OSError, UnicodeDecodeError):
        return False


def _fingerprint(options: PublishOptions) -> str:
    """Hash the options, and names, sizes and times of the files."""
    files = [*(p for _, p in options.models), *(p for _, p in options.results), *options.sources]
    files += [options.imatrix] if options.imatrix is not None else []
    parts = [part for path in files for part in _parts_of(path)]
    known = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in parts if p.is_file()]
    said = (options.name, options.base_model, options.license, options.max_bytes, list(options.notes), options.link)
    labels = [label for label, _ in (*options.models, *options.results)]
    return hashlib.sha256(repr((said, labels, known)).encode()).hexdigest()


def _parts_of(path: Path) -> list[Path]:
    """Return all parts of a split model, else the file itself."""
    found = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", path.name)
    return sorted(path.parent.glob(f"{glob.escape(found[1])}?????{found[2]}")) if found else [path]


def _place(source: Path, target: Path, link: bool) -> None:
    if link:
        try:
            os.link(source.resolve(), target)
            return
        except OSError as problem:
            raise IkError(f"{source}: cannot make a hard link to it ({problem.strerror}); drop --link") from None
    shutil.copyfile(source, target)


def recipe_of_file(file: GGUFFile) -> list[str]:
    """Return rules for `--custom-q @FILE` that give every tensor of a model its type in this file."""
    plain = RecipeOptions(_F16, ignore_imatrix_rules=True)
    choices = choose_types(list(file.tensors.values()), file.metadata, plain)
    types = {c.name: file.tensors[c.name].type for c in choices if not c.reason.startswith("kept")}
    bpw = 8 * file.n_bytes / file.n_elements
    return [f"# {_type_of(file)}: {file.n_bytes} bytes, {bpw:.4f} bits per weight", *recipe_rules(types)]


def _qualities(
    options: PublishOptions, name: str, labels: Sequence[str], stems: Sequence[str]
) -> list[dict[str, tuple[float, float | None]]]:
    """Return the measurements of each quant, found by its label or file name; of several the last counts."""
    found: list[dict[str, tuple[float, float | None]]] = [{} for _ in labels]
    if not options.results:
        return found
    results = read_results([(label, path) for label, path in options.results])
    for p in results.problems:
        log.warn(f"{p.source}:{p.line}: {p.reason}: {p.text[:100]}")
    for q in results.qualities:
        mine = [i for i, label in enumerate(labels) if q.label in (label, f"{name}-{label}", stems[i])]
        if not mine:
            log.warn(f"{q.source}:{q.line}: results of {q.label}, which is not one of the quants; use LABEL=FILE")
        for i in mine:
            found[i].update({key: q.values[key] for key in _FACTS if key in q.values})
    return found


def _shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in file.tensors.values() if t.name != "output_extra.weight"}


def _type_of(file: GGUFFile) -> str:
    """Return the name of the file type; without one, the type of most weights."""
    number = file.get("general.file_type")
    if isinstance(number, int):
        known = FILE_TYPES.get(number & ~FILE_TYPE_GUESSED)
        if known is not None and known.names:
            return known.names[0]
    sizes: dict[str, int] = {}
    for t in file.tensors.values():
        sizes[t.type.name] = sizes.get(t.type.name, 0) + t.n_elements
    return max(sizes, key=lambda key: sizes[key])


def _file_name(text: str) -> str:
    """Turn `My Model 7B` into `My-Model-7B`."""
    return re.sub(r"[^\w.+]+", "-", text).strip("-.")


def _common_name(stem: str, type: str) -> str:
    bare = stem[: -len(type) - 1] if stem.lower().endswith(("-" + type.lower(), "." + type.lower())) else stem
    return _file_name(_FLOATS.sub("", bare)) or "model"


def _label(stem: str, name: str, file: GGUFFile) -> str:
    """Return what follows the model's name in the file name, or its part from the file type on; else the file type."""
    if stem.lower().startswith(name.lower() + "-"):
        return stem[len(name) + 1 :]
    type = _type_of(file)
    found = re.search(rf"[-._]({re.escape(type)}(?:[-._].*)?)$", stem, re.I)
    return found[1] if found else type


def _paths(stem: str, n_parts: int) -> tuple[str, ...]:
    if n_parts == 1:
        return (f"{stem}.gguf",)
    return tuple(f"{stem}/{stem}-{i + 1:05d}-of-{n_parts:05d}.gguf" for i in range(n_parts))


def _base_model(file: GGUFFile) -> str:
    """Return `user/repo` of the model itself if metadata name it; `general.base_model` is what it was derived from."""
    for key in ("general.source.huggingface.repository", "general.repo_url", "general.source.repo_url"):
        m = re.fullmatch(r"(?:https?://huggingface\.co/)?([\w.-]+/[\w.-]+?)/?", str(file.get(key) or ""))
        if m:
            return m[1]
    return ""


def _text(file: GGUFFile, key: str) -> str:
    value = file.get(key)
    return value if isinstance(value, str) else ""


def _texts(file: GGUFFile, key: str) -> tuple[str, ...]:
    value = file.get(key)
    return tuple(str(v) for v in value) if isinstance(value, list) else ()
