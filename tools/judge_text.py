"""Text for the judge models of train_judges.py: documentation or program source, with two held-out parts.

Whole documents are held out, picked by the hashes of their names; every second one goes to the text for the importance
matrix, the others to the text to evaluate. Documents that occur twice are used once.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from demo_text import BOS, EOS, hold_out, train_tokenizer
from tokenizers import Tokenizer

HELD_OUT_BYTES = 320_000
# Tests are large and repetitive, the others hold tables and documentation instead of program text.
NOT_PROGRAMS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


def read_sources(folder: Path | None = None) -> dict[str, str]:
    """Read the Python files below `folder`: relative name -> text.

    The default folder is the running interpreter's standard library.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    out: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if NOT_PROGRAMS.isdisjoint(name.parts[:-1]):
            out[name.as_posix()] = path.read_text(encoding="utf-8", errors="replace").expandtabs()
    if not out:
        raise SystemExit(f"no .py files under {folder}")
    return out


@dataclass(frozen=True, slots=True)
class Split:
    """Names and texts of the training documents, and two held-out texts."""

    training: dict[str, str]
    judge: str
    calibration: str


def split(documents: dict[str, str], n_bytes: int = HELD_OUT_BYTES) -> Split:
    """Hold out whole documents of about `n_bytes` in all, half of them for each purpose."""
    unique = {text: name for name, text in reversed(documents.items())}
    documents = {name: text for name, text in documents.items() if unique[text] == name}
    names = hold_out(documents, n_bytes)
    held = [documents.pop(name) for name in names]
    print(f"{len(documents)} documents, {sum(map(len, documents.values()))} characters; held out: {', '.join(names)}")
    return Split(documents, "\n\n".join(held[::2]), "\n\n".join(held[1::2]))


@dataclass(frozen=True, slots=True)
class JudgeText:
    """Training token lists, the tokens to evaluate, and the bits of each of those in a unigram model."""

    tokenizer: Tokenizer
    items: list[np.ndarray]
    tokens: np.ndarray
    unigram_bits: np.ndarray


def tokenize(texts: Split, n_vocab: int, n_piece: int) -> JudgeText:
    """Train the tokenizer and encode; lists have n_piece tokens, so that a batch mixes many documents."""
    tokenizer = train_tokenizer(list(texts.training.values()), n_vocab)
    encoded = tokenizer.encode_batch([BOS + t + EOS for t in texts.training.values()])
    training = np.concatenate([np.array(e.ids, dtype=np.int64) for e in encoded])
    items = [training[i : i + n_piece] for i in range(0, len(training), n_piece)]
    tokens = np.array(tokenizer.encode(BOS + texts.judge).ids, dtype=np.int64)
    counts = np.bincount(training, minlength=n_vocab) + 1.0
    print(f"{len(training)} training tokens, {len(tokens)} tokens to evaluate")
    return JudgeText(tokenizer, items, tokens, -np.log2(counts / counts.sum())[tokens])
