"""Add a small checkpoint and torch's logits to tests/data/convert_answers.json (needs torch and transformers).

The model is a class of transformers with BASE and the given keys as its configuration; weights are drawn by the names
of tensors (tests/checkpoints.py). `--class` is what config.json shall say, if the hub's class has another name.

    python tools/convert_answers.py NAME CLASS '{"sliding_window": 8, ...}' [--class HubClass] [--adjacent]

`--adjacent`: pairs that are rotated are adjacent, as in the released checkpoint, where the class of transformers pairs
columns that are half of the rotated part apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
ANSWERS = ROOT / "tests" / "data" / "convert_answers.json"
BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
_COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # by models themselves, though they are saved
_PASSING = ("dtype", "torch_dtype", "transformers_version")


def _rotate_adjacent(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """Return q and k with adjacent pairs rotated, in place of `apply_rotary_pos_emb`."""
    import torch

    cos, sin = (x[..., : x.shape[-1] // 2].unsqueeze(unsqueeze_dim) for x in (cos, sin))

    def turned(x: Any) -> Any:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    return turned(q), turned(k)


def logits_of(
    name: str, keys: dict[str, Any], tokens: list[int], adjacent: bool = False
) -> tuple[dict[str, Any], dict[str, list[int]], Any]:
    """Return config.json, the shapes of the checkpoint's tensors, and the logits of all tokens."""
    import torch
    import transformers
    from checkpoints import drawn
    from safetensors.torch import load_file, save_file

    cls = getattr(transformers, name)
    if adjacent:
        sys.modules[cls.__module__].apply_rotary_pos_emb = _rotate_adjacent  # type: ignore[attr-defined]
    config = cls.config_class(**BASE | keys)
    config.architectures = [name]
    with tempfile.TemporaryDirectory() as folder:
        cls(config).float().save_pretrained(folder)
        file = next(Path(folder).glob("*.safetensors"))
        saved = load_file(file)
        # Vectors of whole numbers follow from the configuration.
        mine = {key: x for key, x in saved.items() if x.is_floating_point() or x.ndim > 1}
        shapes = {key: list(x.shape) for key, x in mine.items() if not key.endswith(_COMPUTED)}
        made = {key: torch.from_numpy(drawn(key, shape)) for key, shape in shapes.items()}
        save_file(saved | made, file, {"format": "pt"})
        model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        found = json.loads((Path(folder) / "config.json").read_text())
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return {key: value for key, value in found.items() if key not in _PASSING}, shapes, logits


def main() -> int:
    """Compute the answer and write it, in place of an older one of that name."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("name")
    parser.add_argument("model_class")
    parser.add_argument("keys", type=json.loads)
    parser.add_argument("--class", dest="hub_class")
    parser.add_argument("--adjacent", action="store_true")
    args = parser.parse_args()
    answers = json.loads(ANSWERS.read_text())
    config, shapes, logits = logits_of(args.model_class, args.keys, answers["tokens"], args.adjacent)
    config["architectures"] = [args.hub_class or args.model_class]
    numbers = [[float(f"{x:.6g}") for x in logits[row, answers["columns"]]] for row in answers["rows"]]
    entry = {"name": args.name, "slow": True, "config": config, "tensors": shapes, "logits": numbers}
    models = [model for model in answers["models"] if model["name"] != args.name] + [entry]
    head = ",\n".join(f'"{key}":{json.dumps(answers[key])}' for key in ("tokens", "rows", "columns"))
    lines = ",\n".join(json.dumps(model, separators=(",", ":")) for model in models)
    ANSWERS.write_text(f'{{{head},\n"models":[\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
