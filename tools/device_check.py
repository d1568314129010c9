"""Check on a GPU what is open in docs/gpu.md, in order of value and within a time budget.

    python tools/device_check.py --prepare inputs                on any machine: what the checks compare with
    python tools/device_check.py --inputs inputs --seconds 540   on a machine with a GPU; again, to go on
    python tools/device_check.py --list                          the checks, and which of them the budget is enough for

Every check is a process of its own, ended when its time is over. What it found is appended to results.jsonl in the
output folder as soon as it is done, results.md is the table, logs.txt the end of what it printed, and
device_digests.json is a copy of the one in tools/,
where tests of kernels that passed are noted until those kernels change. A second call with the same folder skips what
is done; a check during which everything ended is marked and tried last, once more.

Needed where it runs: the NVIDIA driver; Python 3.11 or newer with numpy, numba, typer, rich, jinja2, tokenizers and
cuda-bindings, and pytest for tests of kernels. compute-sanitizer is used if it is there. Models are made there from
random numbers, in --work (about 15 GB). With --reference DIR, a folder with llama-sweep-bench, that runs in turns with
ik; compare what is on the GPU: its code for the CPU may be slower than a build for that machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from device_checks import CHECKS, LOGITS, MODELS, ROOT, Check, Setup, logits_command, unmet
from device_measure import Package, changed, file_digest, read_digests

PREPARED = "prepared.json"
MOST_PREPARED = 40_000_000  # bytes
DONE = ("ok", "failed")
_LEAST_TIMEOUT, _FACTOR = 60.0, 3.0  # seconds, also for checks that first compile CPU kernels; times the estimate
_LOG = 8000  # characters of what a check printed
Record = dict[str, Any]
Unmet = Callable[[str, Setup], str | None]


@dataclass
class Run:
    """The records of an output folder, and the remaining time."""

    setup: Setup
    checks: Sequence[Check]
    seconds: float
    unmet: Unmet = unmet
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds
        self.results = self.setup.output / "results.jsonl"
        self.running = self.setup.output / "running"
        with suppress(FileNotFoundError):
            self.records = [json.loads(line) for line in self.results.read_text().splitlines()]

    # --- records ------------------------------------------------------------------------------------------------------
    def append(self, record: Record) -> None:
        """Write a record, and the table."""
        self.records.append(record)
        with self.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        (self.setup.output / "results.md").write_text(self.table())

    def mark_died(self) -> None:
        """Mark the check that was running when everything ended."""
        with suppress(FileNotFoundError):
            self.append({"check": self.running.read_text(), "status": "died", "seconds": 0.0})
            self.running.unlink()

    def last(self, check: Check) -> Record | None:
        return next((r for r in reversed(self.records) if r["check"] == check.name), None)

    def table(self) -> str:
        """Return Markdown: the last record of every check, in order, and the checks that remain."""
        lines = ["| check | result | s | found |", "|---|---|---:|---|"]
        for check in self.checks:
            record = self.last(check) or {"status": "not run", "seconds": 0.0}
            found = "<br>".join(filter(None, (record.get("reason"), _short(record.get("values")))))
            lines.append(f"| {check.name} | {record['status']} | {record['seconds']:.0f} | {found} |")
        return "\n".join(lines) + "\n"

    # --- choose -------------------------------------------------------------------------------------------------------
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def todo(self, again: bool = False) -> list[Check]:
        """Return checks without a result by value, then those that hung or died, once more.

        `again`: return all of them.
        """
        first, once_more = [], []
        for check in sorted(self.checks, key=lambda c: -c.value):
            tries = [r["status"] for r in self.records if r["check"] == check.name and r["status"] != "not available"]
            if again or not tries:
                first.append(check)
            elif not any(status in DONE for status in tries) and len(tries) < 2:
                once_more.append(check)
        return first + once_more

    def estimate(self, check: Check) -> float:
        """Estimate the seconds, including the reference and models to be made."""
        missing = sum(MODELS[m].seconds for m in check.models if not self.setup.model(m).exists())
        return check.seconds * (2 if check.reference and self.setup.reference else 1) + missing

    def why_not(self, check: Check) -> str | None:
        return next((reason for need in check.needs if (reason := self.unmet(need, self.setup))), None)

    # --- run ----------------------------------------------------------------------------------------------------------
    def run(self, check: Check) -> Record:
        """Run one check until it ends or its time is over."""
        start, estimate = time.monotonic(), self.estimate(check)
        stop = start + min(max(_LEAST_TIMEOUT, _FACTOR * estimate), self.left())
        target = self.setup.output / "check.json"
        target.unlink(missing_ok=True)
        self.running.write_text(check.name)
        commands = [self.setup.make(m) for m in check.models if not self.setup.model(m).exists()]
        status, output = "ok", ""
        for command in (*commands, check.run(self.setup, target)):
            status, output = _process(command, check.environment, stop - time.monotonic())
            if status != "ok":
                break
        record = {"check": check.name, "status": status, "seconds": round(time.monotonic() - start, 1)}
        with suppress(FileNotFoundError, ValueError):
            record["values"] = json.loads(target.read_text())
        if "values" not in record or status != "ok":
            record["reason"] = _last_line(output)
        with (self.setup.output / "logs.txt").open("a") as log:
            log.write(f"=== {check.name}: {status}\n{output[-_LOG:]}\n")
        target.unlink(missing_ok=True)
        shutil.copy(self.setup.digests, self.setup.output)
        self.running.unlink()
        self.append(record)
        return record

    def all(self, again: bool = False) -> int:
        """Run the checks that there is time for; return 1 if one failed."""
        self.mark_died()
        for check in self.todo(again):
            if reason := self.why_not(check):
                record: Record = {"check": check.name, "status": "not available", "seconds": 0.0, "reason": reason}
                if self.last(check) != record:
                    self.append(record)
            elif self.estimate(check) > self.left():
                print(f"{check.name}: {self.estimate(check):.0f} s, {self.left():.0f} are left", flush=True)
                continue
            else:
                record = self.run(check)
            print(f"{check.name}: {record['status']} {record.get('reason', '')}", flush=True)
        print(self.table())
        own = [self.last(check) for check in self.checks]
        return 1 if any(r and r["status"] not in ("ok", "not available") for r in own) else 0

    def list(self, again: bool = False) -> Iterator[str]:
        """Return a line per check: its seconds, and whether the budget suffices."""
        left, todo = self.seconds, self.todo(again)
        for check in [*todo, *(c for c in self.checks if c not in todo)]:
            seconds, record = self.estimate(check), self.last(check)
            if check not in todo and record is not None:
                what = f"done: {record['status']}"
            elif reason := self.why_not(check):
                what = f"not available: {reason}"
            elif seconds <= left:
                left -= seconds
                what = "runs"
            else:
                what = "no time"
            yield f"{check.name:44} {seconds:4.0f} s  {what}"


def _process(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[str, str]:
    """Return status and output of a command; it ends with all its children when its time is over."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            child = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                     env={**os.environ, "PYTHONPATH": path, **environment})  # fmt: skip
        except OSError as e:
            return "failed", str(e)
        try:
            code = child.wait(max(timeout, 0.0))
            status, note = ("failed", f"exit code {code}\n") if code else ("ok", "")
        except subprocess.TimeoutExpired:
            status, note = "timeout", f"ended after {timeout:.0f} s\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return status, note + output.read()


def _last_line(output: str) -> str:
    """Return the last line of output, after the exit status of a process that failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    how = lines[:1] if lines and lines[0].startswith(("exit code", "ended after")) else []
    return ": ".join(dict.fromkeys([*how, *lines[-1:]]))[:300]


def _short(values: Any) -> str:
    """Summarize the result of a check in a cell of a table."""
    if isinstance(values, dict) and isinstance(values.get("records"), list):
        values = [{k: v for k, v in r.items() if k in ("case", "us", "ms", "GB_s", "T_s", "ratio", "ok")}
                  for r in values["records"]]  # fmt: skip
    if isinstance(values, list) and values and "program" in values[0]:
        rows = {(v["n_kv"], v["program"]): v for v in values}
        return "<br>".join(_sweep_row(n, rows) for n in dict.fromkeys(n for n, _ in rows))
    if isinstance(values, list):
        return "<br>".join(_short(v) for v in values)
    if isinstance(values, dict):
        return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
    return "" if values is None else str(values)


def _sweep_row(n_kv: int, rows: Mapping[tuple[int, str], Mapping[str, float]]) -> str:
    """Return the speeds at a depth, with the ratio to the reference where it ran."""
    mine, other = rows[n_kv, "ik"], rows.get((n_kv, "reference"))
    cells = [
        f"{x} {mine[x]:.4g}" + (f" ({mine[x] / other[x]:.2f})" if other and other[x] else "") for x in ("pp", "tg")
    ]
    return f"N_KV {n_kv}: {', '.join(cells)}"


def prepare(folder: Path, cases: Sequence[str] = tuple(LOGITS)) -> int:
    """Write the inputs of the checks; return their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        setup = Setup(folder, Path(work), inputs=folder)
        digests: dict[str, str] = {}
        for case in cases:
            model = LOGITS[case][0]
            commands = [] if setup.model(model).exists() else [setup.make(model)]
            for command in (*commands, logits_command("expect", case, setup, Path(work) / "check.json", 0)):
                status, output = _process(command, {}, 600)
                if status != "ok":
                    raise SystemExit(f"error: the logits of {case} were not made: {output[-1000:]}")
            digests[model] = file_digest(setup.model(model))
    (folder / PREPARED).write_text(json.dumps({
        "models": digests, "kernels": Package.installed().files, "passed": read_digests(), "changed": changed(),
        "checks": [{"name": c.name, "seconds": c.seconds, "models": c.models, "needs": c.needs} for c in CHECKS],
    }, indent=1))  # fmt: skip
    n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if n_bytes > MOST_PREPARED:
        raise SystemExit(f"error: {folder} has {n_bytes / 1e6:.0f} MB, more than {MOST_PREPARED / 1e6:.0f}")
    return n_bytes


def _chosen(names: Sequence[str], checks: Sequence[Check], parser: argparse.ArgumentParser) -> list[Check]:
    for name in names:
        if not any(name in (c.name, c.item) for c in checks):
            parser.error(f"check {name} does not exist; --list shows all")
    return [c for c in checks if not names or c.name in names or c.item in names]


def main(argv: Sequence[str], checks: Sequence[Check] = CHECKS, unmet: Unmet = unmet) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540, help="of all checks together (default: %(default)g)")
    parser.add_argument("-o", "--output", type=Path, default=Path("device-check"), help="default: %(default)s")
    parser.add_argument("--inputs", type=Path, metavar="DIR", help="what --prepare wrote")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="write what is compared with, and stop; no GPU")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="folder with llama-sweep-bench")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ik-device-check", metavar="DIR",
                        help="where models are made, and stay (default: %(default)s)")  # fmt: skip
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a check or an item, done or not")
    parser.add_argument("--list", action="store_true", help="print the checks and what the budget is enough for")
    parser.add_argument("--trial", action="store_true", help="smallest shapes on the CPU: are the commands right?")
    args = parser.parse_args(argv)
    if args.prepare is not None:
        print(f"{args.prepare}: {prepare(args.prepare) / 1e6:.2f} MB")
        return 0
    if args.reference is not None and not (args.reference / "llama-sweep-bench").is_file():
        parser.error(f"{args.reference} has no llama-sweep-bench")
    if args.inputs is not None and not (args.inputs / PREPARED).is_file():
        parser.error(f"there is no {PREPARED} in {args.inputs}; write it with --prepare")
    chosen = _chosen(args.only, checks, parser)
    inputs, reference = (p and p.resolve() for p in (args.inputs, args.reference))
    setup = Setup(args.output.resolve(), args.work.resolve(), inputs, reference, args.trial)
    run = Run(setup, chosen, args.seconds, unmet)
    if args.list:
        print("\n".join(run.list(bool(args.only))))
        return 0
    setup.output.mkdir(parents=True, exist_ok=True)
    setup.work.mkdir(parents=True, exist_ok=True)
    return run.all(bool(args.only))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
