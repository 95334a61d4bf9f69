"""The advice as a page with two plots over the batch size: of time and of cost."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from plotly.graph_objects import Figure, Scatter
from plotly.subplots import make_subplots

from largebatch.tools.advise.advice import CriticalBatch, KnownRun, OnGpus, steps_and_samples
from largebatch.tools.report.page import GENERATOR, write_page


def write_plot(
    critical: CriticalBatch, known: KnownRun | None, batches: Sequence[int], on_gpus: Sequence[OnGpus], out: Path
) -> None:
    """Write the page; fails as `write_page`."""
    plots: Figure = make_subplots(
        2, subplot_titles=("time: hours", "cost: GPU-hours") if on_gpus else ("steps", "samples")
    )
    curves = defaultdict(list)
    for each in on_gpus:
        curves[f"{each.gpus:,} GPUs"].append((each.batch, sum(each.hours) / 2, each.cost))
    if not curves:
        curves["all GPUs"] = [(batch, *steps_and_samples(critical.samples, batch, known)) for batch in batches]
    for name, points in curves.items():
        x, *values = zip(*points, strict=True)
        for row, y in enumerate(values, 1):
            plots.add_trace(Scatter(x=x, y=y, name=name, mode="lines+markers"), row, 1)
    plots.add_vline(x=critical.samples, line_dash="dash", annotation_text="critical batch")
    if critical.interval:
        plots.add_vrect(*critical.interval, opacity=0.15, line_width=0, fillcolor="gray")
    plots.update_xaxes(type="log", title_text="batch size, samples")
    plots.update_yaxes(type="log")
    plots.update_layout(template="plotly_white", height=800)
    write_page(plots.to_html().replace("<head>", f'<head>{GENERATOR}advise">', 1), out)
