"""The tasks of `ik inspect` besides describing a file: `--diff`, `--match`, `--hash`, `--check`, metadata changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ikcli import log
from ikcli.cli.argv import read_lines
from ikcli.cli.columns import MAX_ITEMS, format_size, json_scalar, print_table, printable, short
from ikcli.errors import UsageError
from ikcli.gguf.reader import GGUFFile, TensorInfo, open_gguf
from ikcli.gguf.type_counts import TypeCount, count_types
from ikcli.gguf.types import TYPES
from ikcli.gguf.values import Typed
from ikcli.settings.tools import InspectConfig

_MOST = 20
_MIB = 2**20


def diff(config: InspectConfig, paths: list[Path]) -> int:
    """Run `ik inspect --diff A B`."""
    from ikcli.quant.model_diff import compare

    if len(paths) != 2:
        raise UsageError("--diff compares two files: ik inspect --diff FILE OTHER")
    a, b = (open_gguf(path) for path in paths)
    with log.progress("comparing", a.n_bytes, in_bytes=True) as advance:
        found = compare(a, b, advance)
    tensors = sorted(found.tensors, key=lambda t: -1.0 if t.relative is None else t.relative, reverse=True)
    if config.json:
        out = {
            "paths": [str(p) for p in paths],
            "identical": found.identical,
            "metadata": [{"key": k.key, "a": _json_typed(k.a), "b": _json_typed(k.b)} for k in found.keys],
            "types": [
                {"type": name, "a": _json_count(x), "b": _json_count(y)} for name, x, y in _types_that_differ(a, b)
            ],
            "only_a": [_json_tensor(t) for t in found.only_a],
            "only_b": [_json_tensor(t) for t in found.only_b],
            "same_tensors": found.n_same,
            "tensors": [
                {
                    "name": t.name, "a": _json_tensor(t.a), "b": _json_tensor(t.b), "relative": json_scalar(t.relative),
                    "rms": t.rms, "largest": t.largest, "at": list(t.at), "values": [json_scalar(v) for v in t.values],
                    "n_different": t.n_different, "problem": t.problem,
                }
                for t in tensors
            ],
        }  # fmt: skip
        print(json.dumps(out, indent=2, allow_nan=False))
        return 0
    print(f"A  {paths[0]}: {len(a.tensors)} tensors, {format_size(a.n_bytes)}")
    print(f"B  {paths[1]}: {len(b.tensors)} tensors, {format_size(b.n_bytes)}")
    if found.identical:
        print("no difference in metadata and tensors")
        return 0
    rows: list[tuple[str, ...]]
    if found.keys:
        rows = [(printable(k.key), _typed(k.a), _typed(k.b), _where(k.where)) for k in found.keys]
        print_table("metadata", ("key", "A", "B", "differs"), rows, "llll")
    types = _type_rows(a, b)
    if types:
        print_table("types", ("type", "A tensors", "A MiB", "B tensors", "B MiB"), types, "lrrrr")
    for title, only in (("tensors only in A", found.only_a), ("tensors only in B", found.only_b)):
        if only:
            shown = only if config.tensors else only[:_MOST]
            rows = [(printable(t.name), TYPES[t.type].name, _shape(t), f"{t.n_bytes / _MIB:.2f}") for t in shown]
            print_table(title, ("tensor", "type", "shape", "MiB"), rows, "lllr")
            _rest(len(only) - len(shown))
    print(f"\ntensors of both: {found.n_same} the same, {len(tensors)} different")
    if tensors:
        shown_tensors = tensors if config.tensors else tensors[:_MOST]
        header = ("tensor", "A", "B", "relative", "rms", "largest", "at", "A -> B", "")
        rows = [
            (printable(t.name), _kind(t.a, t.a.shape != t.b.shape), _kind(t.b, t.a.shape != t.b.shape),
             *_errors(t), t.problem)
            for t in shown_tensors
        ]  # fmt: skip
        print_table("tensors that differ, largest relative error first", header, rows, "lllrrrlll")
        _rest(len(tensors) - len(shown_tensors))
    return 0


def _types_that_differ(a: GGUFFile, b: GGUFFile) -> list[tuple[str, TypeCount | None, TypeCount | None]]:
    """Return the types of which the two models have different amounts."""
    left, right = ({c.type: c for c in count_types(list(file.tensors.values()))} for file in (a, b))
    both = dict.fromkeys((*left, *right))
    return [(TYPES[t].name, left.get(t), right.get(t)) for t in both if left.get(t) != right.get(t)]


def _type_rows(a: GGUFFile, b: GGUFFile) -> list[tuple[str, ...]]:
    def cells(count: TypeCount | None) -> tuple[str, str]:
        return ("-", "-") if count is None else (str(count.n_tensors), f"{count.n_bytes / _MIB:.2f}")

    return [(name, *cells(x), *cells(y)) for name, x, y in _types_that_differ(a, b)]


def _json_count(count: TypeCount | None) -> dict[str, int] | None:
    return None if count is None else {"n_tensors": count.n_tensors, "n_bytes": count.n_bytes}


def match(config: InspectConfig, paths: list[Path]) -> int:
    """Run `ik inspect --match RULE`."""
    from ikcli.engine.plan.rule_match import TYPES_OF, match_report

    file = open_gguf(paths[0])
    texts = ["\n".join(read_lines(Path(t[1:]))) if t.startswith("@") else t for t in config.match]
    found = match_report(file, texts)
    for warning in found.warnings:
        log.warn(warning)
    if config.json:
        out = [
            {
                "rule": rule.text, "kind": rule.kind, "target": rule.target, "matched": len(rule.tensors),
                "taken": sum(t.won for t in rule.tensors), "n_bytes": rule.n_bytes, "new_bytes": rule.new_bytes,
                "tensors": [
                    {
                        "name": t.name, "type": TYPES[t.type].name, "n_bytes": t.n_bytes, "taken_by": t.taken_by,
                        "kept": t.kept, "new": None if t.new is None else TYPES[t.new].name, "new_bytes": t.new_bytes,
                    }
                    for t in rule.tensors
                ],
            }
            for rule in found.rules
        ]  # fmt: skip
        print(json.dumps({"path": str(paths[0]), "rules": out}, indent=2, allow_nan=False))
        return 0
    for number, rule in enumerate(found.rules, 1):
        won = sum(t.won for t in rule.tensors)
        size = format_size(rule.n_bytes)
        after = f" -> {format_size(rule.new_bytes)}" if rule.kind == TYPES_OF and rule.new_bytes is not None else ""
        kind = f" ({rule.kind})" if rule.target else ""
        print(f'rule {number} "{rule.text}"{kind}: {len(rule.tensors)} match, {won} taken, {size}{after}')
        shown = rule.tensors if config.tensors else rule.tensors[:_MOST]
        rows = [
            (printable(t.name), TYPES[t.type].name, f"{t.n_bytes / _MIB:.2f}",
             _fate(t, rule.target, [r.text for r in found.rules]))
            for t in shown
        ]  # fmt: skip
        print_table("tensors", ("tensor", "type", "MiB", "goes to"), rows, "llrl")
        _rest(len(rule.tensors) - len(shown))
        if number < len(found.rules):
            print()
    return 0


def _fate(t: Any, target: str, rules: list[str]) -> str:
    if t.taken_by is not None:
        return f'rule {t.taken_by + 1} "{rules[t.taken_by]}"'
    if t.kept:
        return "stays as it is"
    return TYPES[t.new].name if t.new is not None else target


def digests(config: InspectConfig, paths: list[Path]) -> int:
    """Run `ik inspect --hash KIND` and `--check FILE`."""
    from ikcli.gguf.hashes import hash_tensors, parse_hashes, read_manifest

    manifest = read_manifest(config.check) if config.check is not None else None
    kinds = parse_hashes(config.hash) if config.hash is not None else manifest.kinds if manifest is not None else ()
    file = open_gguf(paths[0])
    verdicts: dict[str, int] = {}
    out: list[dict[str, Any]] = []
    with log.progress("hashing", file.n_bytes, in_bytes=True) as advance:
        for d in hash_tensors(file, kinds, per_tensor=not config.no_layer, advance=advance):
            verdict = manifest.verdict(d) if manifest is not None else ""
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
            if config.json:
                out.append({"kind": d.kind, "digest": d.digest, "tensor": d.tensor or None}
                           | ({"verdict": verdict} if verdict else {}))  # fmt: skip
                continue
            name = f"{paths[0]}:{printable(d.tensor)}" if d.tensor else str(paths[0])
            print(f"{d.kind:<8}  {d.digest}  {name}" + (f"  -  {verdict}" if verdict else ""))
    if config.json:
        print(json.dumps({"path": str(paths[0]), "digests": out}, indent=2))
    if manifest is None:
        return 0
    ok, bad = verdicts.get("ok", 0), verdicts.get("mismatch", 0)
    if not ok and not bad:
        log.error(f"{manifest.path}: has no digest of these tensors ({', '.join(kinds)})")
    elif bad:
        log.error(f"{paths[0]}: {bad} of {ok + bad} digests differ from {manifest.path}")
    return 0 if ok and not bad else 1


def edit(config: InspectConfig, paths: list[Path]) -> int:
    """Run `ik inspect --set KEY=TYPE:VALUE`, `--set-file` or `--delete`, into a new file or in place."""
    from ikcli.gguf.edit import edit_in_place, edit_into, plan_changes

    if not (config.args or config.model):
        raise UsageError("name the file to change: ik inspect FILE --set KEY=TYPE:VALUE")
    path, out = paths[0], config.output
    file = open_gguf(path)
    changes = plan_changes(file, config.sets, config.set_files, config.deletes, config.force)
    if out is not None and out.exists() and not config.force:
        raise UsageError(f"{out} exists already; name another output, or --force")
    if out is None:
        edited = edit_in_place(path, changes)
    else:
        with log.progress("copying", file.n_bytes, in_bytes=True) as advance:
            edited = edit_into(path, out, changes, advance)
    edited = replace(edited, changes=tuple(changes))
    if config.json:
        rows = [{"key": c.key, "old": _json_typed(c.old), "new": _json_typed(c.new)} for c in changes]
        print(json.dumps({"paths": [str(p) for p in edited.paths], "in_place": edited.in_place, "changes": rows},
                         indent=2, allow_nan=False))  # fmt: skip
        return 0
    for change in changes:
        print(f"{printable(change.key)}: {_typed(change.old)} -> {_typed(change.new)}")
    print(f"{'changed' if edited.in_place else 'written'}: {', '.join(str(p) for p in edited.paths)}")
    return 0


def _type_name(value: Typed) -> str:
    if value.item_type is not None:
        return f"{value.item_type.name.lower()}[{len(value.value)}]"
    return value.type.name.lower()


def _typed(value: Typed | None) -> str:
    return "-" if value is None else f"{_type_name(value)} {short(value.value)}"


def _json_typed(value: Typed | None) -> dict[str, Any] | None:
    if value is None:
        return None
    plain = value.value[:MAX_ITEMS] if isinstance(value.value, list) else value.value
    return {"type": _type_name(value), "value": json_scalar(plain)}


def _json_tensor(t: TensorInfo) -> dict[str, Any]:
    return {"name": t.name, "type": TYPES[t.type].name, "shape": list(t.shape), "n_bytes": t.n_bytes}


def _shape(t: TensorInfo) -> str:
    return " x ".join(str(ne) for ne in t.shape)


def _kind(t: TensorInfo, with_shape: bool) -> str:
    return TYPES[t.type].name + (f" {_shape(t)}" if with_shape else "")


def _errors(t: Any) -> tuple[str, ...]:
    if t.relative is None:
        return ("", "", "", "", "")
    values = f"{t.values[0]:.6g} -> {t.values[1]:.6g}"
    return (f"{t.relative:.3e}", f"{t.rms:.3e}", f"{t.largest:.3e}", f"[{', '.join(map(str, t.at))}]", values)


def _where(where: tuple[int, int] | None) -> str:
    return "" if where is None else f"{where[1]} elements, the first is {where[0]}"


def _rest(n: int) -> None:
    if n > 0:
        print(f"  ... and {n} more; --tensors lists all")
