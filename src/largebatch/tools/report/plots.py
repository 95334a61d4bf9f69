"""Chooses what to plot, and draws it with matplotlib as SVG that has the colors and fonts of the page.

The colors are those of the light page. In the SVG each becomes a CSS variable, to which `page.css` gives another value
in dark mode. Text stays text, and a unit is a pixel where the plot is `WIDTH` pixels wide.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import offset_copy
from numpy.typing import NDArray

from largebatch.errors import counted
from largebatch.tools.report.results import evaluated, lower_is_better
from largebatch.tools.report.runs import ReportedRun, number

Array = NDArray[np.float64]

WIDTH, HEIGHT = 400, 270
POINTS_PER_INCH = 72
MARK_HEIGHT = 13
BINS = 400  # equal parts of the steps of a long run; each is about a pixel wide
MOST_DOTS = 30  # a curve of at most this many points has a dot at each
LARGE_RANGE = 10.0  # ratio of the largest to the smallest value from which on a scale is logarithmic where it may be
AXES = {"step": "optimizer steps", "samples": "training samples"}

INK, MUTED, RULE = "#1b1f24", "#59636e", "#d9dee3"
COLORS = ["#0068a8", "#c04a00", "#00784f", "#a0307a", "#7a5c00", "#5c5f66"]
"""Contrast with the page is at least 3, and at least 4.5 for text, in light and dark mode (WCAG 2.2)."""
DASHES = [(), (6, 2), (2, 1.5), (7, 2, 2, 2)]  # neighboring runs can be told apart without seeing colors
VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule"} | {color: f"run-{n}" for n, color in enumerate(COLORS)}
"""The name of each color in the page's style sheet."""
MARKS = {
    "restarted": ("^", "▲", "started again"),
    "stopped": ("s", "■", "stopped on request"),
    "failed": ("X", "✖", "failed"),
    "skipped": ("D", "◆", "step skipped: not finite"),
    "checkpoint_failed": ("v", "▼", "checkpoint not written"),
    "checkpoint_not_used": ("*", "★", "checkpoint not used"),
}
"""Events that plots mark: matplotlib's symbol, the same as a character, and what it means."""
SETTINGS = {
    "svg.fonttype": "none",
    # The same plot has the same ids.
    "svg.hashsalt": "largebatch",
    "path.simplify": False,
    "lines.scale_dashes": False,
    "font.size": 12,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Panel:
    """One plot: a quantity, with a curve for each run that has logged it."""

    title: str
    label: str  # of the vertical axis, with the unit
    curves: dict[int, Array]  # by number of the run; shape (3, points): steps, samples, values
    num_not_finite: int  # logged values that cannot be drawn
    scale: str  # "linear", "log", or "from zero"

    @property
    def remarks(self) -> list[str]:
        """Remarks to show below the plot."""
        remarks = ["logarithmic scale"] if self.scale == "log" else []
        longest = max(curve.shape[1] for curve in self.curves.values())
        if longest > 2 * BINS:
            remarks.append(
                f"{longest:,} values: means of {BINS} equal parts of a run, with each part's extremes drawn faintly"
            )
        if self.num_not_finite:
            remarks.append(f"not shown, because not finite: {counted(self.num_not_finite, 'value')}")
        return remarks


def panels_of(runs: Sequence[ReportedRun]) -> list[Panel]:
    """The plots of runs; quantities that no run has logged are omitted."""
    units = {run.plan.loss_unit for run in runs if run.plan}
    loss_label = f"mean per {units.pop()[:-1]}" if len(units) == 1 else "loss"
    quantities = [("loss", "Training loss", loss_label, "log", False)]
    for name in evaluated(runs):
        quantities.append((name, f"Evaluation: {name}", name, "log" if lower_is_better(name) else "linear", True))
    quantities += [
        ("lr", "Learning rate", "learning rate", "linear", False),
        ("grad_norm", "Gradient norm", "global norm before clipping", "log", False),
        ("samples_per_second", "Throughput", "samples per second", "from zero", False),
        ("tokens_per_second", "Throughput in tokens", "tokens per second", "from zero", False),
        ("mfu", "Model FLOPs utilization", "share of the devices' peak", "from zero", False),
    ]
    if any(run.plan and len(run.plan.timeline.phases) > 1 for run in runs):
        quantities.append(("global_batch_size", "Global batch size", "samples per step", "from zero", False))
    return [panel for quantity in quantities if (panel := _panel(runs, *quantity)).curves]


def _panel(runs: Sequence[ReportedRun], name: str, title: str, label: str, scale: str, of_evaluations: bool) -> Panel:
    curves, num_not_finite = {}, 0
    for index, run in enumerate(runs):
        lines = run.evaluations if of_evaluations else run.metrics
        logged = [line for line in lines if line.get(name) is not None and number(line, "samples") is not None]
        drawn = [line for line in logged if number(line, name) is not None]
        if drawn:
            curves[index] = np.array([[line[key] for line in drawn] for key in ("step", "samples", name)], dtype=float)
            num_not_finite += len(logged) - len(drawn)
    values = np.concatenate([curve[2] for curve in curves.values()] or [[]])
    if scale == "log" and not (len(values) and 0 < LARGE_RANGE * values.min() < values.max()):
        scale = "linear"
    return Panel(title, label, curves, num_not_finite, scale)


def marked_kinds(runs: Sequence[ReportedRun]) -> list[str]:
    """The kinds of events that these runs' plots mark."""
    return [kind for kind in MARKS if any(event.kind == kind for run in runs for event in run.events)]


def svg(panel: Panel, runs: Sequence[ReportedRun], axis: str, prefix: str) -> str:
    """Return a plot against one of `AXES` as an `svg` element; `prefix` makes its ids unique in an HTML page."""
    height = HEIGHT + MARK_HEIGHT * len(marked_kinds(runs))
    buffer = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure((WIDTH / POINTS_PER_INCH, height / POINTS_PER_INCH), layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        for run, curve in panel.curves.items():
            _draw_curve(axes, run, curve, axis)
        _set_axes(axes, panel)
        _draw_marks(figure, axes, runs, axis)
        axes.set_xlim(left=0)
        axes.set_xlabel(AXES[axis])
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    # Paths to a hundredth of a pixel.
    body = re.sub(r'\bd="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    for color, variable in VARIABLES.items():
        body = body.replace(color, f"var(--{variable})")
    label = escape(_in_words(panel, runs, axis))
    return f'<svg class="by-{axis}" role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {height}">{body}'


def _in_words(panel: Panel, runs: Sequence[ReportedRun], axis: str) -> str:
    curves = [
        f"{runs[run].name} from {values[0]:.4g} at step {steps[0]:,.0f} to {values[-1]:.4g} at step {steps[-1]:,.0f}"
        for run, (steps, _, values) in panel.curves.items()
    ]
    return f"{panel.title} against {AXES[axis]}: {'; '.join(curves)}"


def _draw_curve(axes: Axes, run: int, curve: Array, axis: str) -> None:
    row, color, dashes = list(AXES).index(axis), COLORS[run % len(COLORS)], DASHES[run % len(DASHES)]
    if curve.shape[1] > 2 * BINS:
        edges = np.linspace(curve[0, 0], curve[0, -1], BINS + 1)[1:-1]
        bins = [part for part in np.split(curve, np.searchsorted(curve[0], edges, side="right"), axis=1) if part.size]
        # A spike of a single step keeps its place and its height.
        extremes = np.hstack([part[:, sorted((part[2].argmin(), part[2].argmax()))] for part in bins])
        axes.plot(extremes[row], extremes[2], color=color, linewidth=1, alpha=0.35, zorder=1.8, gid=f"extremes-{run}")
        curve = np.stack([part.mean(axis=1) for part in bins], axis=1)
    axes.plot(
        curve[row],
        curve[2],
        color=color,
        linestyle=(0, dashes) if dashes else "-",
        marker="o" if curve.shape[1] <= MOST_DOTS else "None",
        markersize=4,
        gid=f"run-{run}",
    )


def _set_axes(axes: Axes, panel: Panel) -> None:
    axes.grid(linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(panel.label.encode(errors="replace").decode())
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.scale == "log":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,), numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain if axes.get_ylim()[1] < 1000 else EngFormatter(sep=""))
    if panel.scale == "from zero":
        axes.set_ylim(bottom=0)


def _draw_marks(figure: Figure, axes: Axes, runs: Sequence[ReportedRun], axis: str) -> None:
    """Mark what happened to the runs: a symbol above the curves, in a row for each kind, and a thin line below it."""
    kinds = marked_kinds(runs)
    for run, reported in enumerate(runs):
        color = COLORS[run % len(COLORS)]
        for event in (event for event in reported.events if event.kind in MARKS):
            place = event.step if axis == "step" else reported.samples_at(event.step)
            height = MARK_HEIGHT * (len(kinds) - kinds.index(event.kind) - 0.5)
            axes.plot(
                [place],
                [1.0],
                transform=offset_copy(axes.get_xaxis_transform(), figure, y=height, units="points"),
                color=color,
                marker=MARKS[event.kind][0],
                markersize=8,
                clip_on=False,
                gid=f"{event.kind}-{run}-{event.step}",
            )
            axes.axvline(place, color=color, linewidth=0.8, alpha=0.45, zorder=1.5)
