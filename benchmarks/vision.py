#!/usr/bin/env python3
"""Time to encode an image: `ik` next to the llama-mtmd-cli of ik_llama.cpp, as a Markdown table.

Makes random projectors with the widths, heads and patches of real ones, but fewer layers, and a small text model for
each. Both programs encode the same images (noise) in turns; the first image of a run warms up, and medians of the
others are compared. Only what each of them reports for encoding counts, loading and text are left out. Without
--reference `ik` runs alone. Files that are already in the folder are used.

--conversation N sends a question about N images to servers of both (`ik serve`, llama-server) in turns, then the same
conversation with the answer and another question, and prints the seconds of both turns as a client sees them.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import make_random_model as random_model
from serve import server

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.models import HParams
from ikcli.vision.decode import Picture
from ikcli.vision.projector import Projector

PROGRAM, SERVER = "llama-mtmd-cli", "llama-server"
_ENCODED = re.compile(r"image(?: slice)? encoded in (\d+) ms")
_TEXT_WIDTH = 256
_MEANS = {"image_mean": np.array([0.48, 0.46, 0.41], np.float32), "image_std": np.array([0.27, 0.26, 0.28], np.float32)}


@dataclass(frozen=True, slots=True)
class Shape:
    """A tower: its type, keys of `clip.vision`, whether it has biases, a gate and layer norms, its text model."""

    type: str
    width: int
    n_ff: int
    n_head: int
    layers: int
    patch: int
    image_size: int
    keys: Mapping[str, Any]
    act: str
    bias: bool = True
    gate: bool = False
    text: str = "llama"

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return names and GGUF-order shapes."""
        n, ff, out = self.width, self.n_ff, _TEXT_WIDTH
        found: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": (self.patch, self.patch, 3, n)}
        products = {"attn_q": (n, n), "attn_k": (n, n), "attn_v": (n, n), "attn_out": (n, n), "ffn_up": (n, ff),
                    "ffn_down": (ff, n)} | ({"ffn_gate": (n, ff)} if self.gate else {})  # fmt: skip
        for il in range(self.layers):
            for name, shape in products.items():
                found[f"v.blk.{il}.{name}.weight"] = shape
                if self.bias:
                    found[f"v.blk.{il}.{name}.bias"] = shape[1:]
            for name in ("ln1", "ln2"):
                found[f"v.blk.{il}.{name}.weight"] = (n,)
                if self.type == "gemma3":
                    found[f"v.blk.{il}.{name}.bias"] = (n,)
        return found | _PROJECTORS[self.type](n, out, (self.image_size // self.patch) ** 2)


def _gemma3(n: int, out: int, patches: int) -> dict[str, tuple[int, ...]]:
    return {
        "v.patch_embd.bias": (n,), "v.position_embd.weight": (n, patches), "v.post_ln.weight": (n,),
        "v.post_ln.bias": (n,), "mm.soft_emb_norm.weight": (n,), "mm.input_projection.weight": (out, n),
    }  # fmt: skip


def _qwen25vl(n: int, out: int, patches: int) -> dict[str, tuple[int, ...]]:
    del patches
    return {"v.patch_embd.weight.1": (14, 14, 3, n), "v.post_ln.weight": (n,), "mm.0.weight": (4 * n, 4 * n),
            "mm.0.bias": (4 * n,), "mm.2.weight": (4 * n, out), "mm.2.bias": (out,)}  # fmt: skip


def _pixtral(n: int, out: int, patches: int) -> dict[str, tuple[int, ...]]:
    del patches
    return {"v.pre_ln.weight": (n,), "v.token_embd.img_break": (out,), "mm.input_norm.weight": (n,),
            "mm.patch_merger.weight": (4 * n, n), "mm.1.weight": (n, out), "mm.2.weight": (out, out)}  # fmt: skip


_PROJECTORS = {"gemma3": _gemma3, "qwen2.5vl_merger": _qwen25vl, "pixtral": _pixtral}
SHAPES = {
    "qwen2.5vl": Shape("qwen2.5vl_merger", 1280, 3420, 16, 8, 14, 560, {"n_wa_pattern": 8}, "silu", gate=True,
                       text="qwen2vl"),
    "gemma3": Shape("gemma3", 1152, 4304, 16, 6, 14, 896, {}, "gelu"),
    "pixtral": Shape("pixtral", 1024, 4096, 16, 6, 14, 1540, {"spatial_merge_size": 2}, "silu", bias=False, gate=True),
}  # fmt: skip


def write_projector(path: Path, shape: Shape, type_: GGMLType) -> None:
    """Write a projector with matrices of one type, where their rows divide, else f16."""
    vision = {
        "image_size": shape.image_size, "patch_size": shape.patch, "embedding_length": shape.width,
        "feed_forward_length": shape.n_ff, "projection_dim": _TEXT_WIDTH, "block_count": shape.layers,
        "attention.head_count": shape.n_head, "attention.layer_norm_epsilon": 1e-6, **_MEANS, **shape.keys,
    }  # fmt: skip
    metadata = {"general.architecture": "clip", "general.type": "mmproj", "general.file_type": 1,
                "clip.has_vision_encoder": True, "clip.projector_type": shape.type, f"clip.use_{shape.act}": True,
                **{f"clip.vision.{k}": v for k, v in vision.items()}}  # fmt: skip

    def type_of(name: str, ne: tuple[int, ...]) -> GGMLType:
        if len(ne) == 1 or name == "v.position_embd.weight":
            return GGMLType.F32
        plain = len(ne) > 2 or ne[0] % TYPES[type_].block_size or name.startswith("mm.patch_merger")
        return GGMLType.F16 if plain or name == "mm.input_projection.weight" else type_

    specs = [NewTensor(name, ne, type_of(name, ne)) for name, ne in shape.tensors().items()]
    rng = np.random.Generator(np.random.SFC64(0))
    with GGUFWriter(path, metadata, specs) as writer:
        for spec in specs:
            if len(spec.shape) == 1 and not spec.name.endswith("bias"):
                writer.write_tensor(spec.name, np.ones(spec.shape, np.float32).view(np.uint8))
            else:
                writer.write_tensor(spec.name, random_model.tensor_data(spec, rng))


def write_text_model(path: Path, arch: str) -> None:
    """Write a text model of one small layer."""
    keys = {
        "block_count": 1, "context_length": 32768, "embedding_length": _TEXT_WIDTH, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6, "rope.dimension_count": 64,
    }  # fmt: skip
    optional: tuple[str, ...] = ()
    if arch == "qwen2vl":
        keys["rope.dimension_sections"] = np.array([16, 8, 8, 0], np.int32)
        optional = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
    preset = random_model.Preset(arch, keys, optional, 1024)
    file_type, tensors = random_model.tensors_of(preset, "F16")
    rng = np.random.Generator(np.random.SFC64(0))
    with GGUFWriter(path, random_model.metadata(preset, file_type), tensors) as writer:
        for t in tensors:
            writer.write_tensor(t.name, random_model.tensor_data(t, rng))


def files(folder: Path, name: str, type_: str) -> tuple[Path, Path]:
    """Return the paths of text model and projector, which are written unless they exist."""
    shape = SHAPES[name]
    text, projector = folder / f"text-{shape.text}.gguf", folder / f"{name}-{type_}.mmproj.gguf"
    if not text.exists():
        write_text_model(text, shape.text)
    if not projector.exists():
        write_projector(projector, shape, GGMLType[type_.upper()])
    return text, projector


def noise(side: int, number: int = 0) -> Picture:
    """Return a square image; those of other numbers differ."""
    return Picture.of(np.random.default_rng((side, number)).integers(0, 256, (side, side, 3), np.uint8))


def noise_file(folder: Path, side: int, number: int = 0) -> Path:
    """Return the path of such an image, which is written unless it exists."""
    from PIL import Image

    path = folder / f"noise-{side}-{number}.png"
    if not path.exists():
        Image.fromarray(noise(side, number).rgb).save(path)
    return path


def time_ours(text: Path, projector: Path, side: int, n: int, n_threads: int) -> list[float]:
    """Return the milliseconds of n images, resizing included, after one that is not counted."""
    file = open_gguf(text)
    hp = HParams.from_gguf(file.metadata, file.tensors, text.name)
    opened, picture, times = Projector.open(projector, hp, n_threads=n_threads), noise(side), []
    for _ in range(n + 1):
        start = time.perf_counter()
        opened.encode(picture)
        times.append(1e3 * (time.perf_counter() - start))
    opened.close()
    return times[1:]


def time_reference(program: Path, text: Path, projector: Path, image: Path, n: int, n_threads: int) -> list[float]:
    """Return the milliseconds that the reference reports for n images, after one that is not counted."""
    command = [str(program), "-m", str(text), "--mmproj", str(projector), "-t", str(n_threads), "-c", "16384", "-n",
               "1", "-p", "x", "--chat-template", "vicuna", *["--image", str(image)] * (n + 1)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    log = done.stdout + done.stderr
    times = [float(x) for x in _ENCODED.findall(log)]
    if len(times) != n + 1:
        sys.exit(f"error: {' '.join(command)}: {len(times)} images encoded\n" + "\n".join(log.splitlines()[-10:]))
    return times[1:]


def turns(images: list[Path], answer: str | None) -> list[dict[str, Any]]:
    """Return the messages of a question about images, and, with the answer to it, of a second one."""
    urls = [f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for path in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    found = [{"role": "user", "content": [*parts, {"type": "text", "text": "What do these have in common?"}]}]
    if answer is None:
        return found
    return [*found, {"role": "assistant", "content": answer}, {"role": "user", "content": "And what tells them apart?"}]


def ask(port: int, messages: list[dict[str, Any]]) -> tuple[float, str]:
    """Return the seconds until the answer, of four tokens, is there, and the answer."""
    letters = "root ::= [a-z ]+"  # the reference does not survive broken UTF-8, which random weights write
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "cache_prompt": True, "grammar": letters}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data, headers)
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=3600) as response:
        found = json.load(response)
    return time.perf_counter() - start, str(found["choices"][0]["message"]["content"] or "")


def time_turns(
    command: list[str], text: Path, projector: Path, images: list[Path], options: argparse.Namespace
) -> list[float]:
    """Return the seconds of the first and of the second turn of a conversation with a new server."""
    extra = ["--mmproj", str(projector.resolve()), "--chat-template", "chatml"]
    sizes = argparse.Namespace(n_prompt=32000, n_gen=64, threads=options.threads, extra=extra, timeout=300.0)
    with server(command, text, sizes, 1) as port:
        first, answer = ask(port, turns(images, None))
        return [first, ask(port, turns(images, answer))[0]]


def conversations(options: argparse.Namespace) -> None:
    """Print a table of the seconds of two turns."""
    sides = {"ik": [sys.executable, "-m", "ikcli", "serve"]}
    if options.reference:
        sides["reference"] = [str((options.reference / SERVER).resolve())]
    print("| tower | type | images | first: ik s | reference s | ratio | second: ik s | reference s | ratio |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for name in options.shapes or SHAPES:
        for type_ in options.types.split(","):
            text, projector = files(options.folder, name, type_)
            for side in map(int, options.sides.split(",")):
                images = [noise_file(options.folder, side, i) for i in range(options.conversation)]
                times: dict[str, list[list[float]]] = {which: [] for which in sides}
                for _ in range(options.repetitions):
                    for which, command in sides.items():
                        times[which].append(time_turns(command, text, projector, images, options))
                row = f"| {name} | {type_} | {len(images)} x {side} |"
                for turn in (0, 1):
                    ours, *theirs = (statistics.median(one[turn] for one in times[which]) for which in sides)
                    row += f" {ours:.3f} |" + (f" {theirs[0]:.3f} | {theirs[0] / ours:.1f} |" if theirs else " - | - |")
                print(row, flush=True)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--reference", type=Path, help=f"folder with {PROGRAM} and {SERVER}")
    parser.add_argument("--folder", type=Path, required=True, help="where models and images are made, and kept")
    parser.add_argument("--types", default="f16,q8_0", help="of matrices (default: %(default)s)")
    parser.add_argument("--sides", default="336,1024", help="of square images (default: %(default)s)")
    parser.add_argument("--conversation", type=int, default=0, metavar="N", help="time two turns about N images")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--images", type=int, default=2, help="in a run (default: %(default)s)")
    parser.add_argument("-r", "--repetitions", type=int, default=2, help="runs of each program (default: %(default)s)")
    found = parser.parse_args(argv)
    if unknown := sorted(set(found.shapes) - set(SHAPES)):
        parser.error(f"unknown shape: {', '.join(unknown)}; known are {', '.join(SHAPES)}")
    return found


def main(argv: list[str]) -> int:
    """Time everything and print the table."""
    options = parse_arguments(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.conversation:
        conversations(options)
        return 0
    print("| tower | type | image | ik ms | reference ms | ratio |\n|---|---|---:|---:|---:|---:|", flush=True)
    for name in options.shapes or SHAPES:
        for type_ in options.types.split(","):
            text, projector = files(options.folder, name, type_)
            for side in map(int, options.sides.split(",")):
                image = noise_file(options.folder, side)
                times: dict[str, list[float]] = defaultdict(list)
                for _ in range(options.repetitions):
                    times["ik"] += time_ours(text, projector, side, options.images, options.threads)
                    if options.reference:
                        program = (options.reference / PROGRAM).resolve()
                        times["reference"] += time_reference(
                            program, text.resolve(), projector.resolve(), image.resolve(), options.images,
                            options.threads
                        )  # fmt: skip
                ours = statistics.median(times["ik"])
                theirs = statistics.median(times["reference"]) if options.reference else 0.0
                cells = [f"{theirs:.0f}", f"{theirs / ours:.2f}"] if theirs else ["-", "-"]
                print(f"| {name} | {type_} | {side} | {ours:.0f} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
