"""The parts of the build that pyproject.toml cannot say: pages of docs/ and the commit become data of the package."""

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent


def record_commit(package: Path) -> None:
    """Write the commit into a copy of the package, if it is known."""
    spec = importlib.util.spec_from_file_location("ikcli_commit", ROOT / "ikcli" / "commit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.commit(ROOT / "ikcli")
    if text:
        target = package / module.RECORDED
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n", encoding="ascii")


class BuildWithDocs(build_py):
    """Copies docs/*.md to ikcli/docs of a build; an editable install reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "ikcli" / "docs"
            self.mkpath(str(target))
            for page in sorted((ROOT / "docs").glob("*.md")):
                self.copy_file(str(page), str(target / page.name))
            record_commit(Path(self.build_lib) / "ikcli")


class SourcesWithCommit(sdist):
    """Adds the commit to a source distribution, which has no repository."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        record_commit(Path(base_dir) / "ikcli")


setup(cmdclass={"build_py": BuildWithDocs, "sdist": SourcesWithCommit})
