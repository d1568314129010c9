"""Vocabularies of checkpoints: a GGUF file's tokenizer makes of texts what the checkpoint's own makes of them."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_pre_tokenizers import BY_IDS, PUBLISHED
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors, trainers
from tokenizers import Tokenizer as Fast
from tokenizers import pre_tokenizers as pt

from ikcli.convert.pre_names import CASES, DIGITS, MARKED, PLAIN, words_of_rule
from ikcli.convert.spm_file import read_spm
from ikcli.convert.vocab import plain_values, read_vocabulary
from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.writer import GGUFWriter
from ikcli.tokenizer import Tokenizer
from ikcli.tokenizer.pretokenize import PRE_TOKENIZERS
from ikcli.tokenizer.unicode import CHAR_TO_BYTE

NASTY = (
    "Hello world, it's 12345 times",
    "a\n\n b\t c  ",
    "日本語 と emoji \U0001f680\U0001f469\u200d\U0001f469",
    "e\u0301 नमस्ते",
    "def f(x):\n    return x**2 # ok\n",
    "   ",
    "\n",
    "",
)
TEXT = [*PLAIN, CASES, DIGITS, *MARKED, *NASTY] * 3


def save(directory: Path, fast: Fast, **settings: Any) -> Path:
    fast.save(str(directory / "tokenizer.json"))
    if settings:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_level(pre: Any, size: int = 500, **model: Any) -> Fast:
    fast = Fast(models.BPE(**model))
    fast.pre_tokenizer, fast.decoder = pre, decoders.ByteLevel()
    alphabet = pt.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(TEXT, trainer)
    return fast


def characters(prefix: bool, newlines: bool = False) -> Fast:
    """As SentencePiece's BPE: spaces escaped, byte tokens for characters that are no tokens."""
    escape = normalizers.Replace(" ", "\u2581")
    fast = Fast(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), escape]) if prefix else escape
    fast.pre_tokenizer = pt.Split("\n", "isolated") if newlines else None
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    corpus = [line.replace("\n", " ") for line in TEXT]
    known = sorted(set("".join(corpus)) - set("日本語\U0001f680"))
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=names, show_progress=False, limit_alphabet=60, initial_alphabet=known[:50]
    )
    fast.train_from_iterator(corpus, trainer)
    data = json.loads(fast.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    return Fast.from_str(json.dumps(data))


def ids_of(keys: dict[str, Any]) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_metadata(plain_values(keys), "test")
    return lambda text: tokenizer.encode(text, add_special=False)


def same(keys: dict[str, Any], fast: Fast, texts: Any = NASTY) -> None:
    ours = ids_of(keys)
    for text in texts:
        assert ours(text) == fast.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("rule", [rule for rule in PUBLISHED if rule not in BY_IDS])
def test_pre_tokenizers_are_recognised_by_their_words(tmp_path: Path, rule: str) -> None:
    fast = byte_level(PUBLISHED[rule])
    keys = read_vocabulary(save(tmp_path, fast), {"vocab_size": 520}, "llama")
    assert PRE_TOKENIZERS[keys["tokenizer.ggml.pre"]].rule == rule
    same(keys, fast, PLAIN)
    assert len(keys["tokenizer.ggml.tokens"]) == 520
    assert keys["tokenizer.ggml.tokens"][519] == "[PAD519]"
    assert plain_values(keys)["tokenizer.ggml.token_type"][519] == 5


@pytest.mark.parametrize("rule", BY_IDS)
def test_rules_that_cut_numbers_otherwise_are_recognised_by_the_ids(tmp_path: Path, rule: str) -> None:
    fast = byte_level(PUBLISHED[rule], 900)
    keys = read_vocabulary(save(tmp_path, fast), {}, "llama")
    assert PRE_TOKENIZERS[keys["tokenizer.ggml.pre"]].rule == rule
    same(keys, fast, PLAIN)


def test_the_texts_tell_all_rules_apart() -> None:
    rules = sorted({p.rule for p in PRE_TOKENIZERS.values()} - {"bailingmoe"})  # which cuts all texts as qwen2
    seen: dict[tuple[Any, ...], str] = {}
    for rule in rules:
        words = tuple(tuple(words_of_rule(rule, text)) for text in (*PLAIN, CASES, DIGITS, *MARKED))
        assert seen.setdefault(words, rule) == rule


def test_names_follow_the_architecture_and_what_the_model_does_with_whole_words(tmp_path: Path) -> None:
    save(tmp_path, byte_level(PUBLISHED["llama3"]))
    assert read_vocabulary(tmp_path, {}, "glm4moe")["tokenizer.ggml.pre"] == "glm4"
    assert read_vocabulary(tmp_path, {}, "llama")["tokenizer.ggml.pre"] == "dbrx"
    save(tmp_path, byte_level(PUBLISHED["llama3"], ignore_merges=True))
    assert read_vocabulary(tmp_path, {}, "llama")["tokenizer.ggml.pre"] == "llama-bpe"


def test_an_unknown_pre_tokenizer_is_an_error_and_can_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = byte_level(pt.Sequence([pt.Split("e", "isolated"), pt.ByteLevel(add_prefix_space=False)]), 700)
    save(tmp_path, fast)
    with pytest.raises(UnsupportedError, match=r"acts like none that is known; choose one with --pre NAME"):
        read_vocabulary(tmp_path, {}, "llama")
    assert read_vocabulary(tmp_path, {}, "llama", pre="gpt-2")["tokenizer.ggml.pre"] == "gpt-2"
    assert "texts give other tokens in GGUF" in capsys.readouterr().err
    tiny = tmp_path / "tiny"  # without merges all rules give the same tokens
    tiny.mkdir()
    save(tiny, byte_level(fast.pre_tokenizer, 258))
    with pytest.raises(UnsupportedError, match=r"acts like several known ones \(.*qwen2.*choose one with --pre NAME"):
        read_vocabulary(tiny, {}, "llama")
    with pytest.raises(UnsupportedError, match="--pre nonsense: no such pre-tokenizer"):
        read_vocabulary(tmp_path, {}, "llama", pre="nonsense")


def test_merges_of_both_notations_and_added_tokens(tmp_path: Path) -> None:
    fast = byte_level(PUBLISHED["qwen2"])
    fast.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    fast.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("<|x|>", normalized=False)])
    keys = plain_values(read_vocabulary(save(tmp_path, fast), {}, "qwen2"))
    types = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True))
    assert (types["<|im_start|>"], types["<think>"], types["<|x|>"], types["<s>"]) == (3, 4, 3, 3)
    same(keys, fast, ("<|im_start|>user\n<think>x</think><|x|>", *NASTY))
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    assert isinstance(data["model"]["merges"][0], list)
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert plain_values(read_vocabulary(tmp_path, {}, "qwen2")) == keys


@pytest.mark.parametrize("prefix", [True, False])
def test_bpe_of_characters_becomes_a_vocabulary_with_scores(tmp_path: Path, prefix: bool) -> None:
    fast = characters(prefix)
    keys = read_vocabulary(save(tmp_path, fast), {"vocab_size": 800}, "llama")
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is prefix
    assert plain_values(keys)["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    same(keys, fast, [*NASTY, *PLAIN])


@pytest.mark.parametrize("added", [False, True])
def test_tokens_without_an_output_are_left_out(added: bool, tmp_path: Path) -> None:
    """Those of images and sounds, in the vocabulary or beside it (Apertus 1.5)."""
    fast = byte_level(pt.ByteLevel(add_prefix_space=False), 400)
    n = fast.get_vocab_size()
    media = [f"<|visual token {i}|>" for i in range(6)]
    save(tmp_path, fast, bos_token="<s>")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    if added:
        content["added_tokens"] += [
            content["added_tokens"][0] | {"id": n + i, "content": t} for i, t in enumerate(media)
        ]
    else:
        content["model"]["vocab"] |= {text: n + i for i, text in enumerate(media)}
    path.write_text(json.dumps(content))
    config = {"text_config": {"vocab_size": n + 6, "output_vocab_size": n}}
    keys = read_vocabulary(tmp_path, config, "apertus")
    assert len(keys["tokenizer.ggml.tokens"]) == n and not any("visual" in t for t in keys["tokenizer.ggml.tokens"])
    whole = read_vocabulary(tmp_path, {"text_config": {"vocab_size": n + 6, "output_vocab_size": None}}, "apertus")
    assert whole["tokenizer.ggml.tokens"][n:] == media


def test_gemma4_keeps_merges_of_characters(tmp_path: Path) -> None:
    fast = characters(prefix=False)
    fast.add_special_tokens([AddedToken("<|channel>", special=True, normalized=False)])
    keys = read_vocabulary(save(tmp_path, fast, bos_token="<s>"), {}, "gemma4")
    assert keys["tokenizer.ggml.model"] == "gemma4"
    assert (keys["tokenizer.ggml.add_space_prefix"], keys["tokenizer.ggml.add_bos_token"]) == (False, True)
    i = keys["tokenizer.ggml.tokens"].index("<|channel>")
    assert plain_values(keys)["tokenizer.ggml.token_type"][i] == 4
    same(keys, fast, [text for text in (*NASTY, *PLAIN) if "\n" not in text])


def test_word_piece(tmp_path: Path) -> None:
    fast = Fast(models.WordPiece(unk_token="[UNK]"))
    fast.normalizer, fast.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pt.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    fast.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=400, special_tokens=names, show_progress=False))
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    settings = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    keys = read_vocabulary(save(tmp_path, fast, **settings), {"type_vocab_size": 2}, "bert")
    assert keys["tokenizer.ggml.model"] == "bert"
    assert keys["tokenizer.ggml.bos_token_id"] == keys["tokenizer.ggml.cls_token_id"] == 2
    assert keys["tokenizer.ggml.seperator_token_id"] == keys["tokenizer.ggml.eos_token_id"] == 3
    assert keys["tokenizer.ggml.unknown_token_id"] == 1
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (True, True)
    assert keys["tokenizer.ggml.token_type_count"] == 2
    same(keys, fast, ["Hello world, it's 12345 times", "naïve (cafés) x!", "日本語 と"])


def test_unigram(tmp_path: Path) -> None:
    fast = Fast(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.5), ("b", -2.25), ("<0x0A>", -9.0)], 0, True))
    fast.pre_tokenizer = pt.Metaspace(prepend_scheme="always")
    keys = plain_values(read_vocabulary(save(tmp_path, fast), {"vocab_size": 5}, "t5"))
    assert keys["tokenizer.ggml.model"] == "t5"
    assert keys["tokenizer.ggml.tokens"] == ["<unk>", "\u2581a", "b", "<0x0A>", "[PAD4]"]
    assert keys["tokenizer.ggml.scores"] == [0.0, -1.5, -2.25, -9.0, -10000.0]
    assert keys["tokenizer.ggml.token_type"] == [2, 1, 1, 6, 5]
    assert keys["tokenizer.ggml.add_space_prefix"] is True


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("extra", [False, True])
def test_unigram_texts(in_bytes: bool, extra: bool, tmp_path: Path) -> None:
    """Words are cut as by the library, which XLM-RoBERTa and T5 are used with; several blanks count as one, or not."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0), ("\u2581the", -2.0)]
    pieces += [
        ("\u2581th", -2.5),
        ("e", -2.0),
        ("\u2581cat", -4.0),
        ("s", -2.2),
        ("cat", -6.0),
        ("a", -3.5),
        ("t", -3.4),
    ]
    if in_bytes:
        pieces += [(f"<0x{i:02X}>", -9.0) for i in range(256)]
    fast = Fast(models.Unigram(pieces, 3, in_bytes))
    if extra:
        fast.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
        fast.pre_tokenizer = pt.Sequence([pt.WhitespaceSplit(), pt.Metaspace(prepend_scheme="always")])
    else:
        fast.pre_tokenizer = pt.Metaspace(prepend_scheme="always")
    fast.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    keys = plain_values(read_vocabulary(save(tmp_path, fast), {"vocab_size": len(pieces)}, "t5"))
    tokenizer = Tokenizer.from_metadata(keys | {"tokenizer.ggml.unknown_token_id": 3}, "vocabulary")
    assert tokenizer.kind == "ugm"
    texts = ["the cats", "theta", "cat", "x", "the \u00fc\u00fc cat", "a", "eee the"]
    for text in [*texts, "the  cats", " the"] if extra else texts:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == fast.encode(text, add_special_tokens=False).ids, text
        if in_bytes and "  " not in text:
            assert tokenizer.decode(ids).strip() == text.strip()
    assert tokenizer.encode("cat") == fast.encode("cat").ids


def test_a_charsmap_that_cannot_be_read(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", "\u2581a"],
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0], "tokenizer.ggml.token_type": [3, 3, 2, 1],
            "tokenizer.ggml.precompiled_charsmap": [255, 255, 255, 255, 1]}  # fmt: skip
    with pytest.raises(FormatError, match="precompiled_charsmap cannot be read"):
        Tokenizer.from_metadata(keys, "vocabulary").encode("a")


def _field(number: int, value: bytes | int | float) -> bytes:
    def varint(n: int) -> bytes:
        out = b""
        while n > 127:
            out, n = out + bytes([n & 127 | 128]), n >> 7
        return out + bytes([n])

    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value % (1 << 64))
    return varint(number << 3 | 2) + varint(len(value)) + value


def spm_bytes(pieces: list[tuple[str, float, int]], model_type: int = 2, prefix: int = 1) -> bytes:
    listed = b"".join(
        _field(1, _field(1, text.encode()) + _field(2, float(score)) + (_field(3, kind) if kind != 1 else b""))
        for text, score, kind in pieces
    )
    trainer = _field(3, model_type) + _field(7, b"x" * 300) + _field(43, -1) + _field(41, 1) + _field(42, 2)
    return listed + _field(2, trainer) + _field(3, _field(1, b"identity") + _field(3, prefix) + _field(4, 0))


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("\u2581\u2581", 0.0, 4)]
PIECES += [(f"<0x{i:02X}>", 0.0, 6) for i in range(256)]
PIECES += [(text, -float(i), 1) for i, text in enumerate(("\u2581a", "ab", "\u2581ab", "a", "b", "\u2581"))]


def test_a_sentence_piece_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm_bytes(PIECES, prefix=0))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": 266}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "eos_token": "</s>"}))
    keys = plain_values(read_vocabulary(tmp_path, {"vocab_size": 268}, "llama"))
    assert keys["tokenizer.ggml.tokens"][3:5] == ["  ", "<0x00>"]
    assert keys["tokenizer.ggml.tokens"][260:] == [
        "\u2581a",
        "ab",
        "\u2581ab",
        "a",
        "b",
        "\u2581",
        "<tool>",
        "[PAD267]",
    ]
    assert keys["tokenizer.ggml.scores"][260:263] == [0.0, -1.0, -2.0]
    assert keys["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 4, 6]
    assert keys["tokenizer.ggml.token_type"][265:] == [1, 4, 5]
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert "tokenizer.ggml.padding_token_id" not in keys
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.add_space_prefix"] is False
    assert ids_of(keys)("ab<tool> ab  é") == [261, 266, 262, 3, 4 + 0xC3, 4 + 0xA9]


def test_of_two_files_that_differ_tokenizer_json_counts(tmp_path: Path) -> None:
    fast = characters(prefix=True)
    (tmp_path / "tokenizer.model").write_bytes(spm_bytes(PIECES))
    keys = read_vocabulary(save(tmp_path, fast), {}, "llama")
    same(keys, fast)
    vocabulary = sorted(fast.get_vocab().items(), key=lambda item: item[1])
    scores = dict(zip(keys["tokenizer.ggml.tokens"], plain_values(keys)["tokenizer.ggml.scores"], strict=True))
    pieces = [
        (text, scores[text] - 7, 6 if 3 <= i < 259 else 2 if not i else 3 if i < 3 else 1) for text, i in vocabulary
    ]
    (tmp_path / "tokenizer.model").write_bytes(spm_bytes(pieces))
    keys = read_vocabulary(tmp_path, {}, "llama")
    assert plain_values(keys)["tokenizer.ggml.scores"][300] == scores[keys["tokenizer.ggml.tokens"][300]] - 7
    same(keys, fast)


def test_damaged_sentence_piece_files_are_told(tmp_path: Path, rng: np.random.Generator) -> None:
    good, path = spm_bytes(PIECES), tmp_path / "tokenizer.model"
    path.write_bytes(b"\x0a\xff\xff\xff\xff\x7f")
    with pytest.raises(FormatError, match="not a SentencePiece model, or it is damaged"):
        read_vocabulary(tmp_path, {}, "llama")
    for _ in range(300):
        bad = bytearray(good[: int(rng.integers(len(good)))])
        for at in rng.integers(0, max(len(bad), 1), 3):
            if bad:
                bad[at] = int(rng.integers(256))
        path.write_bytes(bytes(bad))
        with contextlib.suppress(IkError):
            assert read_spm(path).pieces


def test_tiktoken_ranks_become_merges(tmp_path: Path) -> None:
    fast = byte_level(PUBLISHED["qwen2"], 450)
    vocabulary = sorted(fast.get_vocab().items(), key=lambda item: item[1])
    ranked = [bytes(CHAR_TO_BYTE[c] for c in text) for text, _ in vocabulary if text not in ("<s>", "</s>")]
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(ranked)]
    (tmp_path / "qwen.tiktoken").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {"added_tokens_decoder": {"448": {"content": "<|im_end|>", "special": True}}, "eos_token": "<|im_end|>"}
        )
    )
    keys = read_vocabulary(tmp_path, {"vocab_size": 450}, "qwen")
    assert keys["tokenizer.ggml.pre"] == "qwen2"
    assert keys["tokenizer.ggml.eos_token_id"] == 448
    ours = ids_of(keys)
    for text in (*NASTY, *PLAIN):
        assert ours(text) == [i - 2 for i in fast.encode(text).ids], text
    (tmp_path / "qwen.tiktoken").write_text("!! 0\n")
    with pytest.raises(FormatError, match="line 1 is not a token in base64"):
        read_vocabulary(tmp_path, {}, "qwen")


def test_vocab_json_and_merges_txt(tmp_path: Path) -> None:
    fast = byte_level(PUBLISHED["gpt-2"])
    fast.model.save(str(tmp_path))
    with pytest.raises(UnsupportedError, match="no file says how words are cut; choose with --pre NAME"):
        read_vocabulary(tmp_path, {}, "gpt2")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    same(read_vocabulary(tmp_path, {}, "gpt2"), fast)


def test_roles_and_what_is_added(tmp_path: Path) -> None:
    fast = byte_level(PUBLISHED["gpt-2"])
    fast.add_special_tokens(["<|fim_prefix|>", "<|eot|>"])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A <|eot|>", pair="<s> $A $B", special_tokens=[("<s>", 0), ("<|eot|>", 501)]
    )
    save(tmp_path, fast, bos_token="<s>", eos_token={"content": "</s>"})
    keys = read_vocabulary(tmp_path, {"eos_token_id": [7, 8], "pad_token_id": 3}, "llama")
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.padding_token_id"]) == (0, 3)
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.eot_token_id"]) == (501, 1)
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (True, True)
    assert keys["tokenizer.ggml.fim_pre_token_id"] == 500
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [501, 1, 60]}))
    fast.post_processor = processors.TemplateProcessing(
        single="<s> <|eot|> $A", pair="<s> $A $B", special_tokens=[("<s>", 0), ("<|eot|>", 501)]
    )
    save(tmp_path, fast, bos_token="<s>", eos_token="<|eot|>")
    keys = read_vocabulary(tmp_path, {}, "llama")
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.eot_token_id"]) == (501, 60)  # 1 is </s>
    assert keys["tokenizer.ggml.add_bos_token"] is False  # two tokens come before a text
    save(tmp_path, fast, bos_token="<s>", add_bos_token=False)
    assert read_vocabulary(tmp_path, {}, "llama")["tokenizer.ggml.add_bos_token"] is False


def test_chat_templates_of_all_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = [{"name": "default", "template": "A"}, {"name": "tool-use", "template": "B"}]
    save(tmp_path, byte_level(PUBLISHED["gpt-2"]), chat_template=listed)
    keys = read_vocabulary(tmp_path, {}, "llama")
    assert (keys["tokenizer.chat_template"], keys["tokenizer.chat_template.tool_use"]) == ("A", "B")
    assert keys["tokenizer.chat_templates"] == ["tool_use"]
    (tmp_path / "chat_template.jinja").write_text("C")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("D")
    keys = read_vocabulary(tmp_path, {}, "llama")
    assert (keys["tokenizer.chat_template"], keys["tokenizer.chat_template.rag"]) == ("C", "D")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [1]}))
    keys = read_vocabulary(tmp_path, {}, "llama")
    assert "chat_template is neither a text nor a list of named templates" in capsys.readouterr().err
    assert keys["tokenizer.chat_template"] == "C"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["model"].update(vocab=[]), "model.vocab is missing"),
        (lambda d: d["model"].update(type="WordLevel"), "type 'WordLevel' cannot be expressed in GGUF"),
        (lambda d: d["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix '</w>' cannot be expressed"),
        (lambda d: d["model"].update(merges=[["a"]]), "entry 0 is not a pair of tokens"),
        (lambda d: d["model"]["vocab"].update(zz=-1), "the id of 'zz' is -1"),
        (lambda d: d.update(added_tokens=[{"id": "x"}]), "added_tokens are not tokens with ids"),
    ],
)
def test_bad_tokenizer_json_is_one_sentence(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    save(tmp_path, byte_level(PUBLISHED["gpt-2"]))
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    change(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(IkError, match=message):
        read_vocabulary(tmp_path, {}, "llama")


def test_other_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no tokenizer; one of tokenizer\.json, tokenizer\.model"):
        read_vocabulary(tmp_path, {}, "llama")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer\.json: is not JSON"):
        read_vocabulary(tmp_path, {}, "llama")
    save(tmp_path, byte_level(PUBLISHED["gpt-2"]))
    with pytest.raises(FormatError, match=r"the tokenizer has 500 tokens, vocab_size of config\.json is 499"):
        read_vocabulary(tmp_path, {"vocab_size": 499}, "llama")


def test_a_file_with_the_keys_is_read_back(tmp_path: Path) -> None:
    fast = characters(prefix=True)
    keys = read_vocabulary(save(tmp_path, fast, chat_template="T"), {}, "llama")
    path = tmp_path / "vocab.gguf"
    with GGUFWriter(path, {"general.architecture": "llama", **keys}, []):
        pass
    metadata = open_gguf(path).metadata
    assert metadata["tokenizer.chat_template"] == "T"
    same(dict(metadata), fast)


def test_golden_checkpoints(shared_dir: Path) -> None:
    checkpoints = sorted((shared_dir / "golden" / "hf").glob("*/tokenizer.json"))
    assert checkpoints
    for path in checkpoints:
        config = json.loads((path.parent / "config.json").read_text())
        keys = read_vocabulary(path.parent, config, "llama")
        assert keys["tokenizer.ggml.pre"] == "gpt-2"
        same(keys, Fast.from_file(str(path)), [*NASTY, *PLAIN])


def test_the_text_part_knows_how_many_tokens_there_are(tmp_path: Path) -> None:
    config = {"vocab_size": 600, "text_config": {"vocab_size": 520}}
    keys = read_vocabulary(save(tmp_path, byte_level(PUBLISHED["gpt-2"])), config, "llama")
    assert len(keys["tokenizer.ggml.tokens"]) == 520
