"""`ik tokenize`: the ids, or ids and pieces, of a text, in the format of llama-tokenize (examples/tokenize).

Text is taken as it is, without interpreting backslashes. Without BOS (the model adds none, or `--no-bos`) no EOS is
added either.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from ikcli.config import default_model
from ikcli.errors import IkError, UsageError

if TYPE_CHECKING:
    from ikcli.tokenizer import Tokenizer


def run(
    model: str,
    *,
    prompt: str | None = None,
    file: str | None = None,
    stdin: bool = False,
    ids: bool = False,
    no_bos: bool = False,
    no_parse_special: bool = False,
    show_count: bool = False,
    out: BinaryIO | None = None,
) -> None:
    """Tokenize a prompt, a file or standard input and print the result to `out` (default stdout).

    UsageError unless exactly one text is given; IkError if a file cannot be read.
    """
    from ikcli.gguf.reader import open_gguf
    from ikcli.tokenizer import Tokenizer

    if (prompt is not None) + (file is not None) + stdin != 1:
        raise UsageError("tokenize: give the text by exactly one of --prompt, --file and --stdin")
    text = prompt if prompt is not None else _decode(_read(file)) if file is not None else None
    tokenizer = Tokenizer.from_metadata(open_gguf(model).metadata, model)
    if text is None:  # after the model, so that a bad model is reported before anything is typed
        text = _decode(sys.stdin.buffer.read())
    found = tokenizer.encode(text, add_special=tokenizer.add_bos and not no_bos, parse_special=not no_parse_special)
    target = out if out is not None else sys.stdout.buffer
    target.write(_listing(tokenizer, found, ids))
    if show_count:
        target.write(f"Total number of tokens: {len(found)}\n".encode())
    target.flush()


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as e:
        raise IkError(f"cannot read {file}: {e.strerror or e}") from None


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _listing(tokenizer: Tokenizer, found: list[int], ids: bool) -> bytes:
    if ids:
        return f"{found}\n".encode()
    # a piece is printed as a C string, that is, up to its first NUL
    return b"".join(b"%6d -> '%s'\n" % (i, tokenizer.token_bytes(i).split(b"\0")[0]) for i in found)


def register(app: typer.Typer) -> None:
    """Add the command `tokenize` to `app`."""

    @app.command("tokenize")
    def tokenize(
        model: Annotated[
            str | None,
            typer.Option("-m", "--model", metavar="FILE", help="GGUF model or vocabulary; default the demo model"),
        ] = None,
        prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="text to tokenize")] = None,
        file: Annotated[str | None, typer.Option("-f", "--file", metavar="FILE", help="read the text here")] = None,
        stdin: Annotated[bool, typer.Option("--stdin", help="read the text from standard input")] = False,
        ids: Annotated[bool, typer.Option("--ids", help="print only the ids, as [1, 2, 3]")] = False,
        no_bos: Annotated[bool, typer.Option("--no-bos", help="never add a BOS token")] = False,
        no_escape: Annotated[
            bool, typer.Option("--no-escape", help="accepted; backslashes are never interpreted")
        ] = False,
        no_parse_special: Annotated[
            bool, typer.Option("--no-parse-special", help="take the names of control tokens as text")
        ] = False,
        log_disable: Annotated[bool, typer.Option("--log-disable", help="no warnings on stderr")] = False,
        show_count: Annotated[bool, typer.Option("--show-count", help="print the number of tokens")] = False,
    ) -> None:
        """Print the tokens of a text."""
        quiet = contextlib.redirect_stderr(io.StringIO()) if log_disable else contextlib.nullcontext()
        with quiet:  # errors are reported by the caller, after this
            run(
                model or str(default_model()),
                prompt=prompt,
                file=file,
                stdin=stdin,
                ids=ids,
                no_bos=no_bos,
                no_parse_special=no_parse_special,
                show_count=show_count,
            )
