#!/usr/bin/env python3
"""Measure what drafts gain and cost: plain generation, fixed lengths, and lengths that the cost model chooses.

The bundled demo model (or `-m`) continues held-out text, greedily and sampled at temperature 1; `--spec` names the
drafts. `--families` makes random models with a head that predicts further tokens (MTP), whose weights know nothing: a
hook replaces its choices, so that they agree with the model at a share of positions. Everything else, the time of a
draft above all, is as it is in a server. All settings have their turn on each text, in an order that rotates, with
plain generation between each two, and must write the same tokens. The table has medians of how many times as fast a
setting is as plain generation just before and after it.

The models of the families have the layers of GLM-4.5, Qwen3.5-MoE and DeepSeek V3 in a smaller width: twelve, so that
the head costs a twelfth of the model. All experts are used alike. The whole table,

    python benchmarks/speculation.py --families glm4moe,qwen35moe,deepseek2 -t 2 --json FILE --plot docs/speculation.svg

takes some 12 minutes with two idle cores. Rows that FILE has already are not measured again, so that the same command
goes on where it was interrupted; `--again` begins anew.

`--reference` measures the llama-server of ik_llama.cpp on the same files and texts, with its own `--spec-type` and
fixed lengths, as multiples of its own rate without drafts. It has no hook: its heads make their own choices, which
random weights get wrong, so that its figures belong to the rows of 0 %. With the demo model they belong to the greedy
texts. What it cannot run is said below the table.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import os
import queue
import statistics
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from gguf import TokenType

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serve import server as reference_server

from ikcli.drafting.drafters import Drafter, Wanted
from ikcli.files import written_whole
from ikcli.gguf.reader import open_gguf
from ikcli.report.svg import Curve, Dot
from ikcli.report.svg import plot as draw
from ikcli.sampling.params import SamplerParams
from ikcli.server.slots.engine import Engine
from ikcli.server.slots.log import silent
from ikcli.server.slots.messages import Event, Failure, Final, GenerationRequest
from ikcli.server.slots.speculative import Speculator
from ikcli.settings.records import SpecStage
from ikcli.settings.run import DATA_DIR, RunConfig
from ikcli.settings.server import ServerConfig
from ikcli.settings.values import parse_spec_type

MAKE = Path(__file__).resolve().parents[1] / "tools" / "make_random_model.py"
_SIZES = "embedding_length=1024,expert_feed_forward_length=256"
FAMILIES = {
    "glm4moe": f"{_SIZES},feed_forward_length=2816,attention.head_count=16,attention.head_count_kv=2",
    "qwen35moe": f"{_SIZES},feed_forward_length=256,expert_shared_feed_forward_length=256,attention.head_count=8,"
    "ssm.group_count=8,ssm.time_step_rank=16,ssm.inner_size=2048",
    "deepseek2": f"{_SIZES},feed_forward_length=2816,attention.head_count=8,attention.head_count_kv=8,"
    "attention.q_lora_rank=768",
}
"""Sizes of the random models, as `--set` of tools/make_random_model.py takes them."""
PLAIN, CHOSEN = "plain", "chosen"
N_HELD_OUT, N_RANDOM = 128, 32  # tokens of a prompt


@dataclass
class Row:
    """One line of the table: tokens per second, and the others as multiples of it. `reference` has the other program's.

    `accepted`: share of drafted tokens with chosen lengths; `drafted`: tokens drafted for each one generated; `note`:
    why the other program has no figures.
    """

    model: str
    draft: str
    text: str
    plain: float
    fixed: dict[str, float]
    chosen: float
    accepted: float = 0.0
    drafted: float = 0.0
    reference: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.draft, self.text

    def has(self, lengths: Sequence[int], *, reference: bool) -> bool:
        """Return whether all lengths are measured, and whether the other program has had its try if it is to."""
        return {str(n) for n in lengths} <= {*self.fixed} and bool(not reference or self.reference or self.note)


class Results:
    """The rows so far, in a file if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path is not None and path.exists() else []
        self._rows = {row.key: row for row in (Row(**one) for one in found)}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def add(self, row: Row) -> None:
        """Add or replace a row, print it, and write the file."""
        print(table([row]).splitlines()[2], file=sys.stderr, flush=True)
        self._rows[row.key] = row
        if self._path is not None:
            with written_whole(self._path) as part:
                part.write_text(json.dumps([asdict(one) for one in self.rows], indent=1) + "\n")

    def missing(self, key: tuple[str, str, str], options: argparse.Namespace, *, reference: bool) -> bool:
        """Return whether a row is to be measured."""
        row = self._rows.get(key)
        return row is None or options.again or not row.has(options.lengths, reference=reference)


class Agreeing:
    """A drafter whose choices are replaced: right at the positions in `agrees`, wrong elsewhere."""

    def __init__(self, inner: Drafter, agrees: Sequence[bool]) -> None:
        self.costs, self.sees_pictures = inner.costs, inner.sees_pictures
        self.prepare, self.finished, self.close = inner.prepare, inner.finished, inner.close
        self._inner, self._agrees = inner, agrees
        self.n_prompt = 0
        self.tokens: Sequence[int] = ()  # of the text as it is without drafts

    def draft(self, wanted: Sequence[Wanted]) -> None:
        """Draft as ever, then replace."""
        self._inner.draft(wanted)
        for w in wanted:
            at = len(w.history) - self.n_prompt
            right = self.tokens[at : at + len(w.found)]
            w.found[:] = [t if self._agrees[at + i] else t ^ 1 for i, t in enumerate(right)]


# --- ik -------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def engine_of(model: Path, options: argparse.Namespace, **server: object) -> Iterator[Engine]:
    """Yield a ready engine with one slot."""
    n, n_ctx = options.threads, -(-(N_HELD_OUT + options.n_gen + 16) // 256) * 256
    # Read, not mapped: whether a mapped file is copied into huge pages is measured anew by each of two engines.
    config = RunConfig(command="serve", model=model, n_ctx=n_ctx, n_threads=n, n_threads_batch=n, mmap=False,
                       server=ServerConfig(**server))  # type: ignore[arg-type] # fmt: skip
    engine = Engine(config, n_slots=1)
    engine.start()
    if not engine.wait_loaded():
        sys.exit(f"error: {engine.load_error}")
    try:
        yield engine
    finally:
        engine.shutdown(drain=False)


def speculator_of(engine: Engine, **server: object) -> Speculator:
    """Return one more speculator of an engine, with these options."""
    assert engine._worker is not None
    session = engine._worker.session
    before = session.config
    session.config = replace(before, server=replace(before.server, **server))  # type: ignore[arg-type]
    try:
        return Speculator(session, silent)
    finally:
        session.config = before


def generate(engine: Engine, speculator: Speculator | None, request: GenerationRequest) -> Final:
    """Return the answer to a request; its prompt is computed anew."""
    assert engine._worker is not None
    if speculator is not None:
        engine._worker._speculator = speculator
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(request, events.put)
    while not isinstance(event := events.get(), Final):
        if isinstance(event, Failure):
            sys.exit(f"error: {event.message}")
    return event


class Setting:
    """A way to generate. `ratios`: how many times as fast as without drafts, by text and turn; `seconds`: per token."""

    def __init__(self, engine: Engine, speculator: Speculator | None) -> None:
        self._engine, self._speculator = engine, speculator
        self.agreeing: Agreeing | None = None
        self.seconds: list[float] = []
        self.ratios: list[float] = []
        self.n_generated = self.n_drafted = self.n_accepted = 0

    def agree(self, agrees: Sequence[bool]) -> None:
        """Replace the choices of the only drafter."""
        if self._speculator is not None:
            [drafter] = self._speculator._drafters
            self.agreeing = Agreeing(drafter, agrees)
            self._speculator._drafters = [self.agreeing]

    def run(self, request: GenerationRequest) -> tuple[int, ...]:
        """Generate and note the time; return the tokens."""
        final = generate(self._engine, self._speculator, request)
        t = final.timings
        self.seconds.append(t.predicted_ms / 1e3 / t.predicted_n)
        self.n_generated += t.predicted_n
        self.n_drafted += t.draft_n
        self.n_accepted += t.draft_n_accepted
        return tuple(token.id for token in final.tokens)


def measure(settings: Mapping[str, Setting], requests: Sequence[GenerationRequest], rounds: int) -> None:
    """Run all settings in turns, plain generation between each two, which their neighbours are compared with.

    The speed of a machine that others use drifts by more than what is to be seen, but not much within seconds.
    """
    plain, known = settings[PLAIN], list[tuple[int, ...]]()
    for request in requests:
        known.append(plain.run(request))
    others = [name for name in settings if name != PLAIN]
    for r in range(rounds):
        for i, (request, tokens) in enumerate(zip(requests, known, strict=True)):
            turn = (r * len(requests) + i) % len(others)
            plain.run(request)
            for name in others[turn:] + others[:turn]:
                setting, before = settings[name], plain.seconds[-1]
                if setting.agreeing is not None:
                    setting.agreeing.n_prompt, setting.agreeing.tokens = len(request.prompt), tokens
                if setting.run(request) != tokens:
                    sys.exit(f"error: text {i} differs with drafts ({name})")
                plain.run(request)
                setting.ratios.append((before + plain.seconds[-1]) / 2 / setting.seconds[-1])


def row_of(model: str, draft: str, text: str, settings: Mapping[str, Setting]) -> Row:
    """Return the line of a table: medians of the ratios."""
    chosen = settings[CHOSEN]
    ratios = {name: statistics.median(setting.ratios) for name, setting in settings.items() if name != PLAIN}
    fixed = {n: ratio for n, ratio in ratios.items() if n != CHOSEN}
    return Row(model, draft, text, 1 / statistics.median(settings[PLAIN].seconds), fixed, ratios[CHOSEN],
               chosen.n_accepted / max(chosen.n_drafted, 1), chosen.n_drafted / chosen.n_generated)  # fmt: skip


def settings_of(
    plain: Engine, drafting: Engine, stage: tuple[SpecStage, ...], lengths: Sequence[int]
) -> dict[str, Setting]:
    """Return plain generation, every fixed length, and chosen ones."""
    found = {PLAIN: Setting(plain, speculator_of(plain, spec_type=()))}
    for n in lengths:
        fixed = speculator_of(drafting, spec_type=stage, draft_max=n, spec_autotune=False)
        found[str(n)] = Setting(drafting, fixed)
    return found | {CHOSEN: Setting(drafting, speculator_of(drafting, spec_type=stage))}


# --- models and texts -----------------------------------------------------------------------------------------------
def held_out(engine: Engine, options: argparse.Namespace, temperature: float) -> list[GenerationRequest]:
    """Return requests to continue pieces of the held-out text."""
    ids = engine.tokenizer.encode((DATA_DIR / "demo.txt").read_text(encoding="utf-8"))
    step = (len(ids) - N_HELD_OUT) // options.texts
    return [
        GenerationRequest(prompt=tuple(ids[at : at + N_HELD_OUT]), n_predict=options.n_gen, cache_prompt=False,
                          sampling=SamplerParams(temperature=temperature, seed=at))
        for at in range(0, options.texts * step, step)
    ]  # fmt: skip


def random_texts(engine: Engine, options: argparse.Namespace) -> list[GenerationRequest]:
    """Return requests with prompts of random tokens, whose answers do not end early."""
    assert engine._worker is not None
    rng, n_vocab = np.random.default_rng(0), engine._worker.session.n_vocab
    bias = tuple((i, float("-inf")) for i in engine.tokenizer.eog_ids)
    return [
        GenerationRequest(prompt=tuple(rng.integers(400, n_vocab, N_RANDOM).tolist()), n_predict=options.n_gen,
                          cache_prompt=False, sampling=SamplerParams(temperature=0, logit_bias=bias))
        for _ in range(options.texts)
    ]  # fmt: skip


def make(family: str, options: argparse.Namespace) -> Path:
    """Return a random model of a family, made if it is not in the folder yet."""
    path: Path = options.folder / f"{family}-mtp.gguf"
    if not path.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        sizes = ("--layers", str(options.layers), "--experts", "32", "--vocab", "4096", "--heads", "1")
        subprocess.run([sys.executable, str(MAKE), "--preset", family, *sizes, "--set", FAMILIES[family], "--type",
                        "Q4_K_M", "--router-skew", "0", "-o", str(part)], check=True, stdout=sys.stderr)  # fmt: skip
        part.replace(path)
    return path


def demo_rows(options: argparse.Namespace, results: Results) -> None:
    """Measure every kind of draft on held-out text."""
    model = options.model or DATA_DIR / "demo.gguf"
    for name in options.spec:
        stage = parse_spec_type(name)
        server = {"spec_type": stage, "model_draft": options.heads} if name.startswith("mtp") else {}
        wanted = [
            (t, (model.stem, name, f"T = {t:g}"), options.reference is not None and not t and not server)
            for t in options.temperatures
        ]
        wanted = [one for one in wanted if results.missing(one[1], options, reference=one[2])]
        if not wanted:
            continue
        with engine_of(model, options) as plain, contextlib.ExitStack() as stack:
            drafting = stack.enter_context(engine_of(model, options, **server)) if server else plain
            for temperature, key, with_reference in wanted:
                settings = settings_of(plain, drafting, stage, options.lengths)
                requests = held_out(plain, options, temperature)
                measure(settings, requests, options.rounds)
                row = row_of(*key, settings)
                if with_reference:
                    row.reference, row.note = measure_reference(model, name, requests, options)
                results.add(row)


def family_rows(family: str, options: argparse.Namespace, results: Results) -> None:
    """Measure a random model whose head agrees at a share of positions."""
    wanted = [
        (share, (family, "mtp", f"{share} % right"), options.reference is not None and not share)
        for share in options.agreement
    ]
    wanted = [one for one in wanted if results.missing(one[1], options, reference=one[2])]
    if not wanted:
        return
    model, stage = make(family, options), parse_spec_type("mtp:p_min=0")
    with engine_of(model, options) as plain, engine_of(model, options, spec_type=stage) as drafting:
        requests = random_texts(plain, options)
        for share, key, with_reference in wanted:
            settings = settings_of(plain, drafting, stage, options.lengths)
            agrees = np.random.default_rng(share).random(options.n_gen + 64) < share / 100
            for setting in settings.values():
                if setting is not settings[PLAIN]:
                    setting.agree(agrees.tolist())
            measure(settings, requests, options.rounds)
            row = row_of(*key, settings)
            if with_reference:  # its head makes its own choices, which are not right either
                row.reference, row.note = measure_reference(model, "mtp:p_min=0", requests, options)
            results.add(row)


# --- the reference --------------------------------------------------------------------------------------------------
def bytes_of(model: Path) -> list[int]:
    """Return the tokens that stand for bytes: texts of random models have some, and llama-server refuses bad UTF-8."""
    types = np.asarray(open_gguf(model, ()).metadata["tokenizer.ggml.token_type"])
    return [int(i) for i in np.flatnonzero(types == TokenType.BYTE)]


def ask(port: int, request: GenerationRequest, banned: Sequence[int]) -> tuple[int, float]:
    """Return the tokens of an answer of llama-server, and the seconds they took."""
    body = {"prompt": list(request.prompt), "n_predict": request.n_predict, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False, "logit_bias": [[token, False] for token in banned]}  # fmt: skip
    call = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(),
                                  {"Content-Type": "application/json"})  # fmt: skip
    with urllib.request.urlopen(call, timeout=300) as answer:
        t = json.load(answer)["timings"]
    return t["predicted_n"], t["predicted_ms"] / 1e3


def measure_reference(
    model: Path, draft: str, requests: Sequence[GenerationRequest], options: argparse.Namespace
) -> tuple[dict[str, float], str]:
    """Return llama-server's tokens per second without drafts, with fixed lengths as multiples of them, and a note.

    If it does not run this model with these drafts, the note says so, and there are no figures.
    """
    given = options.reference
    command = [str(given / "llama-server" if given.is_dir() else given)]
    arguments = SimpleNamespace(
        n_prompt=len(requests[0].prompt), n_gen=options.n_gen, threads=options.threads, timeout=120
    )
    mark = "," if ":" in draft else ":"
    extras = {PLAIN: ()} | {str(n): ("--spec-type", f"{draft}{mark}n_max={n}") for n in options.lengths}
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in requests] for name in extras}
    counts: dict[str, list[int]] = {name: [0] * len(requests) for name in extras}
    with contextlib.ExitStack() as stack:
        ports: dict[str, int] = {}
        for name, extra in extras.items():
            arguments.extra = list(extra)
            try:
                ports[name] = stack.enter_context(reference_server(command, model, arguments, 1))  # type: ignore[arg-type]
            except SystemExit as e:
                print(e, file=sys.stderr)
                with_drafts = f" with --spec-type {draft}" if extra else ""
                return {}, f"{Path(command[0]).name} does not run {model.name}{with_drafts}"
        names, banned = list(ports), bytes_of(model)
        for r in range(options.rounds):
            for i, request in enumerate(requests):
                turn = (r * len(requests) + i) % len(names)
                for name in names[turn:] + names[:turn]:
                    try:
                        counts[name][i], took = ask(ports[name], request, banned)
                    except urllib.error.HTTPError as e:
                        said = e.read(500).decode(errors="replace")
                        return {}, f"{Path(command[0]).name} with {model.name} and {' '.join(extras[name])}: {said}"
                    seconds[name][i].append(took)
    rates = {name: sum(counts[name]) / sum(map(statistics.median, seconds[name])) for name in names}
    return {name: rate if name == PLAIN else rate / rates[PLAIN] for name, rate in rates.items()}, ""


# --- results --------------------------------------------------------------------------------------------------------
def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lengths = sorted({n for row in rows for n in row.fixed}, key=int)
    head = ["model", "draft", "text", "plain t/s", *(f"{n} fixed" for n in lengths), "chosen", "of the best", "drafted"]
    head += ["accepted", "reference t/s", *(f"its {n}" for n in lengths)]
    lines = [head, ["---"] * 3 + ["---:"] * (len(head) - 3)]
    for row in rows:
        best = max(1.0, *row.fixed.values())
        cells = [row.model, row.draft, row.text, f"{row.plain:.1f}", *(_ratio(row.fixed, n) for n in lengths)]
        cells += [f"**{row.chosen:.2f}**", f"{row.chosen / best:.2f}", f"{row.drafted:.2f}", f"{row.accepted:.2f}"]
        cells += [f"{row.reference[PLAIN]:.1f}" if row.reference else ""]
        lines.append(cells + [_ratio(row.reference, n) for n in lengths])
    notes = sorted({row.note for row in rows if row.note})
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *(f"\n{note}." for note in notes)])


def _ratio(found: Mapping[str, float], name: str) -> str:
    return f"{found[name]:.2f}" if name in found else ""


_STYLE = """<style>text { font: 15px system-ui, sans-serif; fill: #4a5563; } .title { font-weight: 600; fill: #1b2430; }
.grid { stroke: #dfe3e8; } .axis { stroke: #5c6775; } polyline { fill: none; stroke-width: 2; }
.s0 polyline { stroke: #1b2430; stroke-width: 3; } .s0 circle { fill: #1b2430; }
.s1 polyline { stroke: #0b62c4; } .s1 circle { fill: #0b62c4; } .s2 polyline { stroke: #c4570b; }
.s2 circle { fill: #c4570b; } .s3 polyline { stroke: #1f8a4c; } .s3 circle { fill: #1f8a4c; }
.s4 polyline { stroke: #8a2fb0; } .s4 circle { fill: #8a2fb0; } .plain polyline { stroke: #8a94a0; stroke-width: 1; }
.plain circle { fill: none; }</style><rect width="100%" height="100%" fill="#ffffff"/>"""


def plot(rows: Sequence[Row]) -> str:
    """Return an SVG of the gain over the share of right choices: a panel for each family, and a legend."""
    families = [f for f in FAMILIES if any(row.model == f for row in rows)]
    if not families:
        raise SystemExit("error: --plot draws families, and the results have none")
    lengths = sorted({int(n) for row in rows if row.model in families for n in row.fixed})
    n_columns, names = 2, [CHOSEN, *(f"{n} fixed" for n in lengths)]
    cells = [_panel(family, rows, lengths) for family in families] + [_legend(names)]
    n_rows = -(-len(cells) // n_columns)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {640 * n_columns} {380 * n_rows}" role="img" '
        f'aria-label="Tokens per second with drafts, over the share of right choices">{_STYLE}'
    ]
    for i, cell in enumerate(cells):
        out.append(f'<g transform="translate({640 * (i % n_columns)} {380 * (i // n_columns)})">{cell}</g>')
    return "\n".join([*out, "</svg>", ""])


def _panel(family: str, rows: Sequence[Row], lengths: Sequence[int]) -> str:
    found = sorted((int(row.text.split()[0]), row) for row in rows if row.model == family)
    curves = [Curve(PLAIN, [Dot(share, 1.0, "") for share, _ in found], 7, kind="plain")]
    for i, n in enumerate(lengths, 1):
        at = [(share, row.fixed[str(n)]) for share, row in found if str(n) in row.fixed]
        curves.append(Curve(f"{n} fixed", [Dot(x, y, f"{n} fixed, {x} %: {y:.2f}") for x, y in at], i))
    curves.append(Curve(CHOSEN, [Dot(x, r.chosen, f"chosen, {x} %: {r.chosen:.2f}") for x, r in found], 0))
    drawn = draw(curves, "right choices of the head, %", "tokens/s, plain = 1", x_ticks=range(0, 101, 20))
    place = drawn.replace("<svg ", '<svg y="26" width="620" height="340" ', 1)
    return f'<text class="title" x="64" y="22">{html.escape(family)}</text>\n{place}'


def _legend(names: Sequence[str]) -> str:
    lines = [
        f'<g class="s{i}"><polyline points="64,{66 + 28 * i} 104,{66 + 28 * i}"/>'
        f'<circle cx="84" cy="{66 + 28 * i}" r="3.5"/></g>'
        f'<text x="116" y="{71 + 28 * i}">{html.escape(name)}</text>'
        for i, name in enumerate(names)
    ]
    return f'<text class="title" x="64" y="40">tokens of a draft</text>{"".join(lines)}'


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(part) for part in text.split(",") if part]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="", help=f"random models instead: {', '.join(FAMILIES)}")
    parser.add_argument("--folder", type=Path, default=Path("speculation-models"), help="where they are made, and kept")
    parser.add_argument("-m", "--model", type=Path, help="default: the demo model")
    parser.add_argument("--heads", type=Path, help="file of heads for the model, for --spec mtp:...")
    parser.add_argument("--spec", action="append", help="kind of draft (default: ngram-simple, suffix)")
    parser.add_argument("--temperatures", type=numbers, default=[0, 1])
    parser.add_argument("--agreement", type=numbers, default=[0, 50, 80, 95], help="percent (default: 0,50,80,95)")
    parser.add_argument("--lengths", type=numbers, help="fixed ones (default: 1,2,4,7; of families 1,4)")
    parser.add_argument("--texts", type=int, help="default: 4; of families 1")
    parser.add_argument("-n", "--n-gen", type=int, default=256, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="turns of every setting (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12, help="of random models (default: %(default)s)")
    parser.add_argument("--reference", type=Path, help="llama-server of ik_llama.cpp, or its folder")
    parser.add_argument("--json", type=Path, help="file of results: rows are added to it, and all are printed")
    parser.add_argument("--again", action="store_true", help="measure rows that the file has already, too")
    parser.add_argument("--plot", type=Path, help="draw the families of the results into this file (.svg)")
    parser.add_argument("--only-print", action="store_true", help="measure nothing")
    options = parser.parse_args(argv)
    usual = ([1, 4], 1) if options.families else ([1, 2, 4, 7], 4)
    for name, value in zip(("lengths", "texts"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, then print the table."""
    options = parse_arguments(argv)
    options.spec = options.spec or ["ngram-simple", "suffix"]
    families = [name for name in options.families.split(",") if name]
    if unknown := sorted(set(families) - set(FAMILIES)):
        sys.exit(f"error: unknown family: {', '.join(unknown)}; known are {', '.join(FAMILIES)}")
    if options.reference is not None and not os.access(options.reference, os.X_OK):
        sys.exit(f"error: --reference {options.reference}: there is no such program or folder")
    results = Results(options.json)
    runs: list[Callable[[], None]] = [lambda name=name: family_rows(name, options, results) for name in families]
    for run in [] if options.only_print else runs or [lambda: demo_rows(options, results)]:
        run()
    print(table(results.rows))
    if options.plot:
        options.plot.write_text(plot(results.rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
