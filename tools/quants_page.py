"""Write docs/quants.md from the records of docs/quants.jsonl: tables, and the sentences with numbers.

The rest of the text is in quants_page.md, where `{{name}}` stands for one of these parts. Nothing is measured here.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from quants_data import MODEL_NAMES, Record, bpw, presets, record_key, table_types, twin
from quants_divergence import header, table_rows

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.formats import row_size
from ikcli.quant.recipe_rules import NEEDS_IMATRIX

T = GGMLType
TEMPLATE = Path(__file__).with_name("quants_page.md")
_BUDGETS = (2.0, 2.25, 2.5, 2.75, 3.25, 3.5, 4.1, 4.3, 4.5, 5.5, 6.7, 8.6)


class _Records:
    """Records by subject."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._by_key = {record_key(r): r for r in records}

    def all(self, kind: str) -> list[Record]:
        return [r for r in self._by_key.values() if r["kind"] == kind]

    def about(self, part: str, level: str = "") -> Record | None:
        return self._by_key.get(record_key({"kind": "about", "part": part, "level": level}))

    def levels(self) -> list[str]:
        """Return the instruction sets that were measured beside the usual one."""
        return sorted({r["level"] for r in self.all("about") if r.get("level")})

    def quality(self, name: str, imatrix: bool, preset: bool = False) -> Record | None:
        head: Record = {"kind": "quality", "name": name, "imatrix": imatrix}
        return self._by_key.get(record_key(head | {"preset": True} if preset else head))

    def speed(self, type: GGMLType, model: str, level: str = "") -> Record | None:
        head = {"kind": "speed", "name": TYPES[type].name, "model": model, "level": level}
        return self._by_key.get(record_key(head))

    def encode(self, type: GGMLType) -> Record | None:
        return self._by_key.get(record_key({"kind": "encode", "name": TYPES[type].name}))


def page(records: Sequence[Record]) -> str:
    """Return the whole document."""
    found = _Records(records)
    fields = {
        "measured": _what_was_measured(found),
        "types": _types_table(found),
        "marks": _marks(found),
        "best": _best_table(found),
        "presets": _presets_table(found),
        "demo": _demo_table(found),
        "levels": _levels_section(found),
        "divergence": _divergence_table(found),
        "fallback": _fallback_text(found),
        "fallbacks": _fallback_table(),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in fields.items():
        text = text.replace("{{" + name + "}}", value)
    return text


# --- tables -----------------------------------------------------------------------------------------------------
def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    rule = ["---" if i in left else "---:" for i in range(len(columns))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def _number(value: float) -> str:
    """Format with three significant digits for values from 0.01 on."""
    if value < 0.001:
        return "0" if value == 0 else "<0.001"
    return f"{value:.{max(0, 2 - math.floor(math.log10(max(value, 0.01))))}f}"


def _quality_cells(r: Record | None) -> list[str]:
    return ["", "", ""] if r is None else [f"{r['ppl']:.2f}", _kld(r["kld"]), f"{100 * r['same_top']:.1f}"]


def _kld(value: float) -> str:
    digits = 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}" if value >= 1e-4 else "0"


def _ratio(r: Record | None, key: str) -> str:
    return "" if r is None else f"{r[key]:.2f}"


def _speed_cells(found: _Records, type: GGMLType, model: str, level: str = "") -> list[str]:
    """Return PP and TG of the type, then name, PP and TG of its interleaved form."""
    r, other = found.speed(type, model, level), twin(type)
    cells = [_ratio(r, "pp_ratio"), _ratio(r, "tg_ratio")]
    if other is None:
        return [*cells, "", "", ""]
    s = found.speed(other, model, level)
    return [*cells, f"`{TYPES[other].name}`", _ratio(s, "pp_ratio"), _ratio(s, "tg_ratio")]


def _needs_imatrix(type: GGMLType) -> bool:
    return TYPES[type].needs_imatrix


def _types_table(found: _Records) -> str:
    rows = []
    for type in table_types():
        name = TYPES[type].name
        plain, with_imatrix, encode = found.quality(name, False), found.quality(name, True), found.encode(type)
        same = plain is not None and with_imatrix is not None and plain["sha256"] == with_imatrix["sha256"]
        cells = [f"`{name}`" + ("¹" if _needs_imatrix(type) else ""), f"{bpw(type):.3f}"]
        cells += ["", ""] if plain is None else [f"{plain['bytes'] / 1e6:.2f}", _number(100 * plain["rmse"])]
        cells += _quality_cells(plain)
        cells += ["=", "=", "="] if same else _quality_cells(with_imatrix)
        cells.append("" if encode is None else _number(encode["mw_per_s_imatrix"]))
        cells += _speed_cells(found, type, "random")
        rows.append(cells)
    columns = ["type", "bpw", "MB", "RMSE %", "PPL", "KLD", "top %", "PPL²", "KLD²", "top %²", "MW/s", "PP", "TG"]
    return _table([*columns, "interleaved", "PP", "TG"], rows, (0, 13))


def _best_table(found: _Records) -> str:
    """Return for every budget the type with the least divergence with and without importance matrix."""
    rows: list[list[str]] = []
    for high in _BUDGETS:
        fitting = [t for t in table_types() if bpw(t) <= high and TYPES[t].rows == 1]
        cells = [f"up to {high:g}"]
        for imatrix in (True, False):
            allowed = [t for t in fitting if imatrix or not _needs_imatrix(t)]
            known = [(r["kld"], t) for t in allowed if (r := found.quality(TYPES[t].name, imatrix)) is not None]
            best = sorted(known, key=lambda pair: pair[0])[:3]
            cells += [", ".join(f"`{TYPES[t].name}` {_kld(kld)}" for kld, t in best)]
        rows.append(cells)
    return _table(["bpw", "KLD with importance matrix", "KLD without"], rows, (0, 1, 2))


def _presets_table(found: _Records) -> str:
    rows: list[tuple[float, list[str]]] = []
    for name, number in presets().items():
        plain, with_imatrix = found.quality(name, False, True), found.quality(name, True, True)
        known = with_imatrix or plain
        if known is None:
            continue
        mark = "¹" if number in NEEDS_IMATRIX or any(_needs_imatrix(t) for t in _types_of(known)) else ""
        shares = ", ".join(f"{share:.0%} {type}" for type, share in known["mix"].items())
        cells = [f"`{name}`{mark}", f"{known['bpw']:.2f}", f"{known['bytes'] / 1e6:.2f}", *_quality_cells(plain)]
        same = plain is not None and with_imatrix is not None and plain["sha256"] == with_imatrix["sha256"]
        cells += ["=", "=", "="] if same else _quality_cells(with_imatrix)
        rows.append((known["bpw"], [*cells, shares]))
    rows.sort(key=lambda row: (row[0], row[1][0]))
    columns = ["preset", "bpw", "MB", "PPL", "KLD", "top %", "PPL²", "KLD²", "top %²", "on the demo model"]
    return _table(columns, [cells for _, cells in rows], (0, 9))


def _types_of(r: Record) -> list[GGMLType]:
    return [t for t, f in TYPES.items() if f.name in r["mix"]]


def _demo_table(found: _Records) -> str:
    rows = []
    for type in table_types():
        if found.speed(type, "demo") is not None:
            rows.append([f"`{TYPES[type].name}`", f"{bpw(type):.3f}", *_speed_cells(found, type, "demo")])
    return _table(["type", "bpw", "PP", "TG", "interleaved", "PP", "TG"], rows, (0, 4))


def _levels_section(found: _Records) -> str:
    """Return a section with the speeds by instruction set if more than one was measured."""
    if not found.levels():
        return ""
    levels = ["", *found.levels()]
    rows = []
    for type in table_types():
        by_level = [_speed_cells(found, type, "random", level) for level in levels]
        cells = [f"`{TYPES[type].name}`", f"{bpw(type):.3f}", *(c for cells in by_level for c in cells[:2])]
        rows.append([*cells, by_level[0][2], *(c for cells in by_level for c in cells[3:])])
    names = [f"{what} {_level_name(found, level)}" for level in levels for what in ("PP", "TG")]
    text = _wrapped(
        "The same ratios to F16 on the larger model, for processors without AVX-512. They say what a type gains on one",
        "kind of processor; they do not compare processors, and F16 itself is faster with AVX-512.",
        *_level_machines(found),
    )
    table = _table(["type", "bpw", *names, "interleaved", *names], rows, (0, 2 + len(names)))
    return f"## Speed by instruction set\n\n{text}\n\n{table}\n\n"


def _level_name(found: _Records, level: str = "") -> str:
    about = found.about("speed", level)
    return "" if about is None else about["isa"].upper().replace("AVX5", "AVX-5").replace("AVXV", "AVX-V")


def _level_machines(found: _Records) -> list[str]:
    """Return a sentence on each of the other instruction sets."""
    sentences = []
    for level in found.levels():
        about, f16 = found.about("speed", level), found.speed(T.F16, "random", level)
        assert about is not None
        speeds = "" if f16 is None else f", where F16 has {f16['pp_f16']:.0f} and {f16['tg_f16']:.0f} tokens per second"
        sentences.append(f"{_level_name(found, level)}: {about['threads']} threads, {about['date']}{speeds}.")
    return sentences


def _divergence_table(found: _Records) -> str:
    records = found.all("divergence")
    return _table(header(records), table_rows(records))


def _fallback_table() -> str:
    groups: dict[GGMLType, list[str]] = defaultdict(list)
    for t in sorted(TYPES.values(), key=lambda t: (t.bpw, t.name)):
        if t.fallback is not None and not t.is_interleaved:
            groups[t.fallback].append(f"`{t.name}`")
    rows = []
    for instead, names in sorted(groups.items(), key=lambda g: TYPES[g[0]].bpw):
        rows.append([", ".join(names), f"`{TYPES[instead].name}`", f"{TYPES[instead].bpw:g}"])
    return _table(["asked for", "stored", "bpw"], rows, (0, 1))


# --- text with numbers --------------------------------------------------------------------------------------------
def _wrapped(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)


def _what_was_measured(found: _Records) -> str:
    paragraphs: list[str] = []
    q, s = found.about("quality"), found.about("speed")
    if q is not None:
        paragraphs.append(
            _wrapped(
                f"**Quality**: the bundled demo model ({q['n_params'] / 1e6:.1f} M parameters, BF16,",
                f"{q['bytes'] / 1e6:.2f} MB of tensors) on the second half of the bundled text, {q['chunks']} windows",
                f"of {q['n_ctx']} tokens, {q['scored_tokens']} of them scored. The importance matrix comes from the",
                f"first half ({q['imatrix_tokens']} tokens). The unquantized model has a perplexity of",
                f"{q['ppl']:.2f} ± {q['ppl_error']:.2f}; the text causes this error. It is the same for all types,",
                "so it does not affect their comparison. The standard error of a KLD is about 1 % of it.",
            )
        )
    if s is not None:
        base = {m: found.speed(T.F16, m) for m in MODEL_NAMES}
        sizes = {"demo": s["demo_bytes"], "random": s["random_bytes"]}
        speeds = "; ".join(
            f"{MODEL_NAMES[m]} ({sizes[m] / 1e6:.0f} MB) {r['pp_f16']:.0f} and {r['tg_f16']:.0f}"
            for m, r in base.items()
            if r is not None
        )
        paragraphs.append(
            _wrapped(
                f"**Speed**: {s['threads']} threads of an {_level_name(found)} machine, {s['date']}.",
                "Prompts of 512 tokens (PP) and generation (TG), both with an empty cache.",
                "Each type runs in turns with F16 in one process; the",
                "tables show the median of the ratios. There are two models: the demo model, whose weights fit into",
                "the caches, and a larger llama-like one with random weights (`tools/make_random_model.py`).",
                "Ratios are those of the larger model unless stated otherwise.",
                f"F16 in tokens per second, PP and TG: {speeds}." if speeds else "",
            )
        )
    return "\n\n".join(paragraphs)


def _marks(found: _Records) -> str:
    lines = [
        "¹ `ik quantize` refuses this type without importance matrix unless `--ignore-imatrix-rules` is given, as here."
    ]
    worse = []
    for type in table_types():
        a, b = (found.quality(TYPES[type].name, imatrix) for imatrix in (False, True))
        if a is not None and b is not None and b["kld"] > a["kld"] + 2 * (a["kld_error"] + b["kld_error"]):
            worse.append(f"`{TYPES[type].name}`")
    if worse:
        lines.append(f"The importance matrix makes it worse for {', '.join(worse)}.")
    return "\n".join(lines)


def _fallback_text(found: _Records) -> str:
    about = found.about("quality")
    asked, n_row = T.Q2_K, 1120
    stored = TYPES[asked].fallback
    assert stored is not None
    name, bpw_asked = TYPES[asked].name, TYPES[asked].bpw
    sentences = [
        "Most types store blocks of 256 weights. A tensor whose rows are not a multiple of that gets a type with",
        "blocks of 32, or F16 if 32 does not divide them either. `ik quantize` reports every such tensor, and",
        "`--dry-run` shows it before anything is written. Typical cases are `attn_k_b` with rows of 128 and experts of",
        f"odd widths. It costs space: a row of {n_row} takes {row_size(stored, n_row)} bytes as",
        f"`{TYPES[stored].name}`, where `{name}` would need about {n_row * bpw_asked / 8:.0f}.",
    ]
    if about is not None:
        lengths = " and ".join(str(n) for n in about["row_lengths"])
        fell = sorted({name for r in found.all("quality") for name in r["fallback"]})
        sentences.append(
            f"The rows of the demo model are {lengths} long; "
            + (
                f"in the tables above {', '.join(fell)} fell back."
                if fell
                else "nothing fell back in the tables above."
            )
        )
    return _wrapped(*sentences)
