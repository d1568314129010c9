"""What is read from metadata: roles, end tokens, defaults; and that broken metadata are refused by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tokenizer_vocabs import CONTROL, NORMAL, bpe_metadata, spm_metadata

from ikcli.errors import FormatError, UnsupportedError
from ikcli.tokenizer import Tokenizer


def load(meta: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(meta, "test.gguf")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "is missing"),
        ("model", 3, "must be a string"),
        ("tokens", None, "is missing or empty"),
        ("tokens", [], "is missing or empty"),
        ("tokens", "abc", "must be an array"),
        ("tokens", ["a", 1], "entry 1 is int"),
        ("tokens", ["a", "b", "a"], "holds 'a' twice, as 0 and 2"),
        ("token_type", [1], "has 1 entries for"),
        ("scores", [float("nan")] * 300, "entry 0 is nan"),
        ("bos_token_id", 9999, "is 9999, but the vocabulary has"),
        ("bos_token_id", -7, "is -7"),
        ("bos_token_id", "one", "must be an integer"),
        ("add_bos_token", "yes", "must be true or false"),
    ],
)
def test_broken_metadata_are_refused(key: str, value: Any, message: str) -> None:
    meta = spm_metadata({"a": 0.0})
    full = f"tokenizer.ggml.{key}"
    if value is None:
        del meta[full]
    else:
        meta[full] = value
    with pytest.raises(FormatError) as info:
        load(meta)
    assert str(info.value).startswith(f"test.gguf: {full} ")
    assert message in str(info.value)


def test_bpe_needs_merges() -> None:
    meta = bpe_metadata([], "gpt-2")
    del meta["tokenizer.ggml.merges"]
    with pytest.raises(FormatError, match="merges is missing"):
        load(meta)
    meta["tokenizer.ggml.pre"] = "kimi-k2"
    assert load(meta).encode("a")


def test_other_tokenizers_are_unsupported() -> None:
    meta = spm_metadata({"a": 0.0}) | {"tokenizer.ggml.model": "rwkv"}
    with pytest.raises(UnsupportedError, match="'rwkv'"):
        load(meta)


def test_a_model_without_vocabulary_still_loads() -> None:
    meta = {"tokenizer.ggml.model": "no_vocab", "general.architecture": "llama", "llama.vocab_size": 32}
    tokenizer = load(meta)
    assert (tokenizer.kind, tokenizer.n_vocab, tokenizer.bos_id) == ("none", 32, None)
    with pytest.raises(UnsupportedError, match="no vocabulary"):
        tokenizer.encode("a")


def test_minus_one_means_no_token() -> None:
    tokenizer = load(spm_metadata({"a": 0.0}, padding_token_id=0xFFFFFFFF, seperator_token_id=-1))
    assert tokenizer.special_ids.pad is None
    assert tokenizer.special_ids.sep is None


def test_arrays_may_be_numpy() -> None:
    meta = spm_metadata({"a": -1.0, "aa": -2.0})
    plain = load(dict(meta)).encode("aaa")
    meta["tokenizer.ggml.scores"] = np.array(meta["tokenizer.ggml.scores"], dtype=np.float32)
    meta["tokenizer.ggml.token_type"] = np.array(meta["tokenizer.ggml.token_type"], dtype=np.int32)
    assert load(meta).encode("aaa") == plain


def test_roles_by_text() -> None:
    extra = dict.fromkeys(("<|im_end|>", "<|endoftext|>", "<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>"), NORMAL)
    tokenizer = load(bpe_metadata([], "qwen2", extra))
    find = tokenizer.vocab.token_to_id
    assert tokenizer.special_ids.eot == find["<|im_end|>"]
    assert tokenizer.special_ids.fim_pre == find["<|fim_prefix|>"]
    ends = {find[t] for t in ("<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>")}
    assert tokenizer.eog_ids == ends | {tokenizer.eos_id}
    assert tokenizer.is_control(find["<|im_end|>"])
    assert find["<|im_end|>"] in tokenizer.eog_ids
    assert tokenizer.encode("<|im_end|>") == [find["<|im_end|>"]]


def test_harmony_end_is_not_the_end() -> None:
    extra = dict.fromkeys(("<|return|>", "<|call|>", "<|end|>", "<|channel|>"), CONTROL)
    tokenizer = load(bpe_metadata([], "gpt-4o", extra))
    find = tokenizer.vocab.token_to_id
    assert find["<|end|>"] not in tokenizer.eog_ids
    assert find["<|call|>"] in tokenizer.eog_ids
    assert tokenizer.token_bytes(find["<|channel|>"], special=False) == b"<|channel|>"


def test_glm_has_no_default_bos() -> None:
    assert load(bpe_metadata([], "glm4")).bos_id is None
    assert load(bpe_metadata([], "gpt-2")).bos_id == 11


def test_empty_tokens_get_a_name() -> None:
    assert load(bpe_metadata([], "gpt-2", {"": NORMAL})).vocab.tokens[256] == "[EMPTY_256]"


def test_import_is_light() -> None:
    code = (
        "import sys, ikcli.tokenizer as t\n"
        "t.Tokenizer.from_metadata({'tokenizer.ggml.model': 'no_vocab'}, 'x')\n"
        "assert not {'tokenizers', 'jinja2', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
