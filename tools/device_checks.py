"""The checks of tools/device_check.py, by value: the items of docs/gpu.md as commands for a machine with a GPU.

A name is an item of that list, or `ITEM/CASE`. Seconds are estimates for an H100 with 16 cores, without the reference.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import device_measure

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
BENCH = (PYTHON, str(ROOT / "benchmarks" / "gpu.py"))
SWEEP = (PYTHON, str(ROOT / "benchmarks" / "compare_reference.py"))
MEASURE = (PYTHON, str(ROOT / "tools" / "device_measure.py"))
MAKE = (PYTHON, str(ROOT / "tools" / "make_random_model.py"))
# On a GPU the available reference multiplies single rows of q8_0 and iq4_k only. In a deepseek2 file of 26 or 27 layers
# it expects no low-rank queries.
_PLAIN = ("--custom-q", "ffn_down=q8_0,output=q8_0,token_embd=q8_0,attn_k_b=q8_0,attn_v_b=q8_0")
_RESIDENT_Q8_0 = ("--custom-q", r"attn=q8_0,shexp=q8_0,ffn_(up|gate|down)\.weight=q8_0,ffn_down=q8_0,output=q8_0,"
                  "token_embd=q8_0")  # fmt: skip
_TRIAL = ("--layers", "2", "--experts", "4", "--vocab", "600")
_SMALL_SHARED = 110_000  # bytes per block of GPUs with less shared memory (RTX 30, 40, 50)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options of tools/make_random_model.py, and the seconds that it takes."""

    options: tuple[str, ...]
    seconds: float


def _recipe(preset: str, type_: str, seconds: float, *more: str) -> Recipe:
    return Recipe(("--preset", preset, "--type", type_, *more), seconds)


MODELS: Mapping[str, Recipe] = {
    "lite-iq4_k": _recipe("deepseek2", "IQ4_K", 30, "--layers", "24", "--experts", "16", *_PLAIN),
    "lite-q8_0": _recipe("deepseek2", "Q8_0", 20, "--layers", "24", "--experts", "16"),
    "lite-experts": _recipe("deepseek2", "Q4_K_M", 15, "--layers", "8", "--experts", "64", *_RESIDENT_Q8_0),
    "windows": _recipe("gemma3", "Q8_0", 6),
    "indexer": _recipe("glm-dsa", "Q8_0", 20),
    "entries": _recipe("deepseek4", "Q8_0", 25),
    "learned-rows": _recipe("openpangu", "Q8_0", 15),
    "dense": _recipe("qwen3", "Q8_0", 4),
    "moe": _recipe("qwen3moe", "Q8_0", 4),
    **{f"small-{p}": _recipe(p, "Q4_K_M", 1, *_TRIAL) for p in ("deepseek2", "qwen3", "qwen3moe")},
    "small-openpangu": _recipe("openpangu", "Q8_0", 3, "--layers", "3", *_TRIAL[2:]),
    "small-gemma3": _recipe("gemma3", "Q8_0", 2, "--layers", "6", "--vocab", "600"),
}
"""Models that are made where the checks run: no file travels."""

LOGITS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "mla3": ("small-deepseek2", ("-mla", "3")),
    "mla2-q8_0": ("small-deepseek2", ("-mla", "2", "-ctk", "q8_0")),
    "mla3-experts-on-cpu": ("small-deepseek2", ("-mla", "3", "-ot", "exps=CPU")),
    "dense": ("small-qwen3", ()),
    "experts": ("small-qwen3moe", ()),
    "windows": ("small-gemma3", ()),
    "streams": ("small-openpangu", ()),
}
"""Cases of `logits`: a model and options of the run."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Where the files are, and how much to try."""

    output: Path
    work: Path  # models
    inputs: Path | None = None  # written by --prepare
    reference: Path | None = None
    trial: bool = False  # smallest shapes, on the CPU
    ik: str = f"{PYTHON} -m ikcli"
    digests: Path = device_measure.DIGESTS

    def model(self, name: str) -> Path:
        return self.work / f"{'trial-' if self.trial else ''}{name}.gguf"

    def make(self, name: str) -> list[str]:
        """Return the command that makes a model."""
        trial = _TRIAL if self.trial and not name.startswith("small-") else ()
        return [*MAKE, *MODELS[name].options, *trial, "-o", str(self.model(name))]

    def expected(self, case: str) -> Path:
        return (self.inputs or self.output) / f"logits-{case}.npz"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `run` makes its command, which writes its result to the given JSON file."""

    name: str
    value: int  # the most valuable first
    seconds: float
    run: Callable[[Setup, Path], list[str]]
    models: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("gpu",)
    environment: Mapping[str, str] = field(default_factory=dict)
    reference: bool = False  # a sweep, alternating with the reference, which doubles its time

    @property
    def item(self) -> str:
        """Return the item of docs/gpu.md."""
        return self.name.partition("/")[0]


def unmet(need: str, setup: Setup) -> str | None:
    """Return why a check cannot run here, or None."""
    if need == "gpu" or (need == "gpu or trial" and not setup.trial):
        return device_measure.driver.why_none()
    if need == "gpu or trial":
        return None
    if need == "small-shared":
        reason = device_measure.driver.why_none()
        limit = 0 if reason else device_measure.driver.devices()[0].shared_limit
        return reason or (f"this GPU has {limit} bytes of shared memory per block" if limit > _SMALL_SHARED else None)
    kind, _, what = need.partition(":")
    if kind == "program":
        return None if shutil.which(what) else f"{what} is not on this machine"
    if kind == "logits":
        return None if setup.expected(what).is_file() else "no logits to compare with: --inputs of --prepare"
    assert kind == "changed", need
    return None if what in device_measure.changed(path=setup.digests) else "no kernel changed since it passed"


def _sweep(model: str, *options: str, n_ctx: int = 33280, ub: int = 512, stride: int = 16, mla: str = "3",
           alone: bool = False) -> Callable[[Setup, Path], list[str]]:  # fmt: skip
    """Return a command that alternates between both sweep-benches; N_KV in steps of `stride` micro-batches.

    `alone`: the reference cannot run the model.
    """

    def run(setup: Setup, target: Path) -> list[str]:
        command = [*SWEEP, str(setup.model(model)), "--ik", setup.ik, "--json", str(target), "-r", "1",
                   "--mla", mla]  # fmt: skip
        if setup.reference is not None and not alone:
            command += ["--reference", str(setup.reference)]
        if setup.trial:
            small = ("-ngl", "0", "-n", "2", "-b", "32")
            return [*command, "-t", "2", "-c", "96", "-ub", "32", "--", *small, *options]
        shape = ("-ngl", "99", "-n", "32", "-b", str(max(ub, 2048)), "--sweep-stride", str(stride))
        return [*command, "-t", "16", "-c", str(n_ctx), "-ub", str(ub), "--", *shape, *options]

    return run


def _timed(name: str, value: int, seconds: float, model: str, *options: str, **shape: Any) -> Check:
    """Return a sweep of a model."""
    run = _sweep(model, *options, **shape)
    return Check(name, value, seconds, run, (model,), ("gpu or trial",), reference=True)


def _bench(*options: str) -> Callable[[Setup, Path], list[str]]:
    """Return benchmarks/gpu.py; its ratios need the peaks of `roof`."""

    def run(setup: Setup, target: Path) -> list[str]:
        tiny = ["--tiny"] if setup.trial else []
        return [*BENCH, "--json", str(target), "--seconds", "0.02", *tiny, *options]

    return run


def _measure(what: str, model: str, *options: str, trial: Sequence[str] = ("-c", "256", "-ub", "64")
             ) -> Callable[[Setup, Path], list[str]]:  # fmt: skip
    def run(setup: Setup, target: Path) -> list[str]:
        small = [*trial, "-t", "2"] if setup.trial else ["-t", "16"]
        return [*MEASURE, what, "--json", str(target), "--", "-m", str(setup.model(model)), "-ngl", "99", *options,
                *small]  # fmt: skip

    return run


def logits_command(what: str, case: str, setup: Setup, target: Path, layers: int) -> list[str]:
    """Return the command that writes (`expect`) or compares the logits of a case."""
    model, options = LOGITS[case]
    return [*MEASURE, what, "--json", str(target), "--expected", str(setup.expected(case)), "--", "-m",
            str(setup.model(model)), "-c", "64", "-ngl", str(layers), *options]  # fmt: skip


def _logits(case: str) -> Check:
    def run(setup: Setup, target: Path) -> list[str]:
        return logits_command("logits", case, setup, target, 0 if setup.trial else 99)

    return Check(f"logits/{case}", 95, 8, run, (LOGITS[case][0],), ("gpu or trial", f"logits:{case}"))


def _tests(name: str, seconds: float) -> Check:
    """Return the tests of kernels that changed since they passed on a GPU."""

    def run(setup: Setup, target: Path) -> list[str]:
        return [*MEASURE, "tests", "--file", name, "--json", str(target), "--digests", str(setup.digests)]

    return Check(f"kernels/{name.removesuffix('.py')}", 40, seconds, run, (), ("gpu", f"changed:{name}"))


def _sanitizer(tool: str, name: str, chosen: str) -> Check:
    def run(setup: Setup, target: Path) -> list[str]:
        return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", PYTHON, "-m", "pytest", "-o", "addopts=",
                "-p", "no:cacheprovider", "-m", "not slow", "-q", "-x", str(ROOT / "tests" / name), "-k",
                chosen]  # fmt: skip

    return Check(f"sanitizer/{tool}-{name.removeprefix('test_cuda_').removesuffix('.py')}", 50, 45, run, (),
                 ("gpu", "program:compute-sanitizer"), device_measure.ON_GPU)  # fmt: skip


_SANITIZED = {
    "test_cuda_attention_kv.py": "store or rows",
    "test_cuda_layers_moe.py": "route or sort",
    "test_cuda_weights_moe.py": "q4_K or q8_0",
}
_TEST_SECONDS = {"test_cuda_attention.py": 45.0, "test_cuda_weights.py": 60.0}

CHECKS: tuple[Check, ...] = (
    Check("start", 100, 25, _bench("--only", "load,basic,launch,handover")),
    *map(_logits, LOGITS),
    *(
        _timed(f"mla/{weights}-{cache}-mla{mla}", 92 - (mla == "2"), 25, f"lite-{weights}", "-ctk", cache, mla=mla)
        for mla in ("3", "2")
        for weights in ("iq4_k", "q8_0")
        for cache in ("f16", "q8_0")
    ),
    Check("exps-cpu/turns", 85, 60, _measure("turns", "lite-experts", "-c", "2048", "-ub", "512", "-ot", "exps=CPU"),
          ("lite-experts",)),
    *(
        Check(f"streamed/{name}", 84, 40, _measure("stream", "lite-experts", "-c", "4096", "-ub", "4096", "-b", "4096",
              "-ot", "exps=CPU", *more), ("lite-experts",))
        for name, more in (("plain", ()), ("rtr", ("-rtr",)))
    ),
    Check("streamed/rows", 84, 10, _bench("--only", "upload")),
    *(
        _timed(f"exps-cpu/ub{ub}", 83, 40, "lite-experts", "-ot", "exps=CPU", n_ctx=8192, ub=ub, stride=4096 // ub)
        for ub in (512, 4096)
    ),
    Check("window/kernels", 70, 15, _bench("--only", "roof,window")),
    _timed("window/model", 69, 20, "windows"),
    *(
        Check(f"sparse/{name}", 68, 60, _sweep("indexer", *more, n_ctx=66560, ub=2048, stride=8, alone=True),
              ("indexer",), ("gpu or trial",))
        for name, more in (("chosen", ("--dsa",)), ("all", ("--no-dsa",)))
    ),
    *(
        Check(f"streams/{name}", 67, 60, _sweep(name, n_ctx=33792, ub=2048, stride=4, alone=True), (name,),
              ("gpu or trial",))
        for name in ("entries", "learned-rows")
    ),
    Check("memory", 60, 40, _measure("memory", "lite-q8_0", "-c", "33280", "-ub", "512"), ("lite-q8_0",)),
    *(_sanitizer(tool, name, chosen) for tool in ("memcheck", "racecheck") for name, chosen in _SANITIZED.items()),
    *(_tests(name, _TEST_SECONDS.get(name, 25.0)) for name in device_measure.test_files()),
    Check("mla-floor", 35, 25, _bench("--only", "roof,mla")),
    Check("gqa", 34, 20, _bench("--only", "roof,gqa")),
    Check("prompts", 33, 15, _bench("--only", "roof,prefill")),
    Check("independent", 32, 40, _bench("--only", "roof,attention", "--batch-invariant", "--cells", "131072")),
    Check("matvec", 31, 30, _bench("--only", "roof,matvec")),
    _timed("families/dense", 25, 15, "dense", n_ctx=16896),
    _timed("families/moe", 24, 15, "moe", n_ctx=16896),
    Check("less-shared-memory", 10, 60, _bench("--only", "roof,attention,matmul"), (), ("small-shared",)),
)  # fmt: skip
