"""Read and check the vocabulary of GGUF metadata: token texts, scores, attributes, merges, special ids and flags.

The keys are `tokenizer.ggml.*`; token types are 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
Defaults, names of tokens that end a generation, and fixes for known model files follow src/llama-vocab.cpp.
Token texts are `str`; bytes that are not UTF-8 are surrogate escapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Literal

import numpy as np

from ikcli.errors import FormatError, UnsupportedError
from ikcli.log import warn
from ikcli.tokenizer.pretokenize import PRE_TOKENIZERS, PreTokenizer

Kind = Literal["spm", "bpe", "wpm", "ugm", "plamo", "none"]

PREFIX = "tokenizer.ggml."
_NO_TOKEN = (-1, 0xFFFFFFFF)


class Attr(IntFlag):
    """Token attributes; a token may have several."""

    UNDEFINED = 0
    UNKNOWN = 1
    UNUSED = 2
    NORMAL = 4
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32
    LSTRIP = 128
    RSTRIP = 256


_TYPE_ATTR = {
    1: Attr.NORMAL,
    2: Attr.UNKNOWN,
    3: Attr.CONTROL,
    4: Attr.USER_DEFINED,
    5: Attr.UNUSED,
    6: Attr.BYTE,
}

_ID_KEYS = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id",),  # the spelling of all GGUF files
    "pad": ("padding_token_id",),
    "cls": ("cls_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}

# Texts that give a token a role if the metadata does not; the first one present wins.
_ROLE_TEXTS = {
    "eot": "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT]"
    " <｜end▁of▁sentence｜> <end_of_utterance>",
    "eom": "<|eom_id|>",
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}

EOG_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>"
    " <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>"
    " <｜end▁of▁sentence｜>"
)

_ALWAYS_SHOWN = "<|channel|> <|message|> <|start|> <|constrain|>"


@dataclass(slots=True)
class SpecialIds:
    """Ids of tokens with a role; None if the model lacks the token."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    cls: int | None = None
    mask: int | None = None
    fim_pre: int | None = None
    fim_suf: int | None = None
    fim_mid: int | None = None
    fim_pad: int | None = None
    fim_rep: int | None = None
    fim_sep: int | None = None


_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
    "plamo2": {"bos": 1, "eos": 2, "unk": 0, "pad": 3},
}
_KINDS: dict[str, Kind] = {"llama": "spm", "bert": "wpm", "gpt2": "bpe", "gemma4": "bpe", "t5": "ugm",
                          "plamo2": "plamo"}  # fmt: skip


@dataclass(slots=True)
class Vocab:
    """A checked vocabulary; `attrs[id]` are `Attr` bits, `merges` are in rank order without duplicates."""

    source: str
    kind: Kind
    pre: PreTokenizer
    tokens: list[str]
    scores: list[float]
    attrs: list[int]
    token_to_id: dict[str, int]
    merges: list[tuple[str, str]]
    ids: SpecialIds
    eog_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    escape_whitespaces: bool
    n_vocab: int
    charsmap: bytes = b""  # of unigram models: how characters are normalized, as SentencePiece stores it
    remove_extra_whitespaces: bool = False  # of unigram models


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Typed access to the keys; errors name the file and the key."""

    values: Mapping[str, Any]
    source: str

    def fail(self, key: str, problem: str) -> FormatError:
        return FormatError(f"{self.source}: {key} {problem}")

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, not {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool | int | np.bool_ | np.integer):
            raise self.fail(key, f"must be true or false, not {type(value).__name__}")
        return bool(value)

    def integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise self.fail(key, f"must be an integer, not {type(value).__name__}")
        return int(value)

    def array(self, key: str) -> Sequence[Any] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            return list(value.tolist())
        if not isinstance(value, list | tuple):
            raise self.fail(key, f"must be an array, not {type(value).__name__}")
        return value

    def strings(self, key: str) -> list[str] | None:
        value = self.array(key)
        if value is None:
            return None
        if not set(map(type, value)) <= {str}:  # without a loop in Python, since there are hundreds of thousands
            for i, item in enumerate(value):
                if not isinstance(item, str):
                    raise self.fail(key, f"must hold strings, but entry {i} is {type(item).__name__}")
        return list(value)

    def numbers(self, key: str, n_tokens: int) -> list[Any] | None:
        value = self.array(key)
        if value is None:
            return None
        if len(value) < n_tokens:
            raise self.fail(key, f"has {len(value)} entries for {n_tokens} tokens")
        raw = self.values[key]
        if isinstance(raw, np.ndarray) and raw.dtype.kind in "iuf" and not np.isnan(raw[:n_tokens]).any():
            return list(value[:n_tokens])
        for i, item in enumerate(value[:n_tokens]):
            if isinstance(item, str | bytes) or not isinstance(item, int | float | np.number) or math.isnan(item):
                raise self.fail(key, f"must hold numbers, but entry {i} is {item!r}")
        return list(value[:n_tokens])


def load_vocab(metadata: Mapping[str, Any], source: str) -> Vocab:
    """Read and check the vocabulary of a model.

    Raise a FormatError if it is missing or inconsistent, an UnsupportedError for an unknown tokenizer or pre-tokenizer.
    """
    meta = _Metadata(metadata, source)
    model = meta.text(PREFIX + "model")
    if not model:
        raise meta.fail(PREFIX + "model", "is missing; the file has no tokenizer")
    if model in ("none", "no_vocab"):
        return _no_vocab(meta)
    if model not in _KINDS:
        raise UnsupportedError(f"{source}: tokenizer {model!r} is not supported; supported are {', '.join(_KINDS)}")
    kind = _KINDS[model]
    pre = _pre_tokenizer(meta, model) if kind == "bpe" else PRE_TOKENIZERS["default"]
    tokens, token_to_id = _tokens(meta)
    ids = _special_ids(meta, model, pre, len(tokens))
    vocab = Vocab(
        source=source,
        kind=kind,
        pre=pre,
        tokens=tokens,
        scores=list(map(float, meta.numbers(PREFIX + "scores", len(tokens)) or [0.0] * len(tokens))),
        attrs=_attributes(meta, len(tokens)),
        token_to_id=token_to_id,
        merges=_merges(meta, pre) if kind == "bpe" else [],
        ids=ids,
        eog_ids=frozenset(),
        add_bos=meta.flag(PREFIX + "add_bos_token", kind in ("spm", "wpm") or (kind == "bpe" and pre.add_bos))
        or pre.rule == "gemma4",
        add_eos=meta.flag(PREFIX + "add_eos_token", kind == "ugm"),
        add_space_prefix=meta.flag(PREFIX + "add_space_prefix", kind in ("spm", "ugm")),
        escape_whitespaces=kind in ("spm", "ugm") or pre.rule == "gemma4",
        n_vocab=len(tokens),
        charsmap=_charsmap(meta) if kind == "ugm" else b"",
        remove_extra_whitespaces=kind == "ugm" and meta.flag(PREFIX + "remove_extra_whitespaces", False),
    )
    _detect_roles(vocab)
    vocab.eog_ids = frozenset(_end_tokens(vocab))
    _strip_attributes(vocab, meta)
    return vocab


def _charsmap(meta: _Metadata) -> bytes:
    key = PREFIX + "precompiled_charsmap"
    value = np.asarray(meta.array(key) if meta.array(key) is not None else [])
    if value.size and (value.dtype.kind not in "iu" or value.min() < -128 or value.max() > 255):
        raise meta.fail(key, "is not a list of bytes")
    return (value.astype(np.int64) & 255).astype(np.uint8).tobytes()


def _no_vocab(meta: _Metadata) -> Vocab:
    key = f"{meta.text('general.architecture')}.vocab_size"
    n_vocab = meta.integer(key) or 0
    pre = PRE_TOKENIZERS["default"]
    return Vocab(
        meta.source, "none", pre, [], [], [], {}, [], SpecialIds(), frozenset(), False, False, False, False, n_vocab
    )


def _pre_tokenizer(meta: _Metadata, model: str) -> PreTokenizer:
    name = "gemma4" if model == "gemma4" else meta.text(PREFIX + "pre")
    if not name:
        warn(
            f"{meta.source}: {PREFIX}pre is missing, so the 'default' pre-tokenizer is used; "
            "generation quality suffers if the model was trained with another one"
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{meta.source}: pre-tokenizer {name!r} ({PREFIX}pre) is not known; name the one it is like with "
            f"--override-kv {PREFIX}pre=str:NAME (known: {', '.join(sorted(PRE_TOKENIZERS))})"
        )
    return PRE_TOKENIZERS[name]


def _tokens(meta: _Metadata) -> tuple[list[str], dict[str, int]]:
    key = PREFIX + "tokens"
    tokens = meta.strings(key)
    if not tokens:
        raise meta.fail(key, "is missing or empty; the file has no vocabulary")
    if "" in tokens:
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    token_to_id = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(token_to_id) != len(tokens):
        i = next(i for i, text in enumerate(tokens) if token_to_id[text] != i)
        raise meta.fail(key, f"holds {tokens[i]!r} twice, as {i} and {token_to_id[tokens[i]]}")
    return tokens, token_to_id


def _attributes(meta: _Metadata, n_tokens: int) -> list[int]:
    types = meta.numbers(PREFIX + "token_type", n_tokens)
    if types is None:
        return [int(Attr.NORMAL)] * n_tokens
    table = {kind: int(attr) for kind, attr in _TYPE_ATTR.items()}
    return [table.get(kind, 0) for kind in types]


def _merges(meta: _Metadata, pre: PreTokenizer) -> list[tuple[str, str]]:
    key = PREFIX + "merges"
    lines = meta.strings(key)
    if lines is None:
        if pre.rule == "kimi-k2":
            return []
        raise meta.fail(key, "is missing; a BPE vocabulary needs its merges")
    merges = [(line[:at], line[at + 1 :]) for line in lines if 0 < (at := line.find(" ", 1)) < len(line) - 1]
    if len(merges) != len(lines):
        i, line = next((i, s) for i, s in enumerate(lines) if not 0 < s.find(" ", 1) < len(s) - 1)
        raise meta.fail(key, f"entry {i} is not two tokens separated by a space: {line!r}")
    return list(dict.fromkeys(merges))


def _special_ids(meta: _Metadata, model: str, pre: PreTokenizer, n_tokens: int) -> SpecialIds:
    defaults = {role: i for role, i in _DEFAULT_IDS[model].items() if i < n_tokens}
    if pre.no_bos:
        defaults.pop("bos", None)
    ids = SpecialIds(**defaults)
    for role, names in _ID_KEYS.items():
        for name in names:
            key = PREFIX + name
            value = meta.integer(key)
            if value is None or value in _NO_TOKEN:
                continue
            if not 0 <= value < n_tokens:
                raise meta.fail(key, f"is {value}, but the vocabulary has {n_tokens} tokens")
            setattr(ids, role, value)
    if ids.cls is None:
        ids.cls = ids.bos
    return ids


def _present(vocab: Vocab, texts: str) -> list[int]:
    """Return the ids of those blank-separated `texts` that are tokens, in that order."""
    return [vocab.token_to_id[text] for text in texts.split(" ") if text in vocab.token_to_id]


def _detect_roles(vocab: Vocab) -> None:
    """Assign roles by token text if the metadata does not state them."""
    for role, texts in _ROLE_TEXTS.items():
        if getattr(vocab.ids, role) is not None:
            continue
        for found in _present(vocab, texts)[:1]:
            setattr(vocab.ids, role, found)
            vocab.attrs[found] |= Attr.CONTROL


def _end_tokens(vocab: Vocab) -> set[int]:
    """Return ids that end a generation; also correct the attributes of tokens that look like control tokens."""
    ids, attrs, control = vocab.ids, vocab.attrs, int(Attr.CONTROL)  # operators of enums are slow
    for text, i in vocab.token_to_id.items():
        if attrs[i] & control and "unused" in text:
            attrs[i] |= Attr.UNUSED
    ends = {i for i in (ids.fim_pad, ids.fim_rep, ids.fim_sep) if i is not None}
    for i in _present(vocab, EOG_TEXTS):
        ends.add(i)
        attrs[i] |= Attr.CONTROL
    for i in _present(vocab, _ALWAYS_SHOWN):
        attrs[i] = int(Attr.USER_DEFINED)
    ends |= {i for i in (ids.eos, ids.eot, ids.eom) if i is not None}
    texts = {vocab.tokens[i] for i in ends}
    calls = "<|call|>" in texts or "<|calls|>" in texts
    if calls and "<|end|>" in texts and ("<|return|>" in texts or "<|flush|>" in texts):
        _drop_end(vocab, ends, "<|end|>", Attr.USER_DEFINED)
    if {"<|tool_response>", "</s>"} <= texts:
        _drop_end(vocab, ends, "</s>", Attr.NORMAL)
    return ends


def _drop_end(vocab: Vocab, ends: set[int], text: str, attr: Attr) -> None:
    i = vocab.token_to_id[text]
    ends.discard(i)
    vocab.attrs[i] = int(attr)


def special_tokens(vocab: Vocab) -> list[int]:
    """Return ids that are matched in the text itself, longest text (in bytes) first."""
    wanted = int(Attr.CONTROL | Attr.USER_DEFINED | Attr.UNKNOWN)
    found = [i for i, attr in enumerate(vocab.attrs) if attr & wanted]
    return sorted(found, key=lambda i: -len(vocab.tokens[i].encode("utf-8", "surrogateescape")))


def _strip_attributes(vocab: Vocab, meta: _Metadata) -> None:
    """Let special tokens of known models absorb adjacent white space; GGUF lacks that, so the models go by name."""
    pre, arch = meta.text(PREFIX + "pre"), meta.text("general.architecture")
    name = meta.text("general.name").lower()
    find, attrs = vocab.token_to_id.get, vocab.attrs
    mask: int | None = None
    if any(n in pre for n in ("jina-v2-de", "jina-v2-es", "jina-v2-code")) or any(
        n in arch for n in ("nomic-bert-moe", "jina-bert-v3")
    ):
        mask = find("<mask>")
    elif "phi-3" in name or "phi3" in name:
        for i in [*special_tokens(vocab), *_present(vocab, "</s>")]:
            attrs[i] |= Attr.RSTRIP
        for i in _present(vocab, "<unk> <s> <|endoftext|>"):
            attrs[i] &= ~Attr.RSTRIP
    elif "modern-bert" in name:
        mask = find("[MASK]")
    if mask is not None:
        attrs[mask] |= Attr.LSTRIP
