"""Options of sweep-bench, bench and batched-bench."""

# ruff: noqa: RUF009  (`opt` makes dataclass fields)
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ikcli.settings.option import opt
from ikcli.settings.values import (
    parse_int_list,
    parse_pairs,
    parse_text_item,
    parse_thread_pairs,
)

# One partial per topic, with the values that its options share.
_batched_bench = partial(opt, topic="batched-bench", commands="D", bench_list=False)
_bench = partial(opt, topic="bench", commands="B", bench_list=False)
_sweep_bench = partial(opt, topic="sweep-bench", commands="W")


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """sweep-bench: speed at growing context depths."""

    warmup_batch: bool = _sweep_bench(True, "-wb --warmup-batch", "switch", negative="--no-warmup-batch",
        example="--no-warmup-batch", help="also warm up with one full ubatch; --no-warmup turns this off too")
    repetitions: int = _sweep_bench(1, "-nrep --n-repetitions", "int", form="N", example="-nrep 3", minimum=1,
        help="repetitions of the first row")
    stride: int = _sweep_bench(1, "--sweep-stride", "int", form="N", example="--sweep-stride 4", minimum=1,
        help="measure every Nth depth only")
    memory: bool = _sweep_bench(False, "--sweep-memory", "switch", example="--sweep-memory",
        help="add columns with the highest memory use")
    mtp: bool = _sweep_bench(False, "--mtp", "switch", example="--mtp",
        help="add columns for the first layer that predicts further tokens (MTP): a draft of one token after every "
        "generated one")
    output_format: str = _sweep_bench("md", "--output-format", "choice", form="md|table|jsonl|jsonl-full",
        example="--output-format jsonl", choices=("md", "table", "jsonl", "jsonl-full"), help="output format")
    plot: Path | None = _sweep_bench(None, "--plot", "path", form="FILE", example="--plot speed.png",
        help="plot PP and TG over N_KV into this file at the end (.png, .svg, .pdf)")
    max_depth: int = _sweep_bench(0, "--max-depth", "int", form="N", example="--max-depth 8192", minimum=0,
        help="last depth to measure; 0 = whole context")
    start_depth: int = _sweep_bench(0, "--start-depth", "int", form="N", example="--start-depth 4096", minimum=0,
        help="first depth to measure")
    pp: int = _sweep_bench(0, "--pp", "int", form="N", example="--pp 256", minimum=0,
        help="prompt tokens per row; 0 = ubatch")


@dataclass(frozen=True, slots=True)
class BatchedBenchConfig:
    """batched-bench: speed of several sequences at once, for all combinations of the lists."""

    npp: tuple[int, ...] = _batched_bench((512,), "-npp", "custom", form="N[,N...]", example="-npp 128,256,512",
        parse=parse_int_list, help="prompt lengths")
    ntg: tuple[int, ...] = _batched_bench((128,), "-ntg", "custom", form="N[,N...]", example="-ntg 128,256",
        parse=parse_int_list, help="tokens that every sequence generates")
    npl: tuple[int, ...] = _batched_bench((1, 2, 4, 8, 16, 32), "-npl", "custom", form="N[,N...]",
        example="-npl 1,2,4,8,16,32", parse=parse_int_list, help="numbers of sequences")
    shared_prompt: bool = opt(False, "-pps", "switch", topic="batched-bench", commands="D", example="-pps",
        help="share one prompt between all sequences and compute it once")
    output_format: str = opt("md", "--output-format", "choice", topic="batched-bench", commands="D",
        form="md|table|jsonl|jsonl-full", example="--output-format jsonl",
        choices=("md", "table", "jsonl", "jsonl-full"), help="output format")


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """bench: speed of given tests; every option takes a comma-separated list of alternatives."""

    n_prompt: tuple[int, ...] = _bench((512,), "-p --n-prompt", "custom", form="N[,N...]", example="-p 512",
        parse=parse_int_list, help="prompt lengths to test")
    n_gen: tuple[int, ...] = _bench((128,), "-n --n-gen", "custom", form="N[,N...]", example="-n 128",
        parse=parse_int_list, help="generation lengths to test")
    pg: tuple[tuple[int, int], ...] = _bench((), "-pg", "custom", form="P,N", example="-pg 512,128", parse=parse_pairs,
        repeat=True, help="test ppP+tgN: prompt and generation together")
    gp: tuple[tuple[int, int], ...] = _bench((), "-gp", "custom", form="P,N", example="-gp 8192,64", parse=parse_pairs,
        repeat=True, help="test tgN@ppP: generation after a prompt, only generation timed")
    n_depth: tuple[int, ...] = _bench((0,), "-d --n-depth", "custom", form="N[,N...]", example="-d 0,4096",
        parse=parse_int_list, help="tokens in the cache before each test, computed once and not timed")
    repetitions: int = _bench(5, "-r --repetitions", "int", form="N", example="-r 5", help="repetitions of each test")
    warmup: bool = _bench(True, "-w --warmup", "optswitch", example="-w 0", help="warm up before each test")
    output: str = _bench("md", "-o --output", "choice", form="csv|json|jsonl|md|sql", example="-o json",
        choices=("csv", "json", "jsonl", "md", "sql"), help="output format")
    output_err: str = _bench("", "-oe --output-err", "choice", form="csv|json|jsonl|md|sql", example="-oe md",
        choices=("csv", "json", "jsonl", "md", "sql"), help="output format of a second copy of the results on stderr")
    threads_gen_batch: tuple[tuple[int, int], ...] = _bench((), "-tgb --threads-gen-batch", "custom",
        form="G,B[;G,B...]", example="-tgb 4,16", parse=parse_thread_pairs,
        help="pairs of generation and prompt threads")
    compare: tuple[str, ...] = _bench((), "--compare", "custom", form="[NAME=]SIDE",
        example='--compare "-rtr 0" --compare "-rtr 1"', parse=parse_text_item, repeat=True, text=True,
        help="alternate between sides and print ratios to the first one. A side is options for ik bench or a command "
        "(ik sweep-bench, /path/llama-bench); all other options apply to every side. A single side is compared with "
        "them (repeatable)")
    rounds: int = _bench(10, "--rounds", "int", form="N", example="--rounds 20", minimum=2,
        help="with --compare: most runs of every side")
    precision: float = _bench(1.0, "--precision", "float", form="PERCENT", example="--precision 0.5", minimum=0,
        help="with --compare: stop when half of every 95 % interval is below this many percent")
