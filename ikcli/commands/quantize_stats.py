"""`ik quantize-stats`: print the error table of ikcli.study.quantize_stats."""

from __future__ import annotations

from ikcli import log
from ikcli.cli.model import find_model
from ikcli.errors import UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.hostinfo import physical_cores
from ikcli.quant.encoders import available_types
from ikcli.quant.formats import format_by_name
from ikcli.quant.imatrix_file import read_imatrix
from ikcli.rules import pattern_notes
from ikcli.settings.quantize import QuantizeStatsConfig
from ikcli.settings.run import default_model
from ikcli.study import fleet_stats
from ikcli.study.quantize_stats import (
    HEADER,
    StatsParams,
    all_types,
    json_line,
    markdown_line,
    measure_model,
    measured_tensors,
    notes,
)


def run(config: QuantizeStatsConfig) -> int:
    """Measure and print; rows appear as they are ready."""
    n_threads = config.n_threads or physical_cores()
    params = StatsParams(_types(config.types), config.rows, config.include, config.exclude, n_threads)
    imatrix = read_imatrix(config.imatrix) if config.imatrix else None
    file = open_gguf(find_model(config.model, config.hub) or default_model())
    for option, patterns in (("--include", config.include), ("--exclude", config.exclude)):
        for note in pattern_notes(patterns, option, list(file.tensors)):
            log.warn(note)
    for note in notes(measured_tensors(file, params), params):
        log.log(f"quantize-stats: {note}")
    first, as_table = True, config.output_format == "md"
    if config.fleet.wanted:
        rows = fleet_stats.measure_model(file, params, config.imatrix, config.fleet)
    else:
        rows = measure_model(file, params, imatrix)
    for row in rows:
        if config.summary and row.tensor:
            continue
        if first and as_table:
            print("\n".join(HEADER))
        first = False
        print(markdown_line(row) if as_table else json_line(row), flush=True)
    return 0


def _types(given: tuple[str, ...]) -> tuple[GGMLType, ...]:
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    if not names or [n.lower() for n in names] == ["all"]:
        return all_types()
    types = {name: format_by_name(name).type for name in names}
    missing = [name for name, type in types.items() if type not in available_types()]
    if missing:
        raise UsageError(f"--type {missing[0]}: this type cannot be written")
    return tuple(dict.fromkeys(types.values()))
