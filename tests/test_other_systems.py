"""What Windows and macOS lack: modules can be imported without it, the CPU path runs, and what does not run says so."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ikcli import system_files
from ikcli.settings.run import default_model

ROOT = Path(__file__).resolve().parents[1]
# Python as on Windows: the standard library is imported first, since on this system it needs what is taken away.
WITHOUT = """
import asyncio, builtins, concurrent.futures, ctypes, http.server, logging.handlers, mmap, multiprocessing, os, shutil
import signal, socket, socketserver, subprocess, sys, tempfile, uuid
import fastapi, huggingface_hub, numpy, PIL.Image, prompt_toolkit, rich.console, tokenizers, typer, uvicorn

POSIX = {"fcntl", "termios", "tty", "pty", "resource", "pwd", "grp", "syslog", "readline"}
usual = builtins.__import__

def imported(name, globals=None, locals=None, fromlist=(), level=0):
    if name in POSIX and (globals or {}).get("__name__", "").startswith("ikcli"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return usual(name, globals, locals, fromlist, level)

builtins.__import__ = imported
usage = shutil.disk_usage(".")
shutil.disk_usage = lambda path: usage
unix, pair = socket.AF_UNIX, socket.socketpair
socket.socketpair = lambda *args: pair(unix)
LACKING = {
    os: "pread preadv pwrite pwritev readv writev statvfs fstatvfs sched_getaffinity sched_setaffinity sched_yield "
        "sysconf posix_fadvise posix_fallocate getuid geteuid getgid getloadavg fork forkpty setsid killpg getpgrp "
        "tcgetpgrp nice mkfifo fchmod fchown chown O_DIRECT O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY wait3 wait4",
    signal: "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGQUIT SIGWINCH SIGCHLD SIGALRM setitimer pthread_kill pthread_sigmask",
    socket: "AF_UNIX SO_REUSEPORT",
    mmap: "MADV_DONTNEED MADV_WILLNEED MADV_HUGEPAGE MADV_SEQUENTIAL MAP_PRIVATE MAP_SHARED PROT_READ",
}
for module, names in LACKING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""
IMPORT = """
import pkgutil, importlib, ikcli
names = [m.name for m in pkgutil.walk_packages(ikcli.__path__, "ikcli.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
RUN = """
from ikcli.main import main
sys.argv = ["ik", *sys.argv[1:]]
main()
"""
REFUSALS = """
from pathlib import Path
from ikcli.errors import UsageError
from ikcli.server.front.child import Child
from ikcli.server.http.server import listen
for call in (lambda: listen("x.sock", 0), lambda: Child("m", [], Path("x.sock"), grace=1, prefix=False)):
    try:
        call()
    except UsageError as e:
        print(e)
listen("127.0.0.1", 0).close()
"""


def run(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT + code, *argv]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow("imports every module in a process of its own")
def test_every_module_is_imported_without_posix() -> None:
    found = run(IMPORT)
    assert found.returncode == 0 and int(found.stdout) > 500, found.stderr[-2000:]


@pytest.mark.slow("runs the bundled model in a process of its own")
@pytest.mark.parametrize(
    "argv",
    [
        ["chat", "-p", "Once upon", "-n", "4", "--temp", "0"],
        ["plan"],
        ["quantize", "--dry-run", "MODEL", "Q8_0"],
    ],
    ids=lambda argv: argv[0],
)
def test_the_cpu_path_runs_without_posix(argv: list[str]) -> None:
    found = run(RUN, *[str(default_model()) if word == "MODEL" else word for word in argv])
    assert found.returncode == 0 and found.stdout, found.stderr[-2000:]


@pytest.mark.slow("imports the server in a process of its own")
def test_what_cannot_run_says_so() -> None:
    found = run(REFUSALS)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines() == [
        "--host x.sock: this system has no Unix sockets; name an address such as 127.0.0.1",
        "this system cannot run several models or replicas behind one port; start one `ik serve` for each",
    ]


def test_reads_at_an_offset_without_the_call_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    data = bytes(i % 251 for i in range(50_000))
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        for name in ("preadv", "pread"):
            assert system_files.read_at(fd, 10, 49_995) == data[49_995:]
            monkeypatch.delattr(os, name)
            into = bytearray(700)
            assert system_files.read_into(fd, memoryview(into), 1234) == 700 and into == data[1234:1934]
            assert system_files.read_into(fd, memoryview(into), len(data)) == 0
        wrong: list[int] = []

        def reader(first: int) -> None:
            wrong.extend(i for i in range(first, 40_000, 97) if system_files.read_at(fd, 33, i) != data[i : i + 33])

        threads = [threading.Thread(target=reader, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert wrong == []
    finally:
        os.close(fd)


def test_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        assert system_files.lock(first)
        assert not system_files.lock(second, wait=False)
        monkeypatch.setattr(system_files, "fcntl", None)
        assert system_files.lock(second, wait=False) and system_files.lock_byte(second, 3)
        system_files.unlock_byte(second, 3)
