"""Convert the vocabulary of a checkpoint to the `tokenizer.*` keys of a GGUF file.

| files | `tokenizer.ggml.model` |
|---|---|
| `tokenizer.json`: byte-level BPE; `vocab.json` and `merges.txt`; a tiktoken file | `gpt2` |
| `tokenizer.model`; `tokenizer.json`: BPE of characters with byte tokens | `llama`, of gemma4 `gemma4` |
| `tokenizer.json` or `tokenizer.model` with a unigram model | `t5` |
| `tokenizer.json`: WordPiece | `bert` |
| `tokenizer.jsonl` of PLaMo 2 and 3 | `plamo2` |

The ids of a few texts by `tokenizer.json` and by the keys are compared; a difference is a warning.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ikcli.convert.chat_templates import chat_template_keys
from ikcli.convert.json_files import read_object, read_text
from ikcli.convert.plamo_file import NAME as PLAMO_NAME
from ikcli.convert.plamo_file import read_plamo
from ikcli.convert.pre_names import PLAIN, recognise
from ikcli.convert.special_ids import special_keys
from ikcli.convert.spm_file import SpmFile, read_spm
from ikcli.convert.tiktoken_file import read_tiktoken
from ikcli.convert.tokenizer_files import (
    BYTE,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Table,
    TokenizerFiles,
    make_table,
)
from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.gguf.constants import GGUFValueType
from ikcli.gguf.values import Typed
from ikcli.log import warn
from ikcli.tokenizer import Tokenizer
from ikcli.tokenizer.pretokenize import PRE_TOKENIZERS

_SPM_FILES = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
_TIKTOKEN_FILES = {"tiktoken.model": "kimi-k2", "qwen.tiktoken": "qwen2"}
_SLOW_CLASSES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_PLAMO_TURN = "<|plamo:op|>"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SHOWN_BY_GEMMA4 = frozenset(
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
)

Keys = dict[str, Any]


def read_vocabulary(directory: Path, config: Mapping[str, Any], architecture: str, pre: str | None = None) -> Keys:
    """Return all `tokenizer.*` keys for the checkpoint in `directory`.

    `config` is its config.json, `architecture` the GGUF one. `pre` overrides the recognised pre-tokenizer of byte-level
    BPE. Raise an UnsupportedError for an unknown kind of tokenizer or an unrecognised pre-tokenizer.
    """
    if pre is not None and pre not in PRE_TOKENIZERS:
        raise UnsupportedError(f"--pre {pre}: no such pre-tokenizer; known are {', '.join(sorted(PRE_TOKENIZERS))}")
    files = TokenizerFiles(directory, config)
    kind = files.model.get("type")
    spm = next((directory / name for name in _SPM_FILES if (directory / name).is_file()), None)
    plamo = directory / PLAMO_NAME
    if architecture in ("plamo2", "plamo3") and plamo.is_file():
        keys = _plamo(files, read_plamo(plamo), architecture)
    elif kind == "BPE" and not files.model.get("byte_fallback"):
        keys = _byte_level(files, architecture, pre)
    elif kind == "WordPiece":
        keys = _word_piece(files, architecture)
    elif kind == "BPE" and architecture.startswith("gemma4"):
        keys = _gemma4(files, architecture)
    elif kind == "Unigram":
        keys = _unigram(files, architecture)
    elif spm is not None and (model := read_spm(spm)) and _same_tokens(files, model):
        keys = _sentence_piece(files, model, architecture)
    elif kind == "BPE":
        keys = _characters(files, architecture)
    elif kind is not None:
        raise UnsupportedError(f"{directory / 'tokenizer.json'}: a model of type {kind!r} cannot be expressed in GGUF")
    else:
        keys = _without_json(files, architecture, pre)
    return keys | chat_template_keys(files)


def _same_tokens(files: TokenizerFiles, spm: SpmFile) -> bool:
    """Return False if tokenizer.json, which the model was used with, has other ids than the SentencePiece model."""
    if not files.model:
        return True
    vocabulary = _json_vocabulary(files)
    return all(kind != NORMAL or vocabulary.get(text) == i for i, (text, _, kind) in enumerate(spm.pieces))


def _model_keys(model: str, pre: str | None, table: Table, scores: bool) -> Keys:
    keys: Keys = {"tokenizer.ggml.model": model}
    if pre is not None:
        keys["tokenizer.ggml.pre"] = pre
    keys["tokenizer.ggml.tokens"] = table.texts
    if scores:
        keys["tokenizer.ggml.scores"] = Typed(table.scores, GGUFValueType.ARRAY, GGUFValueType.FLOAT32)
    keys["tokenizer.ggml.token_type"] = Typed(table.types, GGUFValueType.ARRAY, GGUFValueType.INT32)
    return keys


def _json_vocabulary(files: TokenizerFiles) -> dict[str, int]:
    vocabulary = files.model.get("vocab")
    path = files.directory / "tokenizer.json"
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise FormatError(f"{path}: model.vocab is missing or does not map tokens to ids")
    for text, i in vocabulary.items():
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < 1 << 27:
            raise FormatError(f"{path}: model.vocab: the id of {text!r} is {i!r}")
    if len(set(vocabulary.values())) != len(vocabulary):
        raise FormatError(f"{path}: model.vocab gives two tokens the same id")
    return vocabulary


def _json_merges(files: TokenizerFiles) -> list[str]:
    """Return merges with a space between their parts; older files store one text, newer ones a pair."""
    path = files.directory / "tokenizer.json"
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if files.model.get(key):
            raise UnsupportedError(f"{path}: BPE with {key} {files.model[key]!r} cannot be expressed in GGUF")
    merges = files.model.get("merges")
    if not isinstance(merges, list):
        raise FormatError(f"{path}: model.merges is missing")
    out = []
    for i, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
            raise FormatError(f"{path}: model.merges entry {i} is not a pair of tokens: {merge!r}")
        # GGUF separates the parts by a space, so a space inside is written in the byte alphabet
        out.append(" ".join(part.replace(" ", "\u0120") for part in parts))
    return out


def _byte_level(files: TokenizerFiles, architecture: str, pre: str | None) -> Keys:
    path = files.directory / "tokenizer.json"
    model = files.model
    vocabulary, merges = _json_vocabulary(files), _json_merges(files)
    table = make_table(files, {i: (text, 0.0, NORMAL) for text, i in vocabulary.items() if i not in files.pruned})
    special = special_keys(files, table, architecture)

    name = pre or recognise(files.fast, architecture, bool(model.get("ignore_merges")), str(path))
    keys = _model_keys("gpt2", name, table, False) | {"tokenizer.ggml.merges": merges} | special
    _compare(files, keys)
    return keys


def _word_piece(files: TokenizerFiles, architecture: str) -> Keys:
    prefix = files.model.get("continuing_subword_prefix", "##")
    if prefix != "##":
        raise UnsupportedError(
            f"{files.directory / 'tokenizer.json'}: WordPiece with the prefix {prefix!r} cannot be expressed in GGUF"
        )
    unknown = files.model.get("unk_token")
    table = make_table(
        files,
        {i: (text, 0.0, UNKNOWN if text == unknown else NORMAL) for text, i in _json_vocabulary(files).items()},
    )
    special = special_keys(files, table, architecture)
    table.texts = [_phantom(text) for text in table.texts]
    types = files.config.get("type_vocab_size", 2)
    keys = _model_keys("bert", "default", table, False) | {"tokenizer.ggml.token_type_count": types} | special
    _compare(files, keys)
    return keys


def _phantom(text: str) -> str:
    """Remove the mark of pieces inside a word, and mark pieces that begin one with a space."""
    if text.startswith("[") and text.endswith("]"):
        return text
    return text[2:] if text.startswith("##") else "\u2581" + text


def _characters(files: TokenizerFiles, architecture: str) -> Keys:
    """Convert BPE of characters to scores of a SentencePiece vocabulary: earlier merges score higher."""
    vocabulary = _json_vocabulary(files)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(_json_merges(files)):
        ranks.setdefault(merge.replace(" ", ""), rank)
    lowest = -float(len(ranks) + 1)
    unknown = files.model.get("unk_token")
    table = make_table(
        files,
        {i: (text, -float(ranks.get(text, -lowest)), _spm_type(text, unknown)) for text, i in vocabulary.items()},
    )
    keys = _model_keys("llama", "default", table, True) | special_keys(files, table, architecture)
    keys["tokenizer.ggml.add_space_prefix"] = _has_space_prefix(files)
    _compare(files, keys)
    return keys


def _spm_type(text: str, unknown: str | None) -> int:
    return BYTE if _BYTE_TOKEN.fullmatch(text) else UNKNOWN if text == unknown else NORMAL


def _has_space_prefix(files: TokenizerFiles) -> bool:
    """Return whether a text gets a leading space, found by encoding one."""
    return bool("".join(files.fast.encode("a", add_special_tokens=False).tokens).startswith("\u2581"))


def _gemma4(files: TokenizerFiles, architecture: str) -> Keys:
    vocabulary = _json_vocabulary(files)
    unknown = files.model.get("unk_token")
    table = make_table(
        files, {i: (text, -1000.0, _spm_type(text, unknown)) for text, i in vocabulary.items()}, added_score=-1000.0
    )
    table.types = [
        USER_DEFINED if text in _SHOWN_BY_GEMMA4 else kind for text, kind in zip(table.texts, table.types, strict=True)
    ]
    keys = _model_keys("gemma4", None, table, True) | {"tokenizer.ggml.merges": _json_merges(files)}
    keys |= special_keys(files, table, architecture)
    keys |= {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": True}
    _compare(files, keys)
    return keys


def _sentence_piece(files: TokenizerFiles, spm: SpmFile, architecture: str) -> Keys:
    table = make_table(files, dict(enumerate(spm.pieces)))
    known = set(table.texts)
    table.texts = [
        text.replace("\u2581", " ") if kind == USER_DEFINED and text.replace("\u2581", " ") not in known else text
        for text, kind in zip(table.texts, table.types, strict=True)
    ]
    special = special_keys(files, table, architecture, spm.ids)
    prefix = files.settings.get("add_prefix_space")
    prefix = prefix if isinstance(prefix, bool) else spm.add_dummy_prefix
    if spm.unigram:
        return _t5_keys(table, special, prefix, spm.remove_extra_whitespaces, spm.charsmap)
    if spm.charsmap or spm.remove_extra_whitespaces:
        what = "normalizes characters" if spm.charsmap else "removes white space"
        warn(f"{files.source}: the SentencePiece model {what}; a GGUF file of this kind cannot say so")
    keys = _model_keys("llama", "default", table, True) | special
    keys["tokenizer.ggml.add_space_prefix"] = prefix
    _compare(files, keys)
    return keys


def _unigram(files: TokenizerFiles, architecture: str) -> Keys:
    path = files.directory / "tokenizer.json"
    unknown = files.model.get("unk_id")
    pieces: dict[int, tuple[str, float, int]] = {}
    try:
        for i, (text, score) in enumerate(files.model.get("vocab") or []):
            kind = BYTE if _BYTE_TOKEN.fullmatch(text) else UNKNOWN if i == unknown else NORMAL
            pieces[i] = (text, float(score), kind)
    except (TypeError, ValueError):
        raise FormatError(f"{path}: model.vocab is not a list of tokens and scores") from None
    if not pieces:
        raise FormatError(f"{path}: model.vocab is missing")
    charsmap, extra = b"", False
    normalizer = (files.json or {}).get("normalizer") or {}
    for step in normalizer.get("normalizers", [normalizer]):
        if step.get("type") == "Precompiled":
            try:
                charsmap = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
            except (TypeError, binascii.Error):
                raise FormatError(f"{path}: precompiled_charsmap is not base64") from None
        pattern = step.get("pattern")
        extra = extra or (
            step.get("type") == "Replace" and isinstance(pattern, dict) and pattern.get("Regex") == " {2,}"
        )
    table = make_table(files, pieces)
    special = special_keys(files, table, architecture)
    return _t5_keys(table, special, _has_space_prefix(files), extra, charsmap)


def _plamo(files: TokenizerFiles, tokens: Mapping[int, tuple[str, float, int]], architecture: str) -> Keys:
    """Convert the vocabulary of PLaMo 2 and 3, whose chats end with a token that is not the end of a text."""
    table = make_table(files, tokens)
    ends = {"tokenizer.ggml.eot_token_id": table.texts.index(_PLAMO_TURN)} if _PLAMO_TURN in table.texts else {}
    keys = _model_keys("plamo2", "default", table, True) | special_keys(files, table, architecture) | ends
    return keys | {"tokenizer.ggml.add_space_prefix": False}


def _t5_keys(table: Table, special: Keys, prefix: bool, extra: bool, charsmap: bytes) -> Keys:
    keys = _model_keys("t5", "default", table, True) | special
    keys["tokenizer.ggml.add_space_prefix"] = prefix
    keys["tokenizer.ggml.remove_extra_whitespaces"] = extra
    if charsmap:
        keys["tokenizer.ggml.precompiled_charsmap"] = Typed(list(charsmap), GGUFValueType.ARRAY, GGUFValueType.UINT8)
    return keys


def _without_json(files: TokenizerFiles, architecture: str, pre: str | None) -> Keys:
    """Read byte-level BPE from older or other files, which do not say how words are cut."""
    directory = files.directory
    tiktoken = next((name for name in _TIKTOKEN_FILES if (directory / name).is_file()), None)
    if tiktoken is not None:
        tokens, merges = read_tiktoken(directory / tiktoken)
        pre = pre or _TIKTOKEN_FILES[tiktoken]
    else:
        listed = read_object(directory / "vocab.json")
        text = read_text(directory / "merges.txt")
        if listed is None or text is None:
            names = ["tokenizer.json", *_SPM_FILES, *_TIKTOKEN_FILES, "vocab.json with merges.txt"]
            raise UnsupportedError(f"{directory}: no tokenizer; one of {', '.join(names)} is needed")
        if not all(isinstance(i, int) and 0 <= i < 1 << 27 for i in listed.values()):
            raise FormatError(f"{directory / 'vocab.json'}: does not map tokens to ids")
        tokens = {i: token for token, i in listed.items()}
        lines = text.splitlines()
        merges = [line for line in lines[bool(lines and lines[0].startswith("#version")) :] if line]
        bad = next((line for line in merges if len(line.split(" ")) != 2), None)
        if bad is not None:
            raise FormatError(f"{directory / 'merges.txt'}: {bad!r} is not a pair of tokens")
        pre = pre or _SLOW_CLASSES.get(str(files.settings.get("tokenizer_class", "")).removesuffix("Fast"))
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"{directory}: no file says how words are cut; choose with --pre NAME (known: {known})")
    table = make_table(files, {i: (text, 0.0, NORMAL) for i, text in tokens.items()})
    keys = _model_keys("gpt2", pre, table, False) | {"tokenizer.ggml.merges": merges}
    return keys | special_keys(files, table, architecture)


def plain_values(keys: Mapping[str, Any]) -> Keys:
    """Return the keys as a reader of the file sees them."""
    return {key: value.value if isinstance(value, Typed) else value for key, value in keys.items()}


def _differences(files: TokenizerFiles, keys: Keys, texts: Sequence[str]) -> list[str]:
    """Return the texts that the keys cut into other tokens than tokenizer.json."""
    tokenizer = Tokenizer.from_metadata(plain_values(keys), files.source)
    found = []
    for text in texts:
        wanted = files.fast.encode(text, add_special_tokens=False).ids
        if tokenizer.encode(text, add_special=False, parse_special=True) != wanted:
            found.append(text)
    return found


def _compare(files: TokenizerFiles, keys: Keys) -> None:
    if files.fast is None:
        return
    try:
        found = _differences(files, keys, PLAIN)
    except IkError as problem:
        raise FormatError(f"{files.source}: the vocabulary cannot be used: {problem}") from None
    if found:
        shown = found[0] if len(found[0]) < 40 else found[0][:37] + "..."
        warn(
            f"{files.source}: {len(found)} of {len(PLAIN)} texts give other tokens in GGUF than with tokenizer.json, "
            f"the first is {shown!r}"
        )
