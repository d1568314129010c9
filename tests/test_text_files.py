"""Files that people write are read alike everywhere, however an editor or a shell saved them."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ikcli.cli.argv import read_lines, read_option_file
from ikcli.cli.ini import read_ini
from ikcli.cli.parser import parse
from ikcli.commands import _quantize_matrix
from ikcli.console import transcript
from ikcli.console.start import given_prompt, system_prompt
from ikcli.convert import json_files
from ikcli.errors import IkError
from ikcli.gguf.edit import _from_file
from ikcli.gguf.hashes import read_manifest
from ikcli.main import main
from ikcli.measure.choice_tasks import read_winogrande
from ikcli.measure.text import load_text, raw_text
from ikcli.server.http.auth import read_keys
from ikcli.server.http.bans import server_bans
from ikcli.server.http.page_settings import page_settings
from ikcli.server.http.params import option_text
from ikcli.server.http.templates import template_option
from ikcli.server.http.users import read_users
from ikcli.settings.run import RunConfig
from ikcli.settings.tools import QuantizeConfig
from ikcli.settings.values import toml_table
from ikcli.text_files import is_text, read_text

PACKAGE = Path(__file__).resolve().parents[1] / "ikcli"

RUN = RunConfig(command="chat")


def _server(**settings: Any) -> RunConfig:
    return replace(RUN, server=replace(RUN.server, **settings))


def _prompt(path: Path) -> RunConfig:
    return replace(RUN, prompt=replace(RUN.prompt, file=path))


READERS: dict[str, tuple[str, Callable[[Path], object], object]] = {
    "@FILE": ("-c 512\n# note\n--seed 7\n", read_option_file, ["-c", "512", "--seed", "7"]),
    "-ot @FILE": (
        "blk=CPU\nexps=CPU\n",
        lambda path: list(parse("bench", ["-ot", f"@{path}"]).config.override_tensor),
        ["blk=CPU", "exps=CPU"],
    ),
    "--custom-q @FILE": ("a=q8_0\nb=q4_0\n", read_lines, ["a=q8_0", "b=q4_0"]),
    "--config": ('seed = 7\nname = "é"\n', toml_table, {"seed": 7, "name": "é"}),
    "--models-preset": ("[é]\nc = 1\n", lambda path: [k for k in read_ini(path) if k], ["é"]),
    "--matrix": (
        "Q4_K_M\nQ8_0 second\n",
        lambda path: [line.name for line in _quantize_matrix.read_list(path, QuantizeConfig())],
        ["Q4_K_M", "second"],
    ),
    "--api-key-file": (
        "first\nsecond\n",
        lambda path: read_keys(_server(api_key_file=path).server),
        ("first", "second"),
    ),
    "--keys": (
        '[ann]\nkey = "k"\n[bob]\nkey = "l"\n',
        lambda path: (path.chmod(0o600), [a.user.name for a in read_users(path).accounts])[1],
        ["ann", "bob"],
    ),
    "--banned-string-file": (
        "one\ntwo é\n",
        lambda path: server_bans(_server(banned_string_file=path)),
        ("one", "two é"),
    ),
    "--grammar-file": (
        "root ::= a\na ::= [é]\n",
        lambda path: option_text("", path, "grammar"),
        "root ::= a\na ::= [é]\n",
    ),
    "--chat-template-file": (
        "{{ a }}\n{{ é }}\n",
        lambda path: template_option(_server(chat_template_file=path)),
        "{{ a }}\n{{ é }}\n",
    ),
    "--ui-config-file": (
        '{"system":\n"é"}\n',
        lambda path: page_settings(_server(ui_config_file=path).server)[0],
        {"system": "é"},
    ),
    "-sysf": (
        "be kind\né\n",
        lambda path: system_prompt(replace(RUN, chat=replace(RUN.chat, system_file=path))),
        "be kind\né",
    ),
    "chat -f": ("one\ntwo é\n", lambda path: given_prompt(_prompt(path), ()), "one\ntwo é"),
    "perplexity -f": ("one\ntwo é\n", lambda path: load_text(_prompt(path)), "one\ntwo é"),
    "/load": ('{"a":\n"é"}\n', transcript.read_json, {"a": "é"}),
    "--set-file": ("a\né\n", lambda path: _from_file(f"k=@{path}", {})[1].value, "a\né\n"),
    "--check": (
        f"sha256 {'A' * 64} a.gguf\nsha256 {'b' * 64} b.gguf:t\n",
        lambda path: sorted(read_manifest(path).digests.values()),
        ["a" * 64, "b" * 64],
    ),
    "of a checkpoint": ('{"a":\n1}\n', json_files.read_object, {"a": 1}),
}  # fmt: skip

SAVED: dict[str, Callable[[str], bytes]] = {
    "plain": lambda text: text.encode(),
    "mark": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "crlf": lambda text: text.replace("\n", "\r\n").encode(),
    "mark and crlf": lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
    "cr": lambda text: text.replace("\n", "\r").encode(),
    "utf-16-le": lambda text: b"\xff\xfe" + text.replace("\n", "\r\n").encode("utf-16-le"),
    "utf-16-be": lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
    "utf-32": lambda text: text.encode("utf-32"),
}


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("reader", READERS)
def test_how_a_file_was_saved_does_not_matter(tmp_path: Path, reader: str, saved: str) -> None:
    text, read, value = READERS[reader]
    path = tmp_path / "file"
    path.write_bytes(SAVED[saved](text))
    assert read(path) == value


@pytest.mark.parametrize("reader", READERS)
def test_the_last_line_needs_no_end(tmp_path: Path, reader: str) -> None:
    text, read, value = READERS[reader]
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbf" + text.removesuffix("\n").encode())
    expected = value.removesuffix("\n") if isinstance(value, str) else value
    assert read(path) == expected


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"caf\xe9 = 1\n", r"is .*: it is not UTF-8 text \(byte 3\); save it as UTF-8"),
        ("a = 1\n".encode("utf-16-le"), "it has NUL bytes.*save it as UTF-8"),
        (b"\xff\xfea", "it is not UTF-16"),
        (gzip.compress(b"a = 1\n", mtime=0), "it is compressed with gzip"),
        (b"PK\x03\x04....", "it is a zip archive"),
        (b"GGUF\3\0\0\0", "it is a model or matrix in GGUF"),
    ],
)
@pytest.mark.parametrize("reader", [r for r in READERS if r not in ("perplexity -f", "chat -f")])
def test_what_is_not_a_text_is_refused_by_name(tmp_path: Path, reader: str, data: bytes, words: str) -> None:
    path = tmp_path / "file.x"
    path.write_bytes(data)
    with pytest.raises(IkError, match=words) as caught:
        READERS[reader][1](path)
    assert "file.x" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("reader", READERS)
def test_missing_files_and_folders_are_named(tmp_path: Path, reader: str) -> None:
    read = READERS[reader][1]
    if reader != "of a checkpoint":  # there these mean: not given
        for path, words in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
            with pytest.raises(IkError, match=f"cannot read .*{path.name}: {words}"):
                if reader == "--keys":
                    read_users(path)
                else:
                    read(path)


PACKED: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", PACKED)
def test_compressed_texts_are_unpacked_whatever_their_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "wiki.raw"
    pack = PACKED[kind]
    path.write_bytes(pack(b"\xef\xbb\xbf = One =\r\n") + pack("é \n".encode()))
    assert load_text(_prompt(path)) == " = One =\né "
    assert given_prompt(_prompt(path), ()) == " = One =\né "
    assert is_text(path)
    binary = replace(RUN, prompt=replace(RUN.prompt, binary_file=path))
    assert raw_text(binary) == b"\xef\xbb\xbf = One =\r\n\xc3\xa9 \n"


@pytest.mark.parametrize("kind", PACKED)
def test_damaged_archives_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "wiki.raw.gz"
    path.write_bytes(PACKED[kind](bytes(range(256)) * 40)[:-12])
    with pytest.raises(IkError, match=r"wiki\.raw\.gz: begins like a file of .*, but cannot be unpacked"):
        load_text(_prompt(path))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x28\xb5\x2f\xfd....", "is compressed with zstd, not a text; unpack it with zstd -d"),
        (b"\x04\x22\x4d\x18....", "lz4"),
        (b"PK\x03\x04....", "is a zip archive, not a text; unpack it"),
        (b"PAR1....", "is a Parquet table"),
        (b"GGUF\3\0\0\0", "in GGUF"),
        (b"a" + bytes(256) + b"ustar\0", "is a tar archive"),
        (gzip.compress(b"a" + bytes(256) + b"ustar\0", mtime=0), "is a tar archive"),
    ],
)
def test_archives_are_not_measured_as_text(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "wiki.test.raw"
    path.write_bytes(data)
    for read in (lambda: load_text(_prompt(path)), lambda: given_prompt(_prompt(path), ())):
        with pytest.raises(IkError, match=f"wiki.test.raw .*{words}"):
            read()


def test_binary_data_is_measured_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.bin"
    for data, words in ((b"a\0\r\nb", "has NUL bytes"), (b"ab\xe9c", "is not UTF-8 text (byte 2)")):
        path.write_bytes(data)
        assert load_text(_prompt(path)).encode("utf-8", "surrogateescape") == data
        assert f"warning: {path} {words}" in capsys.readouterr().err
        load_text(replace(RUN, prompt=replace(RUN.prompt, binary_file=path)))
        assert words in capsys.readouterr().err
    path.write_text("text é\n", encoding="utf-8")
    load_text(_prompt(path))
    assert capsys.readouterr().err == ""


def test_a_binary_file_keeps_its_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(b"\xef\xbb\xbfa\r\n")
    assert load_text(replace(RUN, prompt=replace(RUN.prompt, binary_file=path))) == "\ufeffa\r\n"


def test_tasks_end_at_line_feeds_only() -> None:
    found = read_winogrande("1,a\u2028b _ c,x,y,1\n2,d _ e,x,y,2", "tasks.csv", 0)
    assert [q.begin for q in found] == ["a\u2028b ", "d "]


def test_commands_end_with_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rules.txt"
    path.write_bytes(b"caf\xe9=CPU")
    for argv in (["bench", "-ot", f"@{path}"], ["bench", f"@{path}"], ["bench", "--config", str(path)]):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.count("error:") == 1 and "rules.txt" in err and "save it as UTF-8" in err and "Traceback" not in err


def test_nobody_else_reads_files_that_people_write() -> None:
    own = ("commit.py", "hub/cache.py", "hub/download.py", "native/kernel_cache.py", "backends/cuda/modules.py",
           "commands/help.py", "convert/config.py", "report/page.py", "publish/folder.py")  # fmt: skip
    pattern = re.compile(r'\.read_text\(encoding="utf-8(-sig)?"\)')
    found = [
        str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if pattern.search(p.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == sorted(own)


def test_json_of_a_tokenizer_may_begin_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"a": "b"}).encode())
    assert json_files.read_object(path) == {"a": "b"}
    assert read_text(path) == '{"a": "b"}'
