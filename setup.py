"""The part of the build that pyproject.toml cannot say: pages of docs/ become data of the package, for `ik help`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithDocs(build_py):
    """Copies docs/*.md to ikcli/docs of a build; an editable install reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "ikcli" / "docs"
            self.mkpath(str(target))
            for page in sorted((ROOT / "docs").glob("*.md")):
                self.copy_file(str(page), str(target / page.name))


setup(cmdclass={"build_py": BuildWithDocs})
