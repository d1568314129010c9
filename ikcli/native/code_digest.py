"""Compute a digest of the definitions that a kernel's factory reaches, whatever else changed in their files.

The definitions are those of our own modules, as syntax trees without positions, comments and docstrings. Statements of
a module that define no name (loops that fill tables, registrations) count wherever anything of the module is reached.
So do functions with decorators that may do more than return a result.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

_PLAIN = {"inline", "merge", "intrinsic", "njit", "cache", "functools.cache", "contextmanager", "dataclass",
          "dataclass_transform"}  # fmt: skip
_ALL = "*"
Statements = list[ast.stmt]
SourceOf = Callable[[str], Path]


class _Module:
    """The top level of a source file by name."""

    def __init__(self, path: Path) -> None:
        self.defined: dict[str, Statements] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # name: (module, name there)
        self.always: Statements = []
        for statement in _without_docstrings(ast.parse(path.read_bytes())).body:
            self._add(statement)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self.imported.update(_imports(statement))
            return
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            return
        names = _bound_names(statement)
        if names is None:
            self.always.append(statement)
        for name in names or ():
            self.defined.setdefault(name, []).append(statement)


def code_digest(module: str, name: str, source_of: SourceOf) -> str:
    """Return the digest of everything that the definition `name` of a module uses; `source_of` finds modules' files."""
    packages = frozenset({module.split(".")[0], "ikcli"})
    todo, seen, texts = [(module, name)], set[tuple[str, str]](), set[str]()
    while todo:
        item = todo.pop()
        if item in seen:
            continue
        seen.add(item)
        found = _source(item[0], packages, source_of)
        if found is None:
            continue
        if item[1] in found.imported:
            todo.append(found.imported[item[1]])
            continue
        chosen = found.defined.get(item[1], [])
        if item[1] == _ALL:
            chosen = [s for group in found.defined.values() for s in group]
            todo += found.imported.values()
        elif not chosen:
            todo.append((f"{item[0]}.{item[1]}", _ALL))  # a module of a package
        for statement in (*chosen, *found.always):
            texts.add(_dumped(statement, item[0]))
            todo += _reached(statement, item[0], packages, source_of)
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()


# Kernels share most of what they are made of, so what is found out about a statement is kept.


@cache
def _source(module: str, packages: frozenset[str], source_of: SourceOf) -> _Module | None:
    """Return a module of one of the packages, or None."""
    path = source_of(module) if module.split(".")[0] in packages else None
    return _module(path) if path is not None and path.is_file() else None


@cache
def _dumped(statement: ast.stmt, module: str) -> str:
    return f"{module} {ast.dump(statement)}"


@cache
def _reached(
    statement: ast.stmt, module: str, packages: frozenset[str], source_of: SourceOf
) -> frozenset[tuple[str, str]]:
    """Return (module, name) of everything that a statement of a module mentions."""
    found = _source(module, packages, source_of)
    assert found is not None
    reached, qualified, names = set[tuple[str, str]](), set[int](), list[ast.Name]()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            names.append(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            reached.update(_imports(node).values())
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in found.imported:
            package, inner = found.imported[node.value.id]
            whole = package if inner == _ALL else f"{package}.{inner}"
            if _source(whole, packages, source_of) is not None:  # one thing of an imported module
                qualified.add(id(node.value))
                reached.add((whole, node.attr))
    for node in names:
        if id(node) not in qualified:
            if node.id in found.defined:
                reached.add((module, node.id))
            elif node.id in found.imported:
                reached.add(found.imported[node.id])
    return frozenset(reached)


@cache
def _module(path: Path) -> _Module:
    return _Module(path)


def _imports(statement: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str]]:
    """Return the names that an import binds: (module, name there), or (module, all of it)."""
    if isinstance(statement, ast.Import):
        return {alias.asname or alias.name.split(".")[0]: (alias.name, _ALL) for alias in statement.names}
    return {alias.asname or alias.name: (statement.module or "", alias.name) for alias in statement.names}


def _bound_names(statement: ast.stmt) -> list[str] | None:
    """Return the names that a definition binds; None for any other statement."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        plain = all(_text(d) in _PLAIN for d in statement.decorator_list)
        return [statement.name] if plain else None
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return None
    names = []
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        if not all(isinstance(p, ast.Name) for p in parts):
            return None
        names += [p.id for p in parts if isinstance(p, ast.Name)]
    return names


def _text(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    todo: list[ast.AST] = [tree]
    for node in todo:  # grows: statements only, as expressions have no docstrings
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, part, None)
            if isinstance(inside, list):
                todo += inside
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.Pass()]
    return tree
