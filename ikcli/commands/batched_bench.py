"""`ik batched-bench`: rows on stdout as they are measured, logs on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from ikcli.bench import batched as batched_bench
from ikcli.bench.batched import BatchedRow
from ikcli.bench.environment import describe
from ikcli.cli.parser import ModelRun
from ikcli.commands._sweep_table import settings_dict, write_head, write_line
from ikcli.engine.plan.bench_cases import batched_tests
from ikcli.engine.plan.sizes import batched_session
from ikcli.engine.run.opening import open_session
from ikcli.log import warn
from ikcli.settings.run import RunConfig

_COLUMNS = (("PP", 6), ("TG", 6), ("B", 4), ("N_KV", 6), ("T_PP s", 8), ("S_PP t/s", 8), ("T_TG s", 8),
            ("S_TG t/s", 8), ("T s", 8), ("S t/s", 8))  # fmt: skip


def run(run: ModelRun) -> int:
    """Measure and print; return 130 after Ctrl-C."""
    tests = batched_tests(run.config)
    for t in tests.left_out:
        warn(f"PP {t.pp}, TG {t.tg}, B {t.pl} needs {t.n_kv} tokens, -c has {tests.n_kv_max}: left out")
    config, sizes = batched_session(run.config)
    opened = open_session(config, n_ctx=sizes.n_ctx, n_seq_max=sizes.n_seq, n_step=sizes.n_step, planner=run.planner)
    try:
        with closing(opened) as session:
            if config.warmup:
                batched_bench.warm_up(session)
            printer = BatchedPrinter(session.config, tests.n_kv_max, session.n_batch, session.n_ubatch)
            printer.header(lambda: {**settings_dict(session.config), **describe(session)})
            batched_bench.run(session, tests.fitting, seed=max(1, config.seed), on_row=printer.row)
    except KeyboardInterrupt:
        return 130
    return 0


class BatchedPrinter:
    """Writes header and rows to stdout, flushed line by line."""

    def __init__(self, config: RunConfig, n_kv_max: int, n_batch: int, n_ubatch: int) -> None:
        self._json = config.batched.output_format.startswith("jsonl")
        self._full = config.batched.output_format == "jsonl-full"
        self._settings = {
            "n_kv_max": n_kv_max,
            "n_batch": n_batch,
            "n_ubatch": n_ubatch,
            "flash_attn": int(config.flash_attn),
            "is_pp_shared": int(config.batched.shared_prompt),
            "n_gpu_layers": -1 if config.n_gpu_layers is None else config.n_gpu_layers,
            "n_threads": config.n_threads,
            "n_threads_batch": config.n_threads_batch,
        }

    def header(self, config: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Print what precedes the rows: names of columns, or with jsonl-full the settings of `config`."""
        if self._full:
            write_line(json.dumps({"config": config()}))
        if self._json:
            return
        write_head(self._settings, _COLUMNS)

    def row(self, row: BatchedRow) -> None:
        """Print one measured test."""
        t = row.test
        if not self._json:
            write_line(
                f"|{t.pp:6d} | {t.tg:6d} | {t.pl:4d} | {t.n_kv:6d} | {row.t_pp:8.3f} | {row.speed_pp:8.2f} | "
                f"{row.t_tg:8.3f} | {row.speed_tg:8.2f} | {row.t:8.3f} | {row.speed:8.2f} |"
            )
            return
        counts = {**self._settings, "pp": t.pp, "tg": t.tg, "pl": t.pl, "n_kv": t.n_kv}
        values = {"t_pp": row.t_pp, "speed_pp": row.speed_pp, "t_tg": row.t_tg, "speed_tg": row.speed_tg, "t": row.t,
                  "speed": row.speed}  # fmt: skip
        fields = [f'"{k}": {v}' for k, v in counts.items()] + [f'"{k}": {v:f}' for k, v in values.items()]
        write_line("{" + ", ".join(fields) + " }")
