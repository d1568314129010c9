"""The layers of the package: who may import whom, and which library belongs to which part."""

from __future__ import annotations

import ast
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ikcli"

# A module may import its own layer and those before it.
LAYERS = (
    (
        "errors",
        "references",
        "log",
        "manual",
        "hostinfo",
        "system_files",
        "rules",
        "suggest",
        "commit",
        "text_files",
        "files",
        "settings",
        "gguf",
        "native",
    ),
    ("quant", "tokenizer", "graph", "hub"),
    ("sampling", "grammar", "chat"),
    ("backends",),
    ("models",),
    ("convert",),
    ("engine",),
    ("drafting",),
    ("vision",),
    ("measure", "bench", "imatrix", "report", "doctor", "publish", "server", "fleet"),
    ("study", "console"),
    ("cli", "commands", "main", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Library -> parts of the package that may import it.
LIBRARIES = {
    "numba": ("native", "backends.cpu", "quant"),
    "llvmlite": ("native", "backends.cpu", "quant"),
    "typer": ("cli", "main"),
    "click": (),
    "torch": (),
    "cuda": ("backends.cuda",),
    "tokenizers": ("tokenizer", "convert"),
    "jinja2": ("chat",),
    "yaml": ("convert",),
    "llguidance": ("grammar",),
    "re2": ("server.slots.patterns",),
    "fastapi": ("server",),
    "starlette": ("server",),
    "uvicorn": ("server",),
    "pydantic": ("server",),
    "prometheus_client": ("server",),
    "matplotlib": ("bench",),
    "ray": ("fleet.ray_cluster",),
    "huggingface_hub": ("hub",),
    "PIL": ("vision",),
    "prompt_toolkit": ("console",),
}

PRINT_NOTHING = tuple(
    f"{part}." for part in ("measure", "bench", "imatrix", "report", "doctor", "publish", "study", "engine", "quant")
)

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, at run time) of every import; imports under `if TYPE_CHECKING` are not made at run time."""
    return _imports(ast.parse(path.read_text(encoding="utf-8")).body, True, path)


def _imports(statements: Iterable[ast.AST], at_run_time: bool, path: Path) -> Iterator[tuple[str, bool]]:
    for node in statements:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at_run_time
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            if node.module == "ikcli":
                for alias in node.names:
                    yield f"ikcli.{alias.name}", at_run_time
            else:
                yield node.module, at_run_time
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):  # expressions import nothing
            yield from _imports(getattr(node, field, ()), at_run_time and not (for_types and field == "body"), path)


def within(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def test_imports_respect_the_layers() -> None:
    wrong = []
    for path in FILES:
        module = module_of(path)
        rank = RANK.get(module.partition(".")[0], -1) if module else -1
        for imported, _ in imports(path):
            head = imported.partition(".")[0]
            if head in LIBRARIES and not any(within(module, part) for part in LIBRARIES[head]):
                wrong.append(f"{module} imports {imported}")
            if head == "ikcli" and "." in imported and rank < RANK.get(imported.split(".")[1], -1):
                wrong.append(f"{module} imports {imported}, which belongs to a later layer")
    assert not wrong


def module_names() -> dict[str, Path]:
    return {f"ikcli.{name}" if (name := module_of(path)) else "ikcli": path for path in FILES}


def needed_by(path: Path, known: Container[str]) -> set[str]:
    """The modules that a file imports anywhere: in functions, for type checkers, and by names that it resolves itself.

    `from package import module` needs the module. A text counts in a file that calls `import_module`; what tensor type
    records name (`ikcli.references`) is data, which the layers above resolve.
    """
    text = path.read_text(encoding="utf-8")
    resolves = "import_module" in text
    found: set[str] = set()
    tree = ast.parse(text)
    for node in ast.walk(tree) if resolves else _statements(tree.body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if name in known}
            found |= modules if modules == names else {*modules, str(node.module)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if name in known}


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements, which takes a tenth of the time of walking expressions too; only statements import."""
    for node in body:
        yield node
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            yield from _statements(getattr(node, field, ()))


def cycles(needs: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Sets of modules that need each other, by removing modules until all that are left are on a cycle."""
    left = {name: set(needed) for name, needed in needs.items()}
    while True:
        ends = {name for name, needed in left.items() if not needed & left.keys()}
        starts = left.keys() - {other for needed in left.values() for other in needed}
        if not ends | starts:
            break
        left = {name: needed for name, needed in left.items() if name not in ends | starts}
    reach = {name: _reached(name, left) for name in left}
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other])) for name in left if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def _reached(name: str, needs: Mapping[str, Collection[str]]) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        for other in needs[todo.pop()]:
            if other in needs and other not in found:
                found.add(other)
                todo.append(other)
    return found


def test_no_import_cycles() -> None:
    known = module_names()
    needs = {name: needed_by(path, known) - {name} for name, path in known.items()}
    assert not cycles(needs)


def test_cycles_are_found(tmp_path: Path) -> None:
    needs = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}, "f": {"g"}, "g": {"f"}}
    assert cycles(needs) == [["b", "c"], ["f", "g"]]
    assert not cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    file = tmp_path / "x.py"
    lines = [
        "if TYPE_CHECKING:",
        "    from p import a",
        "def f():",
        "    import p.b",
        "    import_module('p.c')",
        "d = 'p.d'",
    ]
    file.write_text("\n".join(lines))
    known = {"p", "p.a", "p.b", "p.c", "p.d"}
    assert needed_by(file, known) == {"p.a", "p.b", "p.c", "p.d"}
    file.write_text("from p import a, name\nd = 'p.d'\n")
    assert needed_by(file, known) == {"p", "p.a"}


def test_models_use_the_graph_and_no_backend() -> None:
    for path in (PACKAGE / "models").glob("*.py"):
        for imported, _ in imports(path):
            assert not imported.startswith("ikcli.backends"), f"{path.name} imports {imported}"


def test_folders_can_be_seen_at_a_glance() -> None:
    counts = {folder: len([*folder.glob("*.py")]) for folder in (PACKAGE, *PACKAGE.rglob("*")) if folder.is_dir()}
    kernels = PACKAGE / "backends" / "cpu" / "kernels"
    assert {folder.name: n for folder, n in counts.items() if n > 45 and folder != kernels} == {}
    assert counts[PACKAGE / "commands"] <= 41


def test_only_commands_print() -> None:
    """What a library call finds out it returns; results reach stdout in one place, the command."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if not module_of(path).startswith(PRINT_NOTHING) or ("print" not in text and "stdout" not in text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno} prints"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("sys", "stdout"), f"{path}:{node.lineno} uses sys.stdout"


def test_every_part_has_a_layer() -> None:
    known = set(RANK)
    for path in FILES:
        module = module_of(path)
        if module:
            assert module.partition(".")[0] in known, f"{module} belongs to no layer; add it to LAYERS"


def test_the_checks_see_imports(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "import numba\nfrom ikcli import log\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import cuda.core\n"
    )
    assert list(imports(file)) == [("numba", True), ("ikcli.log", True), ("torch", False), ("cuda.core", True)]
