"""Prepare text for the demo model: cleaned reST documents, the held-out part, chat samples, a baseline.

The baseline is a byte model. train_demo.py uses all of it, train_judges.py a part. The source is the reST text of the
Python documentation.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, IM_START, IM_END = SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HELD_OUT_BYTES = 160_000
BYTE_ORDER = 3

PROJECT_LINK = re.compile(r"`([\w-]+) <https://\S+?/project/\1/>`_+")  # the text to evaluate with names no site
CODE_ROLE = re.compile(r":(?:\w+:)?(?!ref:|term:|doc:|dfn:)[\w-]+:`[~!]?([^`<]+?)(?:\s*<[^`]*>)?`")
TEXT_ROLE = re.compile(r":(?:ref|term|doc|dfn):`[~!]?([^`<]+?)(?:\s*<[^`]*>)?`")
INDEX_BLOCK = re.compile(r"^( *)\.\. index::.*\n(?:\1 +\S.*\n|\s*\n(?=\1 +(?:single|pair|triple|object|see)))*", re.M)
HOUSEKEEPING = re.compile(r"^ *\.\. (?:_[^:\n]+:|(?:module|section|code)author::.*|currentmodule::.*)[ ]*\n", re.M)
DIRECTIVE = re.compile(
    r"^( *)\.\. (function|class|method|classmethod|staticmethod|exception|attribute|data|decorator|c:function)::"
    r" *([^\n]+)\n(?:\1 +\S[^\n]*\n)*\n((?:(?:\1   [^\n]*)?\n)+)",
    re.M,
)
QUESTIONS = {
    "function": ("What does `{}` do?", "What is `{}` for?", "How do I use {}?", "Explain the function {}.", "{}"),
    "class": ("What is the class `{}`?", "What is {}?", "When would I use {}?", "Tell me about {}.", "{}"),
    "exception": ("When is `{}` raised?", "What is {}?", "What does the exception {} mean?"),
    "attribute": ("What is `{}`?", "What does {} hold?", "Tell me about {}."),
    "module": ("What is the module `{}` for?", "What does {} do?", "Tell me about the {} module.", "import {}"),
    "term": ("What is {}?", "What does {} mean in Python?", "Explain {}.", "Define {}."),
}
KIND = {"method": "function", "classmethod": "function", "staticmethod": "function", "decorator": "function"}
KIND |= {"c:function": "function", "data": "attribute"}
GREETING = (
    "Hello! I am a very small demo model, trained on the Python documentation. "
    "Ask me what a function, a class or a module is for, and expect mistakes."
)
GREETED_BY = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hi there",
    "Hey",
    "Who are you?",
    "What are you?",
    "What can you do?",
    "Help",
)


def clean(text: str) -> str:
    """Remove the housekeeping of reST: labels, index entries, role prefixes."""
    text = INDEX_BLOCK.sub("", text.replace("\r\n", "\n").expandtabs())
    text = HOUSEKEEPING.sub("", text)
    text = TEXT_ROLE.sub(r"\1", CODE_ROLE.sub(r"`\1`", text))
    text = re.sub(r"[ ]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def read_documents(folder: Path) -> dict[str, str]:
    """Read all reST files below `folder` except the licence texts: name without suffix -> cleaned text."""
    files = sorted(p for p in folder.rglob("*") if p.name.endswith((".rst", ".rst.txt")))
    names = {re.sub(r"\.rst(\.txt)?$", "", p.relative_to(folder).as_posix()): p for p in files}
    documents = {n: clean(p.read_text(encoding="utf-8")) for n, p in names.items() if n not in ("license", "copyright")}
    if not documents:
        raise SystemExit(f"no .rst or .rst.txt files under {folder}; see the head of tools/train_demo.py")
    return documents


def hold_out(documents: dict[str, str], n_bytes: int = HELD_OUT_BYTES) -> list[str]:
    """Choose whole documents, in the order of their names' hashes, until they have `n_bytes`; return their names."""
    chosen, size = [], 0
    for name in sorted(documents, key=lambda n: hashlib.sha256(n.encode()).hexdigest()):
        length = len(documents[name].encode())
        if 3_000 <= length <= 40_000 and size < n_bytes:
            chosen.append(name)
            size += length
    return chosen


def prose(block: str, limit: int = 700) -> str:
    """Return the leading paragraphs of an indented block as unwrapped text of about `limit` characters, or ""."""
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", block):
        text = " ".join(paragraph.split())
        if not text or text.startswith((".. ", "* ", ">>>", "+-", "=", ":")):
            break
        out.append(text[:-1] if text.endswith("::") else text)
        if sum(map(len, out)) > limit // 2 or text.endswith(":"):
            break
    text = re.sub(r"(?:^|(?<=[.!?]) |\n\n)[^.!?\n]*:$", "", "\n\n".join(out))  # nothing follows a final "Example:"
    return text if 40 <= len(text) <= 2 * limit else ""


def questions_and_answers(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Return (kind, subject, answer) for every module, glossary term and described object of one document."""
    for m in re.finditer(r"^\.\. module:: (\S+)\n(?: +:.*\n)*? +:synopsis: (.+)\n", text, re.M):
        yield "module", m[1], f"The `{m[1]}` module: {m[2].rstrip('.')}."
    if name == "glossary":
        for m in re.finditer(r"^   (\S[^\n]*)\n((?:(?:      [^\n]*)?\n)+)", text, re.M):
            if answer := prose(m[2]):
                yield "term", m[1].strip("`"), answer
    for m in DIRECTIVE.finditer(text):
        subject = re.sub(r"\(.*", "", m[3]).split()[-1].rstrip("\\")
        if answer := prose(m[4]):
            yield KIND.get(m[2], m[2]), subject, answer


def chats(documents: dict[str, str], rng: random.Random) -> list[str]:
    """Make conversations of one to three turns in the format of CHAT_TEMPLATE."""
    turns = [(q, GREETING) for q in GREETED_BY * 6]
    for name, text in documents.items():
        for kind, subject, answer in questions_and_answers(name, text):
            turns.append((rng.choice(QUESTIONS[kind]).format(subject), answer))
    rng.shuffle(turns)
    out = []
    while turns:
        some = [turns.pop() for _ in range(min(len(turns), rng.choice((1, 1, 2, 3))))]
        out.append("".join(f"{IM_START}user\n{q}{IM_END}\n{IM_START}assistant\n{a}{IM_END}\n" for q, a in some))
    return out


def byte_model_bits(train: bytes, held_out: bytes, order: int) -> np.ndarray:
    """Return the bits of each held-out byte under an interpolated (Witten-Bell) byte model.

    `order` is the number of bytes of context.
    """
    data, test = (np.frombuffer(b"\n" * order + t, dtype=np.uint8).astype(np.int64) for t in (train, held_out))
    p = np.full(len(held_out), 1 / 256)
    for n in range(order + 1):
        grams, queries = (sum(a[order - k : len(a) - k] << (8 * k) for k in range(n + 1)) for a in (data, test))
        keys, counts = np.unique(grams, return_counts=True)
        contexts, first = np.unique(keys >> 8, return_index=True)
        total, kinds = np.add.reduceat(counts, first), np.diff(np.append(first, len(keys)))
        at = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
        seen = np.where(keys[at] == queries, counts[at], 0)
        where = np.minimum(np.searchsorted(contexts, queries >> 8), len(contexts) - 1)
        known = contexts[where] == queries >> 8
        p = np.where(known, (seen + kinds[where] * p) / (total[where] + kinds[where]), p)
    return -np.log2(p)


def train_tokenizer(texts: list[str], n_vocab: int) -> Tokenizer:
    """Train a byte-level BPE with GPT-2's splitting rule."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training token lists, and the held-out text with its tokens, their lengths in bytes and the byte model's bits."""

    tokenizer: Tokenizer
    items: list[np.ndarray]
    held_out: str
    tokens: np.ndarray
    sizes: np.ndarray
    byte_bits: np.ndarray


def prepare(folder: Path, n_vocab: int, seed: int) -> Corpus:
    documents = read_documents(folder)
    names = hold_out(documents)
    held_out = PROJECT_LINK.sub(r"\1", "\n\n".join(documents.pop(n) for n in names))
    conversations = chats(documents, random.Random(seed))
    print(f"{len(documents)} documents, {sum(map(len, documents.values()))} characters, {len(conversations)} chats")
    print(f"held out: {', '.join(names)} ({len(held_out.encode())} bytes)")
    tokenizer = train_tokenizer(list(documents.values()), n_vocab)
    texts = [BOS + t + EOS for t in [*documents.values(), *conversations]]
    items = [np.array(e.ids, dtype=np.int64) for e in tokenizer.encode_batch(texts)]
    held = tokenizer.encode(BOS + held_out)
    print(f"{sum(map(len, items))} training tokens, {len(held.ids)} held-out tokens")
    # in the byte-level alphabet each character of a token stands for one byte
    sizes = np.array([0] + [len(t) for t in held.tokens[1:]])
    byte_bits = byte_model_bits("\n\n".join(documents.values()).encode(), held_out.encode(), BYTE_ORDER)
    return Corpus(tokenizer, items, held_out, np.array(held.ids, dtype=np.int64), sizes, byte_bits)
