"""Read and check the tokenizer files of a checkpoint: JSON, added tokens, and the vocabulary size of the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ikcli.convert.card import optional_object
from ikcli.convert.json_files import read_object
from ikcli.errors import FormatError, UnsupportedError
from ikcli.log import warn


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text itself."""

    text: str
    special: bool

    @property
    def control(self) -> bool:
        """Return whether GGUF should have it as a control token; some are not marked as special but should be."""
        text = self.text
        looks = (text.startswith("<|") and text.endswith("|>")) or (text.startswith("<｜") and text.endswith("｜>"))
        unused = text.startswith("<unused") and text.endswith(">")
        return self.special or looks or unused or text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


class TokenizerFiles:
    """The tokenizer files of a directory."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self.directory = directory
        self.source = str(directory)
        self.config = config
        self.json = read_object(directory / "tokenizer.json")
        self.settings = read_object(directory / "tokenizer_config.json") or {}

    @cached_property
    def model(self) -> dict[str, Any]:
        """Return `model` of tokenizer.json; empty without that file."""
        model = (self.json or {}).get("model", {})
        if not isinstance(model, dict):
            raise FormatError(f"{self.directory / 'tokenizer.json'}: model is not an object")
        return model

    @cached_property
    def fast(self) -> Any:
        """Return the tokenizer of tokenizer.json, or None without that file."""
        if self.json is None:
            return None
        from tokenizers import Tokenizer

        path = self.directory / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except BaseException as problem:  # the library raises bare Exception, and BaseException for panics
            if isinstance(problem, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise FormatError(f"{path}: {problem}") from None

    @cached_property
    def size(self) -> int | None:
        """Return the number of tokens by config.json, or None if it does not say: of those with an output, if fewer."""
        text = self.config.get("text_config")
        for config in (text if isinstance(text, dict) else {}, self.config):
            for key in ("output_vocab_size", "vocab_size", "padded_vocab_size"):
                value = config.get(key)
                if isinstance(value, int) and not isinstance(value, bool):
                    if not 0 < value < 1 << 27:
                        raise FormatError(f"{self.source}: {key} of config.json is {value}")
                    return value
        return None

    @cached_property
    def pruned(self) -> range:
        """Return the ids of the tokens that have no output: they stand for parts of images and sounds, not for text."""
        text = self.config.get("text_config")
        own = dict(self.config) | (text if isinstance(text, dict) else {})
        return range(self.size or 0, int(own.get("vocab_size") or 0)) if own.get("output_vocab_size") else range(0)

    @cached_property
    def added(self) -> dict[int, AddedToken]:
        """Return added tokens by id from all files that name some; earlier files take precedence."""
        found: dict[int, AddedToken] = {}
        texts: set[str] = set()
        for name, tokens in (
            ("tokenizer.json", self._of_json()),
            ("tokenizer_config.json", self._of_settings()),
            ("added_tokens.json", self._of_list()),
        ):
            for i, token in tokens.items():
                if i < 0:
                    raise FormatError(f"{self.directory / name}: added token {token.text!r} has the id {i}")
                if token.text not in texts:
                    texts.add(token.text)
                    found.setdefault(i, token)
        return found

    def _of_json(self) -> dict[int, AddedToken]:
        listed = (self.json or {}).get("added_tokens") or []
        try:
            return {int(t["id"]): AddedToken(str(t["content"]), bool(t.get("special"))) for t in listed}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FormatError(f"{self.directory / 'tokenizer.json'}: added_tokens are not tokens with ids") from None

    def _of_settings(self) -> dict[int, AddedToken]:
        listed = self.settings.get("added_tokens_decoder") or {}
        try:
            return {int(i): AddedToken(str(t["content"]), bool(t.get("special"))) for i, t in listed.items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            path = self.directory / "tokenizer_config.json"
            raise FormatError(f"{path}: added_tokens_decoder does not map ids to tokens") from None

    def _of_list(self) -> dict[int, AddedToken]:
        path = self.directory / "added_tokens.json"
        listed = read_object(path) or {}
        named = {text for key, text in self.named_tokens.items() if key}
        try:
            return {int(i): AddedToken(text, text in named) for text, i in listed.items()}
        except (TypeError, ValueError):
            raise FormatError(f"{path}: does not map tokens to ids") from None

    @cached_property
    def named_tokens(self) -> dict[str, str]:
        """Return texts of tokens with a role (`bos`, ...) from tokenizer_config.json or special_tokens_map.json."""
        found: dict[str, str] = {}
        for table in (self.settings, optional_object(self.directory / "special_tokens_map.json")):
            for key, entry in table.items():
                text = entry.get("content") if isinstance(entry, dict) else entry
                if key.endswith("_token") and isinstance(text, str):
                    found.setdefault(key.removesuffix("_token"), text)
        return found


@dataclass(slots=True)
class Table:
    """Tokens by id while they are collected: text, score and GGUF's type."""

    texts: list[str]
    scores: list[float]
    types: list[int]


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def make_table(
    files: TokenizerFiles, tokens: Mapping[int, tuple[str, float, int]], added_score: float = -1000.0
) -> Table:
    """Return tokens 0 to the size of the config: the given ones, added tokens over them, and `[PAD...]` in gaps."""
    last = max(tokens, default=-1)
    size = files.size if files.size is not None else max([last, *files.added]) + 1
    if last >= size:
        raise FormatError(f"{files.source}: the tokenizer has {last + 1} tokens, vocab_size of config.json is {size}")
    beyond = [token.text for i, token in files.added.items() if i >= size]
    if beyond:
        warn(f"{files.source}: the model has no embedding for {len(beyond)} added tokens, {beyond[0]!r} first")
    table = Table([""] * size, [-10000.0] * size, [UNUSED] * size)
    for i, (text, score, kind) in tokens.items():
        table.texts[i], table.scores[i], table.types[i] = text, score, kind
    known = {text: i for i, text in enumerate(table.texts) if text}
    for i, token in files.added.items():
        if i >= size:
            continue
        if table.types[i] == UNKNOWN and table.texts[i] == token.text:
            continue
        # readers match these in text with plain spaces
        text = token.text if token.control else token.text.replace("\u2581", " ")
        if known.get(text, i) != i:
            text = token.text
        if known.get(text, i) != i:
            raise UnsupportedError(f"{files.source}: token {text!r} is there twice, as {known[text]} and {i}")
        known[text] = i
        kind = BYTE if table.types[i] == BYTE else CONTROL if token.control else USER_DEFINED
        table.texts[i], table.scores[i], table.types[i] = text, added_score, kind
    for i, text in enumerate(table.texts):
        if not text and i not in tokens:
            name = f"[PAD{i}]"
            while name in known:
                name += "_"
            table.texts[i] = name
    return table
