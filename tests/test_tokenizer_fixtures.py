"""Published vocabularies with known answers beside the checkout, and `ik tokenize` on them."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ikcli.commands.tokenize import register, run
from ikcli.errors import IkError, UsageError
from ikcli.gguf.reader import open_gguf
from ikcli.tokenizer import Tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
VOCABS = ("gpt-2", "deepseek-llm", "llama-spm")


def vocab_path(shared_dir: Path, name: str) -> Path:
    path = shared_dir / "data" / "vocab" / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"no vocabulary {name}")
    return path


@pytest.mark.parametrize("name", VOCABS)
def test_known_answers(shared_dir: Path, name: str) -> None:
    path = vocab_path(shared_dir, name)
    tokenizer = Tokenizer.from_metadata(open_gguf(path).metadata, str(path))
    inputs = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    outputs = Path(f"{path}.out").read_text().split("\n")
    assert len(inputs) > 40
    for text, line in zip(inputs, outputs, strict=False):
        ids = tokenizer.encode(text, add_special=False)
        assert ids == [int(i) for i in line.split()], repr(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "count", "digest"), [("gpt-2", 286221, "33205cae084e1dec"), ("llama-spm", 335688, "2f380de347e3a5f4")]
)
def test_a_long_text(shared_dir: Path, name: str, count: int, digest: str) -> None:
    """The digest is that of the ids the reference gives for the same file."""
    path = vocab_path(shared_dir, name)
    text = (shared_dir / "data" / "wiki.test.raw").read_bytes().decode()
    tokenizer = Tokenizer.from_metadata(open_gguf(path).metadata, str(path))
    ids = tokenizer.encode(text)
    assert len(ids) == count
    assert hashlib.sha256(str(ids).encode()).hexdigest()[:16] == digest
    assert tokenizer.decode(ids, skip_special=True) == text


LISTING = """\
     1 -> '<s>'
 15043 -> ' Hello'
   259 -> '  '
     1 -> '<s>'
 29871 -> ' '
  1919 -> ' ,'
  3186 -> ' world'
   904 -> ' é'
Total number of tokens: 8
"""


def test_command_listing(shared_dir: Path) -> None:
    out = io.BytesIO()
    run(str(vocab_path(shared_dir, "llama-spm")), prompt="Hello  <s> , world é", show_count=True, out=out)
    assert out.getvalue().decode() == LISTING


def test_command_line(shared_dir: Path, tmp_path: Path) -> None:
    path = str(vocab_path(shared_dir, "llama-spm"))
    app = typer.Typer()
    register(app)
    text = tmp_path / "text"
    text.write_bytes(b"Hello\xff")
    runner = CliRunner()
    result = runner.invoke(app, ["-m", path, "-f", str(text), "--ids", "--no-bos", "--log-disable"])
    assert (result.exit_code, result.stdout) == (0, "[15043, 258]\n")
    result = runner.invoke(app, ["-m", path, "--stdin", "--ids", "--no-parse-special"], input="<s>")
    assert result.stdout == "[1, 529, 29879, 29958]\n"


def test_command_errors(shared_dir: Path, tmp_path: Path) -> None:
    path = str(vocab_path(shared_dir, "llama-spm"))
    with pytest.raises(UsageError, match="exactly one"):
        run(path)
    with pytest.raises(UsageError, match="exactly one"):
        run(path, prompt="a", stdin=True)
    with pytest.raises(IkError, match="cannot read"):
        run(path, file=str(tmp_path / "none"))
