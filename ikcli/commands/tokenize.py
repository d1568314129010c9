"""`ik tokenize`: the ids, or ids and pieces, of a text, in the format of llama-tokenize (examples/tokenize).

The text is used unchanged; backslashes are not interpreted. Without BOS (the model adds none, or `--no-bos`) no EOS is
added either.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from ikcli.cli.model import find_model
from ikcli.errors import UsageError
from ikcli.gguf.reader import open_gguf
from ikcli.settings.run import default_model
from ikcli.settings.tools import TokenizeConfig
from ikcli.text_files import as_measured, read_measured
from ikcli.tokenizer import Tokenizer


def run(config: TokenizeConfig) -> int:
    """Tokenize a prompt, a file or standard input and print the result.

    Raise UsageError unless exactly one text is given; raise IkError if a file cannot be read.
    """
    quiet = contextlib.redirect_stderr(io.StringIO()) if config.log_disable else contextlib.nullcontext()
    with quiet:  # the caller reports errors after this
        _print_tokens(config)
    return 0


def _print_tokens(config: TokenizeConfig) -> None:
    prompt, file = config.prompt, config.file
    if (prompt is not None) + (file is not None) + config.stdin != 1:
        raise UsageError("tokenize: give the text by exactly one of --prompt, --file and --stdin")
    text = prompt if prompt is not None else _decode(read_measured(Path(file))) if file is not None else None
    model = str(find_model(config.model, config.hub, header_only=True) or default_model())
    opened = open_gguf(model, header_only=bool(config.hub.repo or config.hub.url))
    tokenizer = Tokenizer.from_metadata(opened.metadata, model)
    if text is None:  # after the model, so that a bad model is reported before anything is typed
        text = _decode(as_measured(sys.stdin.buffer.read(), "standard input"))
    add_special, parse_special = tokenizer.add_bos and not config.no_bos, not config.no_parse_special
    found = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
    out = sys.stdout.buffer
    out.write(_listing(tokenizer, found, config.ids))
    if config.show_count:
        out.write(f"Total number of tokens: {len(found)}\n".encode())
    out.flush()


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _listing(tokenizer: Tokenizer, found: list[int], ids: bool) -> bytes:
    if ids:
        return f"{found}\n".encode()
    # a piece is printed as a C string, that is, up to its first NUL
    return b"".join(b"%6d -> '%s'\n" % (i, tokenizer.token_bytes(i).split(b"\0")[0]) for i in found)
