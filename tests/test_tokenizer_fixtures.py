"""Published vocabularies with known answers beside the checkout, and `ik tokenize` on them."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest

from ikcli.cli.parser import parse
from ikcli.commands.tokenize import run as tokenize
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


def run(*argv: str) -> int:
    return tokenize(parse("tokenize", argv).config)


def test_command_listing(shared_dir: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    path = str(vocab_path(shared_dir, "llama-spm"))
    assert run("-m", path, "-p", "Hello  <s> , world é", "--show-count") == 0
    assert capsysbinary.readouterr().out.decode() == LISTING


def test_command_line(
    shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = str(vocab_path(shared_dir, "llama-spm"))
    text = tmp_path / "text"
    text.write_bytes(b"Hello\xff")
    assert run("-m", path, "-f", str(text), "--ids", "--no-bos", "--log-disable") == 0
    assert capsysbinary.readouterr().out == b"[15043, 258]\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"<s>")))
    assert run("-m", path, "--stdin", "--ids", "--no-parse-special") == 0
    assert capsysbinary.readouterr().out == b"[1, 529, 29879, 29958]\n"


def test_any_prompt_is_taken_as_it_is() -> None:
    for text in ("-x", "--idx=yes", "\\", "^", "\u00a0", "a\u00a0-b", "@file", "-1"):
        assert parse("tokenize", ["-p", text]).config.prompt == text, text
    assert parse("tokenize", [f"--prompt={'-x'}"]).config.prompt == "-x"


def test_command_errors(shared_dir: Path, tmp_path: Path) -> None:
    path = str(vocab_path(shared_dir, "llama-spm"))
    with pytest.raises(UsageError, match="exactly one"):
        run("-m", path)
    with pytest.raises(UsageError, match="exactly one"):
        run("-m", path, "-p", "a", "--stdin")
    with pytest.raises(IkError, match="cannot read"):
        run("-m", path, "-f", str(tmp_path / "none"))
