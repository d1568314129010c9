"""Model cards, recommended sampling and chat templates are optional: what is wrong with them is a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import LLAMA, as_bf16, llama_tensors, write_checkpoint

from ikcli.convert.naming import Description, describe
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.values import Typed
from ikcli.main import main

SIZES = [("token_embd.weight", (64, 8000)), ("output.weight", (64, 8000))]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "Tiny-1M-Chat"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"_name_or_path": 7}))
    return made


def described(directory: Path, card: str | bytes) -> Description:
    path = directory / "README.md"
    path.write_bytes(card.encode() if isinstance(card, str) else card)
    return describe(directory, SIZES)


def plain(found: Description) -> dict[str, Any]:
    return {k: v.value if isinstance(v, Typed) else v for k, v in found.keys.items()}


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("model_name: 4.5", "general.name", "4.5"),
        ("version: 2024-01-31", "general.version", "2024-01-31"),
        ("model_version: 1", "general.version", "1"),
        ("license: [mit, apache-2.0]", "general.license", "mit,apache-2.0"),
        ("language: no", "general.languages", ["no"]),
        ("language:\n- no\n- en", "general.languages", ["no", "en"]),
        ("tags: [1, 2.5, a]", "general.tags", ["1", "2.5", "a"]),
        ("author:\tAnn", "general.author", "Ann"),
        ("base_model: 7", "general.base_model.count", 1),
        ("base_model: [{name: 3, version: 2.5}]", "general.base_model.0.version", "2.5"),
    ],
)
def test_values_become_the_texts_they_look_like(
    directory: Path, capsys: pytest.CaptureFixture[str], line: str, key: str, value: object
) -> None:
    assert plain(described(directory, f"---\n{line}\n---\n# x\n"))[key] == value
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("---\nmodel_name: [a, b]\nauthor: Ann\n---\n", "model_name is ['a', 'b'], where a text is expected"),
        ("---\nmodel_name: {a: b}\nauthor: Ann\n---\n", "model_name is {'a': 'b'}, where a text is expected"),
        ("---\nmodel_name: true\nauthor: Ann\n---\n", "model_name is True, where a text"),
        ("---\nmodel_name: .nan\nauthor: Ann\n---\n", "model_name is nan, where a text"),
        ('---\nmodel_name: "\\ud800"\nauthor: Ann\n---\n', "where a text is expected"),
        ("---\ntags: {a: b}\nauthor: Ann\n---\n", "tags is {'a': 'b'}, where a text or a list of texts"),
        ("---\ntags: [[{a: b}]]\nauthor: Ann\n---\n", "tags is [[{'a': 'b'}]], where a text or a list"),
        ("---\nlicense: {a: b}\nauthor: Ann\n---\n", "license is {'a': 'b'}"),
        ("---\nbase_model: [[a]]\nauthor: Ann\n---\n", "base_model is [['a']], where a name or a list of names"),
        ("---\nbase_model: {a: b}\nauthor: Ann\n---\n", "base_model is {'a': 'b'}"),
        ("---\ndatasets: [true]\nauthor: Ann\n---\n", "datasets is [True]"),
    ],
)
def test_a_wrong_value_is_left_out_alone(
    directory: Path, capsys: pytest.CaptureFixture[str], card: str, words: str
) -> None:
    keys = plain(described(directory, card))
    assert keys["general.author"] == "Ann" and keys["general.name"] == "Tiny 1M Chat"
    assert not any(k.startswith(("general.tags", "general.license", "general.base_", "general.dat")) for k in keys)
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {directory / 'README.md'}: ") and words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("---\na: b: c\n---\n", "README.md, line 2: the head is not YAML (mapping values are not allowed here)"),
        ("---\na: [1\n---\n", "the head is not YAML"),
        ("---\na: 2024-13-45\n---\n", "the head is not YAML"),
        ("---\n- a\n- b\n---\n", "the head is not YAML with a key and a value"),
        ("---\n? [a]\n: b\nx: !!python/object:os.system y\n---\n", "the head is not YAML"),
        ("---\na: &a [*a]\nx: " + "[" * 5000 + "\n---\n", "the head is not YAML"),
        (b"---\nauthor: caf\xe9\n---\n", "README.md is not a text file: it is not UTF-8 text"),
        (b"---\nauthor: a\0b\n---\n", "has NUL bytes"),
    ],
)
def test_a_broken_card_is_left_out(
    directory: Path, capsys: pytest.CaptureFixture[str], card: str | bytes, words: str
) -> None:
    found = described(directory, card)
    assert (found.stem, plain(found)["general.name"]) == ("Tiny-1M-Chat", "Tiny 1M Chat")
    err = capsys.readouterr().err
    assert words in err and "the model card is left out" in err and err.count("\n") == 1


def test_cards_are_read_however_they_were_saved(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for data in (b"\xef\xbb\xbf---\r\nauthor: Ann \r\n---\r\n", "---\nauthor: Ann\n---".encode("utf-16")):
        assert plain(described(directory, data))["general.author"] == "Ann"
    for nothing in (
        "",
        "# title\n---\nauthor: Ann\n---\n",
        "---\n---\n",
        "---\nauthor:\n---\n",
        '---\nauthor: ""\n---\n',
    ):
        assert "general.author" not in plain(described(directory, nothing))
    (directory / "README.md").unlink()
    (directory / "README.md").mkdir()
    assert capsys.readouterr().err == ""
    assert plain(describe(directory, SIZES))["general.name"] == "Tiny 1M Chat"
    assert "README.md: Is a directory; the model card is left out" in capsys.readouterr().err


def test_file_names_stay_in_their_folder(directory: Path) -> None:
    found = described(directory, "---\nmodel_type: ../../up\nversion: ../v\n---\n")
    assert "/" not in found.stem


def test_sampling_that_is_no_number_is_left_out(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"temperature": 1, "top_k": 20.0, "top_p": "0.9", "min_p": None, "penalty_last_n": 1.5, "mirostat": True,
              "sequence": [1], "eos_token_id": "x", "xtc_threshold": 1e999}  # fmt: skip
    (directory / "generation_config.json").write_text(json.dumps(config))
    keys = plain(describe(directory, SIZES))
    assert {k: v for k, v in keys.items() if "sampling" in k} == {
        "general.sampling.temp": 1.0,
        "general.sampling.top_k": 20,
    }
    err = capsys.readouterr().err
    left_out = (
        "top_p is '0.9'",
        "penalty_last_n is 1.5",
        "mirostat is True",
        "sequence is [1]",
        "xtc_threshold is inf",
    )
    assert all(f"generation_config.json: {words}" in err for words in left_out) and err.count("\n") == len(left_out)


def test_keys_of_a_file_win(directory: Path) -> None:
    (directory / "README.md").write_text("---\nname: A\nlicense: mit\n---\n")
    file = directory / "keys.json"
    file.write_text(json.dumps({"general.license": "gpl", "general.sampling.temp": 0.5, "general.base_models": []}))
    keys = plain(describe(directory, SIZES, "B", file))
    assert (keys["general.name"], keys["general.license"], keys["general.sampling.temp"]) == ("B", "gpl", 0.5)


def test_a_conversion_survives_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path / "tiny", LLAMA, as_bf16(llama_tensors(LLAMA)))
    (directory / "README.md").write_text("---\na: b: c\n---\n")
    (directory / "generation_config.json").write_text("{")
    (directory / "special_tokens_map.json").write_text("[]")
    (directory / "chat_template.json").write_bytes(b"\xff")
    (directory / "chat_template.jinja").write_bytes(b"{{ caf\xe9 }}")
    (directory / "chat_templates").mkdir()
    (directory / "chat_templates" / "tool.jinja").write_bytes(b"\0")
    assert main(["convert", str(directory), "--outfile", str(tmp_path / "out.gguf")]) == 0
    err = capsys.readouterr().err
    for name in ("README.md", "generation_config.json", "special_tokens_map.json", "chat_template.json",
                 "chat_template.jinja", "chat_templates/tool.jinja"):  # fmt: skip
        assert f"{directory / name}" in err
    assert "Traceback" not in err and "error" not in err
    assert open_gguf(tmp_path / "out.gguf").metadata["general.name"] == "Tiny"
