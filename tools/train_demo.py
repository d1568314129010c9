"""Train the bundled demo model: text folder in; demo.gguf, mtp-demo.gguf and demo.txt of ikcli/data out.

`demo_model.py` is the model, `demo_head.py` its head for further tokens, which is trained on the finished model and
leaves it as it is; `--head` trains the head alone. PyTorch is needed here and nowhere else in the project:

    pip install torch gguf tokenizers numpy
    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb doc
    python tools/train_demo.py --text doc/usr/share/doc/python3.11/html/_sources

The same text, seed, thread count and library versions give the same model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from demo_head import Head, read_model, report_head, train_head, write_head
from demo_model import Config, Model, write_metadata
from demo_text import BYTE_ORDER, Corpus, prepare
from training import evaluate, round_as_stored, train, training_options, write_tensors

DATA = Path(__file__).resolve().parents[1] / "ikcli" / "data"


def report(label: str, model: Model, corpus: Corpus) -> None:
    """Print held-out perplexity per token and per byte, next to the byte model's on exactly the same bytes."""
    index, bits = evaluate(model, corpus.tokens)
    sizes, stop = corpus.sizes, np.cumsum(corpus.sizes)
    n_bytes = int(sizes[index].sum())
    per_byte = bits.sum() / n_bytes
    baseline = sum(corpus.byte_bits[stop[i] - sizes[i] : stop[i]].sum() for i in index) / n_bytes
    print(
        f"{label}: {len(index)} tokens, {n_bytes} bytes scored; perplexity per token {2 ** bits.mean():.4f}, "
        f"{per_byte:.4f} bits per byte (perplexity per byte {2**per_byte:.4f}); "
        f"order-{BYTE_ORDER} byte model {baseline:.4f} bits per byte (perplexity per byte {2**baseline:.4f})"
    )
    for i, m in enumerate(model.experts()):
        print(f"  expert share, block {model.cfg.n_layer_dense_lead + i}: {(m.usage / m.usage.sum()).numpy().round(3)}")


def write_gguf(path: Path, model: Model, tokenizer_json: dict) -> None:
    """Write the model as GGUF."""
    w = gguf.GGUFWriter(path, "deepseek2")
    write_metadata(w, model.cfg, tokenizer_json)
    write_tensors(w, model.named_tensors())


def make_model(args: argparse.Namespace, corpus: Corpus, model: Model) -> None:
    """Train the model and write it with the held-out text."""
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    if args.checkpoint and args.checkpoint.exists():
        model.load_state_dict(torch.load(args.checkpoint, weights_only=True))
    else:
        train(model, corpus.items, args)
        if args.checkpoint:
            torch.save(model.state_dict(), args.checkpoint)
    report("as trained", model, corpus)
    round_as_stored(model.named_tensors())
    report("as stored", model, corpus)
    (args.out / "demo.txt").write_text(corpus.held_out, encoding="utf-8", newline="\n")
    write_gguf(args.out / "demo.gguf", model, json.loads(corpus.tokenizer.to_str())["model"])


def make_head(args: argparse.Namespace, corpus: Corpus) -> None:
    """Train the head of the model in the output folder and write it."""
    torch.manual_seed(args.seed)
    model, reader = read_model(args.out / "demo.gguf", Config())
    tokenizer = json.loads(corpus.tokenizer.to_str())["model"]
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    if sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__) != tokens:
        raise SystemExit(f"{args.out / 'demo.gguf'} has another vocabulary than this text gives; train the model first")
    head = Head(model)
    print(f"head: {sum(p.numel() for p in head.parameters())} parameters")
    report_head("head before training", model, head, corpus.tokens)
    train_head(model, head, corpus.items, args)
    report_head("head as trained", model, head, corpus.tokens)
    round_as_stored(head.named_tensors())
    report_head("head as stored", model, head, corpus.tokens)
    write_head(args.out / "mtp-demo.gguf", head, tokenizer)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", type=Path, required=True, help="folder of .rst or .rst.txt documents")
    parser.add_argument("--out", type=Path, default=DATA, help="folder for demo.gguf, mtp-demo.gguf and demo.txt")
    parser.add_argument("--head", action="store_true", help="train only the head, for the demo.gguf of the folder")
    parser.add_argument("--checkpoint", type=Path, help="keeps the trained weights; if it exists, nothing is trained")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    training_options(parser)
    return parser.parse_args()


def main() -> None:
    args, cfg = parse_args(), Config()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    corpus = prepare(args.text, cfg.n_vocab, args.seed)
    if not args.head:
        make_model(args, corpus, Model(cfg))
    make_head(args, corpus)


if __name__ == "__main__":
    main()
