#!/usr/bin/env python3
"""Record what a coding agent sends to its model, and replay several sessions in turns against servers.

    python benchmarks/agent.py record FILE --folder PROJECT -- qwen --auth-type openai --openai-base-url {url} \\
        --openai-api-key x -m m -y -p {task}
    python benchmarks/agent.py replay FILE -m MODEL -cram MIB [--before COMMAND] [--reference DIR] -t N [-- OPTIONS]

record: runs the agent once per session, one after the other, in PROJECT. The model is a script that speaks the chat
completions API: it calls the agent's tool for reading files, every session on other files, and ends after `--turns`
calls. Everything else is the agent's own: system prompt, tools, what it adds to tasks and results. Each line of FILE is
a request with the number of its session.

replay: sends request 1 of every session, then request 2 of every session, and so on, to a server with one slot, as
several agents that share a server do. All servers get the same token ids: the template and the vocabulary of --words
(the demo model) make them from the recording, so MODEL may have random weights; its vocabulary must be as large. Each
server starts new for each run, in turns. The table has the prompt tokens that were computed, by the servers' own
timings, beside the distinct ones (positions of all prompts, those of common beginnings counted once), and the seconds
for all requests. The ratio is that of another server's seconds to those of ik.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from extra_options import parse_with_extra
from serve import DEMO, PROGRAM, server

_MOST = 12_000  # bytes of files that the script reads; agents cut longer ones
_TASK = "Read the files of part {} of this project, one after the other, and say what they do."


# --- record -----------------------------------------------------------------------------------------------------------
def call_of(tools: Sequence[Mapping[str, Any]], file: Path) -> tuple[str, dict[str, str]]:
    """Return name and arguments of the call that reads a file. Raise SystemExit if no tool does."""
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters", {})
        paths = [name for name in schema.get("required", ()) if "path" in name.lower()]
        if "read" in function["name"].lower() and len(paths) == 1 == len(schema["required"]):
            return function["name"], {paths[0]: str(file)}
    sys.exit(f"error: none of the agent's tools reads a file: {[tool['function']['name'] for tool in tools]}")


def scripted(body: Mapping[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """Return the message that answers a request: it reads the next of these files, or ends."""
    n_done = sum(message["role"] == "tool" for message in body["messages"])
    if not body.get("tools") or n_done >= len(files):
        return {"role": "assistant", "content": "Done."}
    name, arguments = call_of(body["tools"], files[n_done])
    function = {"name": name, "arguments": json.dumps(arguments)}
    text = f"I read file {n_done + 1} of {len(files)}."
    call = {"index": 0, "id": f"call_{n_done}", "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


class Recorder:
    """A server with the scripted model; `begin` says whose requests are written from now on."""

    def __init__(self, out: Any) -> None:
        self._out, self._session, self._files, self.n = out, 0, list[Path](), 0
        self._lock = threading.Lock()

    def begin(self, session: int, files: Sequence[Path]) -> None:
        """Record session `session`, in which these files are read."""
        self._session, self._files = session, list(files)

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write a request; return the message that answers it."""
        with self._lock:
            kept = {name: body[name] for name in ("messages", "tools") if name in body}
            self._out.write(json.dumps({"session": self._session, **kept}) + "\n")
            self.n += 1
        return scripted(body, self._files)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve on a free port; yield the base URL."""
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send("application/json", json.dumps({"object": "list", "data": [{"id": "m"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                message = recorder.answer(body)
                kind = "text/event-stream" if body.get("stream") else "application/json"
                self._send(kind, completion(message, stream=bool(body.get("stream"))))

            def _send(self, kind: str, data: bytes) -> None:
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
            threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
            try:
                yield f"http://127.0.0.1:{httpd.server_port}/v1"
            finally:
                httpd.shutdown()


def completion(message: Mapping[str, Any], *, stream: bool) -> bytes:
    """Return a chat completion, or the events of one."""
    end = "tool_calls" if "tool_calls" in message else "stop"
    about = {
        "id": "x",
        "created": 1,
        "model": "m",
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    if not stream:
        choice = {"index": 0, "message": message, "finish_reason": end}
        return json.dumps({"object": "chat.completion", "choices": [choice], **about}).encode()
    events = []
    for delta, reason in ((message, None), ({}, end)):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        events.append(json.dumps({"object": "chat.completion.chunk", "choices": [choice], **about}))
    return b"".join(b"data: %s\n\n" % event.encode() for event in (*events, "[DONE]"))


def record(arguments: Namespace) -> int:
    """Run the agent once per session."""
    folder = arguments.folder.resolve()
    found = sorted(
        path for path in folder.rglob("*")
        if path.is_file() and 0 < path.stat().st_size <= _MOST and not any(part.startswith(".") for part in path.parts)
    )  # fmt: skip
    if len(found) < arguments.sessions * arguments.turns:
        sys.exit(f"error: {folder} has {len(found)} files; {arguments.sessions * arguments.turns} are needed")
    with arguments.file.open("w", encoding="utf-8") as out:
        recorder = Recorder(out)
        with recorder.serving() as url:
            for i in range(arguments.sessions):
                before = recorder.n
                recorder.begin(i, found[i :: arguments.sessions][: arguments.turns])
                words = {"url": url, "task": _TASK.format(i + 1)}
                command = [word.format_map(words) for word in arguments.extra]
                subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=2, check=True)
                print(f"session {i + 1}: {recorder.n - before} requests", file=sys.stderr)
    return 0


# --- replay -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Run:
    """Prompt tokens that a server computed, seconds for all requests, and seconds of the longest one."""

    computed: int
    seconds: float
    longest: float


def post(port: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a server."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return dict(json.load(answer))


def in_turns(requests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first request of every session, then the second ones, and so on."""
    sessions: dict[int, list[Mapping[str, Any]]] = {}
    for request in requests:
        sessions.setdefault(request["session"], []).append(request)
    return [one for turn in zip_longest(*sessions.values()) for one in turn if one is not None]


def prompts_of(requests: Sequence[Mapping[str, Any]], arguments: Namespace) -> list[list[int]]:
    """Return the token ids of the requests, made by a server with the model that has the words."""
    command = [*shlex.split(arguments.ik), "serve"]
    small = Namespace(n_prompt=512, n_gen=1, threads=1, extra=[], timeout=arguments.timeout)
    with server(command, arguments.words, small, 1) as port:
        texts = (
            post(port, "/apply-template", {name: r[name] for name in ("messages", "tools") if name in r})["prompt"]
            for r in requests
        )
        return [post(port, "/tokenize", {"content": text, "add_special": True})["tokens"] for text in texts]


def n_distinct(prompts: Sequence[Sequence[int]]) -> int:
    """Return the positions of all prompts, those of common beginnings counted once."""
    n, before = 0, list[int]()
    for prompt in sorted(map(list, prompts)):
        same = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), None)
        n += len(prompt) - (min(len(before), len(prompt)) if same is None else same)
        before = prompt
    return n


def replayed(port: int, prompts: Sequence[Sequence[int]], n_gen: int) -> Run:
    """Send all prompts, each when the answer before it is complete."""
    computed, seconds = 0, []
    for prompt in prompts:
        body = {"prompt": prompt, "n_predict": n_gen, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        start = time.perf_counter()
        computed += post(port, "/completion", body)["timings"]["prompt_n"]
        seconds.append(time.perf_counter() - start)
    return Run(computed, sum(seconds), max(seconds))


def replay(arguments: Namespace) -> int:
    """Replay against all servers in turns; print the table."""
    with arguments.file.open(encoding="utf-8") as lines:
        requests = in_turns([json.loads(line) for line in lines])[: arguments.requests]
    prompts = prompts_of(requests, arguments)
    total, distinct = sum(map(len, prompts)), n_distinct(prompts)
    programs = {"ik": [*shlex.split(arguments.ik), "serve"]}
    if arguments.before:
        programs["before"] = [*shlex.split(arguments.before), "serve"]
    if arguments.reference:
        programs["reference"] = [str((arguments.reference / PROGRAM).resolve())]
    cram = [] if arguments.cache_ram is None else ["-cram", str(arguments.cache_ram)]
    options = Namespace(
        n_prompt=max(map(len, prompts)), n_gen=arguments.n_gen, threads=arguments.threads,
        extra=[*cram, *arguments.extra], timeout=arguments.timeout,
    )  # fmt: skip
    runs: dict[str, list[Run]] = {name: [] for name in programs}
    for repetition in range(arguments.repetitions):
        for name in list(programs) if repetition % 2 == 0 else list(reversed(programs)):
            with server(programs[name], arguments.model, options, 1) as port:
                post(port, "/completion", {"prompt": [5, 6, 7], "n_predict": 1})
                runs[name].append(replayed(port, prompts, arguments.n_gen))
            print(f"run {repetition + 1}: {name}, {runs[name][-1]}", file=sys.stderr, flush=True)
    n_sessions = len({request["session"] for request in requests})
    words = shlex.join(["-t", str(arguments.threads), *cram, *arguments.extra])
    print(f"{arguments.model.name}, `{words}`: {len(prompts)} requests of {n_sessions} sessions in turns, "
          f"{total} prompt tokens, {distinct} distinct\n")  # fmt: skip
    print("| server | computed | of the distinct | seconds | ratio | longest request |")
    print("|:---|---:|---:|---:|---:|---:|")
    own = statistics.median(run.seconds for run in runs["ik"])
    for name, found in runs.items():
        computed, seconds, longest = (
            statistics.median(getattr(run, field) for run in found) for field in Run.__slots__
        )
        ratio = "" if name == "ik" else f"{seconds / own:.2f}"
        print(f"| {name} | {computed:.0f} | {computed / distinct:.3f} | {seconds:.1f} | {ratio} | {longest:.1f} |")
    return 0


def parse_arguments(argv: list[str]) -> Namespace:
    """Parse the command line; `extra` holds the words after `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("record", help="run an agent, write its requests")
    one.add_argument("file", type=Path, help="recording to write")
    one.add_argument("--folder", type=Path, required=True, help="project that the agent works on")
    one.add_argument("--sessions", type=int, default=4, help="(default: %(default)s)")
    one.add_argument("--turns", type=int, default=8, help="files read in each session (default: %(default)s)")
    one = parts.add_parser("replay", help="send a recording to servers")
    one.add_argument("file", type=Path, help="recording")
    one.add_argument("-m", "--model", type=Path, default=DEMO, help="GGUF file (default: the demo model)")
    one.add_argument("--words", type=Path, default=DEMO, help="model whose template and vocabulary make the prompts")
    one.add_argument("--ik", default="ik", help="how to start ik, with absolute paths (default: %(default)s)")
    one.add_argument("--before", help="how to start another ik, as --ik")
    one.add_argument("--reference", type=Path, help=f"folder with {PROGRAM}")
    one.add_argument("-cram", "--cache-ram", type=int, help="MiB of prompts in RAM (default: the servers')")
    one.add_argument("-t", "--threads", type=int, default=1)
    one.add_argument("-n", "--n-gen", type=int, default=8, help="tokens of an answer (default: %(default)s)")
    one.add_argument("--requests", type=int, help="only the first ones")
    one.add_argument("-r", "--repetitions", type=int, default=3, help="runs of each server (default: %(default)s)")
    one.add_argument("--timeout", type=float, default=120, help="seconds to start a server (default: %(default)s)")
    return parse_with_extra(parser, argv)


def main(argv: list[str]) -> int:
    """Record or replay."""
    arguments = parse_arguments(argv)
    return record(arguments) if arguments.part == "record" else replay(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
