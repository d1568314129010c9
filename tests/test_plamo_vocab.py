"""The vocabulary of PLaMo 2 and 3: ids by the published tokenizer, from the checkpoint's file to the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ikcli.convert.vocab import plain_values, read_vocabulary
from ikcli.errors import FormatError
from ikcli.tokenizer import Tokenizer

SPECIAL = ("unk", "bos", "eos", "pad", "op")
WORDS = {"a": -2.0, "b": -2.0, "ab": -3.5, "abc": -5.0, "c": -1.0, " ": -1.0, " a": -3.0, "の": -4.0, "猫": -6.0,
         "の猫": -10.0, "ca": -2.5}  # fmt: skip
# Ids are those of the published tokenizer.
IDS = {"abc": [263, 265], "abca": [263, 271], "a  ab": [261, 266, 266, 263], "の猫": [270], "猫の猫x": [269, 270, 125],
       "é\n": [200, 174, 15], "": []}  # fmt: skip


def checkpoint(directory: Path, lines: list[Any] | None = None) -> Path:
    tokens: list[Any] = [[f"<|plamo:{name}|>", 0.0, "UNKNOWN" if name == "unk" else "CONTROL"] for name in SPECIAL]
    tokens += [[f"<0x{byte:02X}>", 0.0, "BYTE", None] for byte in range(256)]
    tokens += [[text, score, "NORMAL"] for text, score in WORDS.items()]
    text = "".join(f"{json.dumps(line)}\n" for line in (tokens if lines is None else lines))
    (directory / "tokenizer.jsonl").write_text(text, encoding="utf-8")
    names = {f"{name}_token": f"<|plamo:{name}|>" for name in SPECIAL[:4]} | {"eos_token": "<|plamo:eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


@pytest.mark.parametrize("arch", ["plamo2", "plamo3"])
def test_the_texts_that_cost_least(arch: str, tmp_path: Path) -> None:
    keys = plain_values(read_vocabulary(checkpoint(tmp_path), {"vocab_size": 280}, arch))
    assert keys["tokenizer.ggml.model"] == "plamo2" and keys["tokenizer.ggml.tokens"][272] == "[PAD272]"
    assert keys["tokenizer.ggml.bos_token_id"] == 1 and keys["tokenizer.ggml.padding_token_id"] == 3
    tokenizer = Tokenizer.from_metadata(keys, "x.gguf")
    for text, ids in IDS.items():
        assert tokenizer.encode(text, add_special=False) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|plamo:op|>ab", add_special=False) == [4, 263]
    assert 4 in tokenizer.eog_ids and 2 in tokenizer.eog_ids  # the end of a turn, and of a text


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    for lines, message in (
        ([["a"]], "line 1 is not a list"),
        ([["a", 0.0], [1, 2.0, "NORMAL"]], "line 2 is not a list"),
        ([], "has no tokens"),
    ):
        with pytest.raises(FormatError, match=message):
            read_vocabulary(checkpoint(tmp_path, lines), {}, "plamo2")
    keys = plain_values(read_vocabulary(checkpoint(tmp_path, [["a", -1.0, "NORMAL"]]), {}, "plamo2"))
    with pytest.raises(FormatError, match="no token for the byte <0x00>"):
        Tokenizer.from_metadata(keys, "x.gguf").encode("a")
