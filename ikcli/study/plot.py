"""Plot a study: the divergence of every group of tensors, one colour per type."""

from __future__ import annotations

from pathlib import Path

from ikcli.bench.sweep_plot import new_figure
from ikcli.gguf.types import TYPES
from ikcli.study.study import Study


def draw(study: Study, path: Path) -> None:
    """Write the plot in the format of the suffix; raises like `ikcli.bench.sweep_plot.check_output`."""
    titles = study.titles()
    figure = new_figure(path, 9, 1.5 + 0.22 * len(titles))
    axes = figure.subplots()
    for type in study.types():
        points = [(i, study.get(t, type)) for i, t in enumerate(titles)]
        shown = [(i, f) for i, f in points if f is not None and f.kld > 0]
        axes.errorbar(
            [f.kld for _, f in shown],
            [i for i, _ in shown],
            xerr=[min(f.error, 0.99 * f.kld) for _, f in shown],
            fmt="o",
            markersize=4,
            label=TYPES[type].name,
        )
    axes.set_xscale("log")
    axes.set_yticks(range(len(titles)), titles, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("KL divergence if only these tensors are quantized, nats per token")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=6, fontsize=8)
    figure.savefig(path)
