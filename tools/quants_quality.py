"""Quality of types and presets on the bundled demo model: perplexity, KL divergence, same top token, RMSE.

The first half of the bundled text makes the importance matrix, and the second half is evaluated. The base is the
unchanged bundled model. A type applies to every matrix that is quantized at all; a preset chooses as `ik quantize`
does.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from model_divergence import Settings, compare, halves, importance, store_base
from quants_data import Record, bpw, presets, rounded, table_types

import ikcli
from ikcli.bench.environment import hardware
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.gguf.types import TYPES
from ikcli.hostinfo import physical_cores
from ikcli.measure.kld_file import BaseReader
from ikcli.quant.decode import dequantize
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.job import QuantizeJob
from ikcli.quant.quantizer import output_metadata, run
from ikcli.quant.recipes import CustomRule, RecipeOptions, TypeChoice, choose_types
from ikcli.settings.run import default_model, default_text

N_CTX = 512
_Q8_0 = 7  # file type of rules: any quantized one does


@dataclass(frozen=True, slots=True)
class Bench:
    """The inputs that all measurements share: the model, its importance matrix, base probabilities, a folder."""

    file: GGUFFile
    imatrix: Imatrix
    base: BaseReader
    folder: Path
    n_threads: int
    known: dict[str, Record] = field(default_factory=dict)


def prepare(folder: Path) -> tuple[Bench, Record]:
    """Collect the importance matrix and store the base probabilities; the record describes the setting."""
    n, model, path = physical_cores(), default_model(), folder / "base.kld"
    learn, judge = halves(default_text().read_text(encoding="utf-8"))
    found = importance(model, learn, Settings(N_CTX, n))
    base = store_base(model, judge, path, Settings(N_CTX, n))
    file = open_gguf(model, ())
    about = {
        "kind": "about",
        "part": "quality",
        "model_name": str(file.get("general.name")),
        "n_params": file.n_elements,
        "bytes": file.n_bytes,
        "imatrix_tokens": found.imatrix.n_chunks * N_CTX,
        "chunks": base.n_chunks,
        "n_ctx": N_CTX,
        "scored_tokens": base.n_tokens,
        "ppl": rounded(base.ppl),
        "ppl_error": rounded(base.error, 3),
        "isa": hardware()["isa"],
        "version": ikcli.__version__,
        "row_lengths": sorted({t.shape[0] for t in file.tensors.values() if len(t.shape) > 1}),
    }
    return Bench(file, found.imatrix, BaseReader(path), folder, n), about


def type_choices(bench: Bench, type: GGMLType, imatrix: Imatrix | None) -> list[TypeChoice]:
    """Choose the type (the plain one where rows are read singly) for every matrix that may be quantized."""
    rule = CustomRule(".", type, "")
    options = RecipeOptions(file_type=_Q8_0, custom=(rule,), ignore_imatrix_rules=True)
    return choose_types(list(bench.file.tensors.values()), bench.file.metadata, options, imatrix)


def preset_choices(bench: Bench, number: int, imatrix: Imatrix | None) -> list[TypeChoice]:
    """Return the choices of a preset, including presets that are refused without importance matrix."""
    options = RecipeOptions(file_type=number, ignore_imatrix_rules=True)
    return choose_types(list(bench.file.tensors.values()), bench.file.metadata, options, imatrix)


def mix(choices: Sequence[TypeChoice]) -> dict[str, float]:
    """Return the share of the quantized weights per type, the largest first."""
    counts: Counter[str] = Counter()
    for c in choices:
        if not c.reason.startswith("kept"):
            counts[TYPES[c.new].name] += int(np.prod(c.shape))
    total = sum(counts.values())
    return {name: rounded(n / total, 3) for name, n in counts.most_common()}


def _relative_rmse(before: GGUFFile, after: GGUFFile, choices: Sequence[TypeChoice]) -> float:
    error2 = value2 = 0.0
    for c in choices:
        if not c.reason.startswith("kept"):
            x = dequantize(before.data(c.name), c.old, c.shape).astype(np.float64)
            error2 += float(np.square(dequantize(after.data(c.name), c.new, c.shape) - x).sum())
            value2 += float(np.square(x).sum())
    return float(np.sqrt(error2 / value2))


def measure(bench: Bench, choices: Sequence[TypeChoice], imatrix: Imatrix | None) -> Record:
    """Write the model and compare it with the base; return the record without its name.

    The same data is evaluated once.
    """
    started = time.perf_counter()
    path = bench.folder / "model.gguf"
    run(
        QuantizeJob(
            bench.file,
            path,
            choices,
            output_metadata(bench.file, _Q8_0),
            imatrix,
            n_threads=bench.n_threads,
            force=True,
        )
    )
    after = open_gguf(path, ())
    digest = hashlib.sha256(b"".join(after.data(name).tobytes() for name in after.tensors)).hexdigest()[:16]
    if digest in bench.known:
        return bench.known[digest]
    matrices = [c for c in choices if not c.reason.startswith("kept")]
    n_weights = sum(int(np.prod(c.shape)) for c in matrices)
    record: Record = {
        "bytes": after.n_bytes,
        "bpw": rounded(8 * sum(c.n_bytes for c in matrices) / n_weights),
        "rmse": rounded(_relative_rmse(bench.file, after, choices)),
        "fallback": sorted({c.name for c in choices if c.fallback}),
    }
    found = compare(path, bench.base, Settings(N_CTX, bench.n_threads)).summary
    record |= {
        "ppl": rounded(found.ppl[0]),
        "log_ratio": rounded(found.log_ratio[0]),
        "log_ratio_error": rounded(found.log_ratio[1], 3),
        "kld": rounded(found.kld[0]),
        "kld_error": rounded(found.kld[1], 3),
        "same_top": rounded(found.same_top[0]),
        "same_top_error": rounded(found.same_top[1], 3),
        "sha256": digest,
        "seconds": round(time.perf_counter() - started, 1),
    }
    bench.known[digest] = record
    return record


def cases(names: Sequence[str] = ()) -> Iterator[Case]:
    """Return all types, then all presets, or those named in lower case; each without and with importance matrix."""
    types = [Case(TYPES[t].name, False, int(t), with_it) for t in table_types() for with_it in (False, True)]
    mixes = [Case(name, True, number, with_it) for name, number in presets().items() for with_it in (False, True)]
    return (case for case in (*types, *mixes) if not names or case.name.lower() in names)


class Case(NamedTuple):
    """A type or preset by name and number, with or without importance matrix."""

    name: str
    preset: bool
    number: int
    imatrix: bool

    @property
    def head(self) -> Record:
        head: Record = {"kind": "quality", "name": self.name, "imatrix": self.imatrix}
        return head | {"preset": True} if self.preset else head


def all_quality(todo: Sequence[Case], seconds: float | None = None) -> Iterator[Record]:
    """Yield records of the cases as they are ready, until this many seconds are over."""
    stop_at = time.monotonic() + seconds if seconds is not None else float("inf")
    with tempfile.TemporaryDirectory() as folder:
        bench, about = prepare(Path(folder))
        yield about
        for case in todo:
            if time.monotonic() > stop_at:
                return
            imatrix = bench.imatrix if case.imatrix else None
            if case.preset:
                choices = preset_choices(bench, case.number, imatrix)
                yield case.head | measure(bench, choices, imatrix) | {"mix": mix(choices)}
            else:
                type = GGMLType(case.number)
                found = measure(bench, type_choices(bench, type, imatrix), imatrix)
                yield case.head | found | {"bpw": rounded(bpw(type))}
