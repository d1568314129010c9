#!/usr/bin/env python3
"""Keep a program alive with its cache filled, and time prompts and generation whenever it is asked.

Two programs that take turns this way, every second or so, see the same machine; runs of their own, each of which loads
the model and fills the cache, are minutes apart. `benchmarks/families.py --alive` uses it. As a script, this is the
program of `ik`; `alive_reference.cpp` is that of ik_llama.cpp. Both take the options of sweep-bench, print `ready`, and
answer each line of standard input by a line:

    fill N FILE   make N positions valid: read from FILE, otherwise decoded and written to it; answers N
    pp N          decode a prompt of N tokens behind them; answers the seconds
    tg N          generate N tokens behind them, one by one; answers the seconds
"""

from __future__ import annotations

import functools
import os
import pickle
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from compare_reference import PROGRAM, NoTable

from ikcli.bench.sweep import Sweep, params_of
from ikcli.cli.app import checked
from ikcli.cli.parser import parse
from ikcli.engine.run.opening import open_session
from ikcli.files import written_whole
from ikcli.measure.protocol import SessionLike

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "alive_reference.cpp"


@functools.cache
def compile_reference(folder: Path, target: Path) -> Path:
    """Compile the program of the reference against the build that has its sweep-bench in `folder`."""
    build = folder.resolve().parent
    cache = (build / "CMakeCache.txt").read_text()
    source = Path(next(s.partition("=")[2] for s in cache.splitlines() if s.startswith("CMAKE_HOME_DIRECTORY:")))
    headers = [f"-I{source / name}" for name in ("include", "ggml/include", "common", "src")]
    libraries = [build / "src" / "libllama.so", build / "ggml" / "src" / "libggml.so"]
    command = ["g++", "-O2", "-std=c++17", "-w", *headers, str(SOURCE), str(build / "common" / "libcommon.a"),
               *map(str, libraries), *(f"-Wl,-rpath,{path.parent}" for path in libraries), "-pthread", "-o",
               str(target)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {SOURCE.name} does not compile against {build}, where {PROGRAM} was built as a shared "
                 f"library\n{done.stderr[-2000:]}")  # fmt: skip
    return target


class Alive:
    """A running program; use it as a context manager."""

    def __init__(self, command: list[str], variables: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._open = ExitStack()
        self._log = self._open.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115  (the stack closes it)
        started = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, **(variables or {})},
        )  # fmt: skip
        self._process = self._open.enter_context(started)  # closing it ends its input, and waits

    def __enter__(self) -> Alive:
        self._answer("ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _answer(self, first: str) -> str:
        """Return the words behind `first` in the next line that begins with it; other lines are the program's log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == first:
                return rest
        raise self._ended()

    def _ended(self) -> NoTable:
        code = self._process.wait()
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-10:])
        self._open.close()
        return NoTable(f"{shlex.join(self._command)} ended (exit code {code})\n{tail}")

    def ask(self, line: str) -> float:
        """Send a line and return the number that answers it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return float(self._answer("answer"))

    def speeds(self, pp: int, tg: int) -> tuple[float, float]:
        """Return the tokens per second of a prompt and of generation behind the valid positions."""
        return pp / self.ask(f"pp {pp}"), tg / self.ask(f"tg {tg}")


class _Program:
    """Answers for a session of `ik`, by the steps of its sweep-bench."""

    def __init__(self, session: SessionLike, sweep: Sweep) -> None:
        self._session, self._sweep = session, sweep
        self._filled = 0

    def fill(self, n: int, path: Path) -> float:
        """Make n positions valid."""
        sequences = self._session.sequences  # type: ignore[attr-defined]
        self._session.clear()
        if path.exists():
            sequences.load(0, pickle.loads(path.read_bytes()))
        else:
            self._sweep.decode(self._sweep.tokens(n), 0)
            self._session.checkpoint(0)
            with written_whole(path) as temporary:
                temporary.write_bytes(pickle.dumps(sequences.save(0, n)))
        self._filled = n
        return n

    def pp(self, n: int) -> float:
        return self._seconds(lambda: self._sweep.decode(self._sweep.tokens(n), self._filled))

    def tg(self, n: int) -> float:
        return self._seconds(lambda: self._sweep.generate(self._filled, n))

    def _seconds(self, work: Callable[[], None]) -> float:
        self._sweep.forget(self._filled)
        started = time.perf_counter()
        work()
        return time.perf_counter() - started


def main(argv: list[str]) -> int:
    """Answer lines until standard input ends."""
    startup = checked(parse("sweep-bench", argv))
    with closing(open_session(startup.config, planner=startup.planner)) as session:
        sweep = Sweep(session, params_of(startup.config, session.n_ubatch))
        sweep.warm_up()
        program = _Program(session, sweep)
        print("ready", flush=True)
        answers: dict[str, Callable[..., float]] = {
            "fill": lambda n, path: program.fill(int(n), Path(path)),
            "pp": lambda n: program.pp(int(n)),
            "tg": lambda n: program.tg(int(n)),
        }
        for line in sys.stdin:
            name, *words = line.split()
            print("answer", answers[name](*words), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
