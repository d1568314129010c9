#!/usr/bin/env python3
"""Measure what drafts gain and cost: plain generation, fixed lengths, and lengths that the cost model chooses.

The bundled demo model (or `-m`) continues held-out text, greedily and sampled at temperature 1; `--spec` names the
drafts. `--families` makes random models with a head that predicts further tokens (MTP), whose weights know nothing: a
hook replaces its choices, so that they agree with the model at a share of positions. Everything else, the time of a
draft above all, is as it is in a server. All settings have their turn on each text, and must write the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serve import server as reference_server

from ikcli.drafting.drafters import Drafter, Wanted
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
FAMILIES = {
    "glm4moe": ("--layers", "2", "--experts", "32"),
    "qwen35moe": ("--layers", "4", "--experts", "32"),
    "deepseek2": ("--layers", "3", "--experts", "32"),
}
PLAIN, CHOSEN = "plain", "chosen"
N_PROMPT = 128


@dataclass
class Row:
    """One line of the table: tokens per second, and the others as multiples of it. `reference` has the other program's.

    `accepted`: share of drafted tokens with chosen lengths; `drafted`: tokens drafted for each one generated.
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

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.draft, self.text


class Agreeing:
    """A drafter whose choices are replaced: right at the positions in `agrees`, wrong elsewhere."""

    def __init__(self, inner: Drafter, agrees: Sequence[bool]) -> None:
        self.costs, self.sees_pictures = inner.costs, inner.sees_pictures
        self.prepare, self.finished, self.close = inner.prepare, inner.finished, inner.close
        self._inner, self._agrees = inner, agrees
        self.tokens: Sequence[int] = ()  # of the text as it is without drafts

    def draft(self, wanted: Sequence[Wanted]) -> None:
        """Draft as ever, then replace."""
        self._inner.draft(wanted)
        for w in wanted:
            at = len(w.history) - N_PROMPT
            right = self.tokens[at : at + len(w.found)]
            w.found[:] = [t if self._agrees[at + i] else t ^ 1 for i, t in enumerate(right)]


# --- ik -------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def engine_of(model: Path, options: argparse.Namespace, **server: object) -> Iterator[Engine]:
    """Yield a ready engine with one slot."""
    n, n_ctx = options.threads, -(-(N_PROMPT + options.n_gen + 16) // 256) * 256
    config = RunConfig(command="serve", model=model, n_ctx=n_ctx, n_threads=n, n_threads_batch=n,
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
    """A way to generate, and what it took on every text."""

    def __init__(self, engine: Engine, speculator: Speculator | None) -> None:
        self._engine, self._speculator = engine, speculator
        self.agreeing: Agreeing | None = None
        self._seconds: dict[int, list[float]] = {}
        self._n: dict[int, int] = {}
        self.n_drafted = self.n_accepted = 0

    def agree(self, agrees: Sequence[bool]) -> None:
        """Replace the choices of the only drafter."""
        if self._speculator is not None:
            [drafter] = self._speculator._drafters
            self.agreeing = Agreeing(drafter, agrees)
            self._speculator._drafters = [self.agreeing]

    def run(self, text: int, request: GenerationRequest) -> tuple[int, ...]:
        """Generate and note the time; return the tokens."""
        final = generate(self._engine, self._speculator, request)
        t = final.timings
        self._seconds.setdefault(text, []).append(t.predicted_ms / 1e3)
        self._n[text] = t.predicted_n
        self.n_drafted += t.draft_n
        self.n_accepted += t.draft_n_accepted
        return tuple(token.id for token in final.tokens)

    @property
    def rate(self) -> float:
        """Return tokens per second: of every text, the median."""
        return sum(self._n.values()) / sum(map(statistics.median, self._seconds.values()))

    @property
    def n(self) -> int:
        """Return the tokens generated."""
        return sum(n * len(self._seconds[text]) for text, n in self._n.items())


def measure(settings: Mapping[str, Setting], requests: Sequence[GenerationRequest], rounds: int) -> None:
    """Run all settings in turns, the first one first."""
    known: dict[int, tuple[int, ...]] = {}
    names = list(settings)
    for r in range(rounds):
        for i, request in enumerate(requests):
            turn = (r * len(requests) + i) % len(names) if r else 0
            for name in names[turn:] + names[:turn]:
                setting = settings[name]
                if setting.agreeing is not None:
                    setting.agreeing.tokens = known[i]
                tokens = setting.run(i, request)
                if known.setdefault(i, tokens) != tokens:
                    sys.exit(f"error: text {i} differs with drafts ({name})")


def row_of(model: str, draft: str, text: str, settings: Mapping[str, Setting]) -> Row:
    """Return the line of a table."""
    plain, chosen = settings[PLAIN].rate, settings[CHOSEN]
    ratios = {name: s.rate / plain for name, s in settings.items()}
    fixed = {n: ratio for n, ratio in ratios.items() if n not in (PLAIN, CHOSEN)}
    return Row(model, draft, text, plain, fixed, ratios[CHOSEN], chosen.n_accepted / max(chosen.n_drafted, 1),
               chosen.n_drafted / chosen.n)  # fmt: skip


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
    step = (len(ids) - N_PROMPT) // options.texts
    return [
        GenerationRequest(prompt=tuple(ids[at : at + N_PROMPT]), n_predict=options.n_gen, cache_prompt=False,
                          sampling=SamplerParams(temperature=temperature, seed=at))
        for at in range(0, options.texts * step, step)
    ]  # fmt: skip


def random_texts(engine: Engine, options: argparse.Namespace) -> list[GenerationRequest]:
    """Return requests with prompts of random tokens, whose answers do not end early."""
    assert engine._worker is not None
    rng, n_vocab = np.random.default_rng(0), engine._worker.session.n_vocab
    bias = tuple((i, float("-inf")) for i in engine.tokenizer.eog_ids)
    return [
        GenerationRequest(prompt=tuple(rng.integers(400, n_vocab, N_PROMPT).tolist()), n_predict=options.n_gen,
                          cache_prompt=False, sampling=SamplerParams(temperature=0, logit_bias=bias))
        for _ in range(options.texts)
    ]  # fmt: skip


def make(family: str, options: argparse.Namespace) -> Path:
    """Return a random model of a family, made if it is not in the folder yet."""
    path: Path = options.folder / f"{family}-mtp.gguf"
    if not path.exists():
        options.folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, str(MAKE), "--preset", family, *FAMILIES[family], "--vocab", "4096", "--heads",
                        "1", "--type", "Q4_K_M", "-o", str(path)], check=True, stdout=sys.stderr)  # fmt: skip
    return path


def demo_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure every kind of draft on held-out text."""
    model = options.model or DATA_DIR / "demo.gguf"
    for name in options.spec:
        stage = parse_spec_type(name)
        server = {"spec_type": stage, "model_draft": options.heads} if name.startswith("mtp") else {}
        with engine_of(model, options) as plain, contextlib.ExitStack() as stack:
            drafting = stack.enter_context(engine_of(model, options, **server)) if server else plain
            for temperature in options.temperatures:
                settings = settings_of(plain, drafting, stage, options.lengths)
                requests = held_out(plain, options, temperature)
                measure(settings, requests, options.rounds)
                row = row_of(model.stem, name, f"T = {temperature:g}", settings)
                if options.reference and not temperature and not server:
                    row.reference = measure_reference(model, name, requests, options)
                yield row


def family_rows(family: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure a random model whose head agrees at a share of positions."""
    model, stage = make(family, options), parse_spec_type("mtp:p_min=0")
    with engine_of(model, options) as plain, engine_of(model, options, spec_type=stage) as drafting:
        requests = random_texts(plain, options)
        for share in options.agreement:
            settings = settings_of(plain, drafting, stage, options.lengths)
            agrees = np.random.default_rng(share).random(options.n_gen + N_PROMPT) < share / 100
            for setting in settings.values():
                if setting is not settings[PLAIN]:
                    setting.agree(agrees.tolist())
            measure(settings, requests, options.rounds)
            row = row_of(family, "mtp", f"{share} % right", settings)
            if options.reference and not share:  # its head makes its own choices, which are not right either
                row.reference = measure_reference(model, "mtp:p_min=0", requests, options)
            yield row


# --- the reference --------------------------------------------------------------------------------------------------
def ask(port: int, request: GenerationRequest) -> tuple[int, float]:
    """Return the tokens of an answer of llama-server, and the seconds they took."""
    body = {"prompt": list(request.prompt), "n_predict": request.n_predict, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False}  # fmt: skip
    call = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(),
                                  {"Content-Type": "application/json"})  # fmt: skip
    with urllib.request.urlopen(call, timeout=300) as answer:
        t = json.load(answer)["timings"]
    return t["predicted_n"], t["predicted_ms"] / 1e3


def measure_reference(
    model: Path, draft: str, requests: Sequence[GenerationRequest], options: argparse.Namespace
) -> dict[str, float]:
    """Return llama-server's tokens per second without drafts, and with fixed lengths as multiples of them."""
    command = [str(options.reference / "llama-server")]
    arguments = SimpleNamespace(n_prompt=N_PROMPT, n_gen=options.n_gen, threads=options.threads, timeout=120)
    mark = "," if ":" in draft else ":"
    extras = {PLAIN: ()} | {str(n): ("--spec-type", f"{draft}{mark}n_max={n}") for n in options.lengths}
    rates: dict[str, list[float]] = {name: [] for name in extras}
    with contextlib.ExitStack() as stack:
        ports: dict[str, int] = {}
        for name, extra in extras.items():
            arguments.extra = list(extra)
            ports[name] = stack.enter_context(reference_server(command, model, arguments, 1))  # type: ignore[arg-type]
        for _ in range(options.rounds):
            for name, port in ports.items():
                found = [ask(port, request) for request in requests]
                rates[name].append(sum(n for n, _ in found) / sum(s for _, s in found))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {name: rate if name == PLAIN else rate / medians[PLAIN] for name, rate in medians.items()}


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
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio(found: Mapping[str, float], name: str) -> str:
    return f"{found[name]:.2f}" if name in found else ""


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the gain over agreement, a panel for each family."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "ik"
    families = [f for f in FAMILIES if any(row.model == f for row in rows)]
    figure, panels = plt.subplots(1, len(families), figsize=(3.4 * len(families), 3.2), sharey=True, squeeze=False)
    for panel, family in zip(panels[0], families, strict=True):
        mine = sorted((row for row in rows if row.model == family), key=lambda row: int(row.text.split()[0]))
        at = [int(row.text.split()[0]) for row in mine]
        for n in sorted({n for row in mine for n in row.fixed}, key=int):
            panel.plot(at, [row.fixed[n] for row in mine], "--", linewidth=1, label=f"fixed, {n}")
        panel.plot(at, [row.chosen for row in mine], "k-o", linewidth=2, label="chosen")
        panel.axhline(1, color="gray", linewidth=0.5)
        panel.set(title=family, xlabel="right choices of the head, %")
    panels[0][0].set_ylabel("tokens/s, plain = 1")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


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
    parser.add_argument("--lengths", type=numbers, default=[1, 2, 4, 7], help="fixed ones (default: 1,2,4,7)")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("-n", "--n-gen", type=int, default=256, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--reference", type=Path, help="folder with llama-server")
    parser.add_argument("--json", type=Path, help="file of results: rows are added and replaced, all are printed")
    parser.add_argument("--plot", type=Path, help="draw the families of the results into this file")
    parser.add_argument("--only-print", action="store_true", help="measure nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, then print the table."""
    options = parse_arguments(argv)
    options.spec = options.spec or ["ngram-simple", "suffix"]
    families = [name for name in options.families.split(",") if name]
    if unknown := sorted(set(families) - set(FAMILIES)):
        sys.exit(f"error: unknown family: {', '.join(unknown)}; known are {', '.join(FAMILIES)}")
    known: dict[tuple[str, str, str], Row] = {}
    if options.json and options.json.exists():
        known = {row.key: row for row in (Row(**one) for one in json.loads(options.json.read_text()))}
    runs: list[Callable[[], Iterator[Row]]] = [lambda name=name: family_rows(name, options) for name in families]
    for run in [] if options.only_print else runs or [lambda: demo_rows(options)]:
        for row in run():
            print(table([row]).splitlines()[-1], file=sys.stderr, flush=True)
            known[row.key] = row
            if options.json:
                options.json.write_text(json.dumps([asdict(one) for one in known.values()], indent=1) + "\n")
    print(table(list(known.values())))
    if options.plot:
        plot(list(known.values()), options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
