"""Read the text of a measurement: from a file, from the command line, or bundled; escapes as in llama.cpp tools."""

from __future__ import annotations

import re
import time

import numpy as np

from ikcli.log import log
from ikcli.measure.protocol import HasTokenizer, TokenIds
from ikcli.settings.run import RunConfig, default_text
from ikcli.text_files import read_bytes, read_measured, warn_of_binary

_HINT = "; name a readable file with -f"
_SIMPLE = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[nrt'\"\\])")


def unescape(text: bytes) -> bytes:
    """Replace \\n \\r \\t \\' \\" \\\\ and \\xHH; other backslashes stay."""

    def value(match: re.Match[bytes]) -> bytes:
        code = match.group(1)
        return bytes([int(code[1:], 16)]) if code[:1] == b"x" else _SIMPLE[code]

    return _ESCAPE.sub(value, text)


def load_text(config: RunConfig) -> str:
    """Return the text named by -bf or -f or given by -p, else the bundled one; drop one final newline of a file.

    Bytes that are not UTF-8 become surrogate escapes, which the tokenizer reads as bytes.
    """
    prompt = config.prompt
    if prompt.binary_file is not None:
        raw = raw_text(config)
        warn_of_binary(prompt.binary_file, raw)
        return raw.decode("utf-8", errors="surrogateescape")
    if prompt.file is None and prompt.prompt:
        raw = prompt.prompt.encode("utf-8", errors="surrogateescape")
    else:
        raw = read_measured(prompt.file or default_text(), _HINT).removesuffix(b"\n")
    if prompt.escape:
        raw = unescape(raw)
    return raw.decode("utf-8", errors="surrogateescape")


def raw_text(config: RunConfig) -> bytes:
    """Return the bytes of the file named by -bf or -f, decompressed if it is compressed."""
    return read_bytes(config.prompt.binary_file or config.prompt.file or default_text(), _HINT)


def text_name(config: RunConfig) -> str:
    """Return the name of the text for messages: the file or the prompt."""
    file = config.prompt.binary_file or config.prompt.file
    if file is not None:
        return str(file)
    return "the prompt" if config.prompt.prompt else "the bundled text"


def tokenize(session: HasTokenizer, text: str, who: str = "perplexity", *, parse_special: bool = False) -> TokenIds:
    """Return int32 token ids of the text, with begin-of-text if the model uses it; log the time taken.

    With `parse_special` names of control tokens in the text become those tokens.
    """
    log(f"{who}: tokenizing the input ..")
    started = time.perf_counter()
    tokens = np.asarray(session.tokenizer.encode(text, add_special=True, parse_special=parse_special), dtype=np.int32)
    milliseconds = int((time.perf_counter() - started) * 1e6) * 1e-3
    log(f"{who}: tokenization took {milliseconds:g} ms")
    return tokens
