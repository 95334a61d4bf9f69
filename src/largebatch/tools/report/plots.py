"""Drawing with matplotlib: SVG whose colors and fonts are the page's, and PNGs that stand alone.

Colors are those of the light page. In SVG each becomes a CSS variable, so that the page can give it another value in
the dark; `page.css` has both. Text stays text, one user unit a pixel where the plot is `WIDTH` pixels wide.
"""

import io
import re
import warnings
from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from largebatch.tools.report.events import KINDS, events_of
from largebatch.tools.report.panels import Array, Panel, Points, Series
from largebatch.tools.report.runs import ReportedRun
from largebatch.tools.report.styles import INK, MARKS, MUTED, RULE, VARIABLES, style_of

WIDTH, HEIGHT = 400, 270
POINTS_AN_INCH = 72
MANY = 30
"""Points of a curve from which on only some are marked."""
MARK_HEIGHT = 13
AXES = {"step": "optimizer steps", "samples": "training samples"}
SETTINGS = {
    "svg.fonttype": "none",
    # The same plot has the same ids.
    "svg.hashsalt": "largebatch",
    # Each point is drawn where it is.
    "path.simplify": False,
    "lines.scale_dashes": False,
    "font.size": 12,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def svg(panel: Panel, runs: Sequence[ReportedRun], axis: str, label: str, prefix: str) -> str:
    """Return a plot against an axis, "step" or "samples", as an `svg` element for an HTML page.

    The label says what it shows to those who do not see it, and is safe in an attribute; with the prefix the plot's ids
    are the only ones of their names in the page.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure, (_, height) = _figure(panel, runs, axis, (WIDTH, HEIGHT))
        for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
            patch.set_visible(False)
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = buffer.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    # To a hundredth of a pixel.
    body = re.sub(r'\bd="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    for color, variable in VARIABLES.items():
        body = body.replace(color, f"var(--{variable})")
    return f'<svg class="by-{axis}" role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {height}">{body}'


def png(panel: Panel, runs: Sequence[ReportedRun], axis: str, software: str) -> bytes:
    """A plot as a file of its own, with title and legend; `software` is noted in it."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # A run's name may have letters that the font does not.
        warnings.filterwarnings("ignore", "Glyph")
        figure, _ = _figure(panel, runs, axis, (1.6 * WIDTH, 1.4 * HEIGHT))
        figure.axes[0].set_title("\n".join([panel.title, *panel.remarks]), loc="left", fontsize=10)
        _add_legend(figure, panel, runs)
        figure.set_dpi(2 * POINTS_AN_INCH)
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": software})
    return buffer.getvalue()


def _figure(
    panel: Panel, runs: Sequence[ReportedRun], axis: str, size: tuple[float, float]
) -> tuple[Figure, tuple[float, float]]:
    """The plot, and its size in points: higher than `size` by a strip for the marks, where there are any."""
    kinds = marked_kinds(runs)
    strip = MARK_HEIGHT * len(kinds)
    width, height = size[0], size[1] + strip
    figure = Figure(figsize=(width / POINTS_AN_INCH, height / POINTS_AN_INCH), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(size[1], strip), hspace=0) if kinds else None
    lowest = curves = figure.add_subplot(grid[0]) if grid else figure.add_subplot()
    for series in panel.series:
        for line in _curves(series, axis, len(runs)):
            curves.add_line(line)
    _set_axes(curves, panel)
    if grid:
        lowest = figure.add_subplot(grid[1], sharex=curves)
        _add_marks(curves, lowest, runs, kinds, axis)
    # Last: it ends the automatic limits, and what happened may lie behind the last value.
    lowest.set_xlim(left=0)
    lowest.set_xlabel(AXES[axis])
    return figure, (width, height)


def _curves(series: Series, axis: str, num_runs: int) -> Iterator[Line2D]:
    """A run's curve; of a long run its means, before a fainter curve through the extremes."""
    style = style_of(series.run)
    if series.means is not None:
        extremes = Line2D(*_places(series.drawn, axis), color=style.color, linewidth=1.0, alpha=0.35, zorder=1.8)
        extremes.set_gid(f"extremes-{series.run}")
        yield extremes
    curve = series.means or series.drawn
    few = len(curve.values) <= MANY
    line = Line2D(
        *_places(curve, axis),
        color=style.color,
        linewidth=1.5,
        # One run needs no symbols to be told from others, but a single point is nothing without one.
        marker=style.symbol if few or num_runs > 1 else "None",
        markersize=5,
        markevery=None if few else 0.2,
    )
    if style.dashes:
        line.set_dashes(style.dashes)
    line.set_gid(f"run-{series.run}")
    yield line


def _places(points: Points, axis: str) -> tuple[Array, Array]:
    return points.steps if axis == "step" else points.samples, points.values


def _set_axes(axes: Axes, panel: Panel) -> None:
    if panel.logarithmic:
        axes.set_yscale("log")
    axes.autoscale_view()
    if panel.from_zero:
        axes.set_ylim(0, 1.08 * max(float(series.drawn.values.max()) for series in panel.series) or 1.0)
    axes.grid(linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(panel.label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    number = FuncFormatter(lambda value, _: f"{value:g}")
    if panel.logarithmic:
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,), numticks=8))
        axes.yaxis.set_major_formatter(number)
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(EngFormatter(sep="") if panel.from_zero else number)


def _add_marks(curves: Axes, strip: Axes, runs: Sequence[ReportedRun], kinds: Sequence[str], axis: str) -> None:
    """What happened to the runs: a symbol below the curves, a row a kind, and a thin line up to them."""
    curves.tick_params(labelbottom=False)
    strip.set_ylim(len(kinds) - 0.5, -0.5)
    strip.yaxis.set_visible(False)
    strip.spines["left"].set_visible(False)
    for number, run in enumerate(runs):
        color = style_of(number).color
        for event in events_of(run):
            if event.kind not in kinds:
                continue
            place = event.step if axis == "step" else run.samples_at(event.step)
            row = kinds.index(event.kind)
            (mark,) = strip.plot(
                [place], [row], color=color, marker=MARKS[event.kind], markersize=8, linestyle="None", clip_on=False
            )
            mark.set_gid(f"{event.kind}-{number}-{event.step}")
            for axes in (curves, strip):
                axes.axvline(place, color=color, linewidth=0.8, alpha=0.45, zorder=1.5)


def marked_kinds(runs: Sequence[ReportedRun]) -> list[str]:
    """The kinds of events that these runs' plots have marks of."""
    kinds = {event.kind for run in runs for event in events_of(run)}
    return [kind for kind in KINDS if kind in kinds]


def _add_legend(figure: Figure, panel: Panel, runs: Sequence[ReportedRun]) -> None:
    lines = []
    for series in panel.series:
        style = style_of(series.run)
        line = Line2D([], [], color=style.color, marker=style.symbol, markersize=5)
        if style.dashes:
            line.set_dashes(style.dashes)
        lines.append((line, runs[series.run].name))
    lines += [
        (Line2D([], [], linestyle="None", color=INK, marker=MARKS[kind], markersize=8), KINDS[kind])
        for kind in marked_kinds(runs)
    ]
    legend = figure.legend(
        [line for line, _ in lines], ["-"] * len(lines), loc="outside lower left", frameon=False, fontsize=10, ncols=2
    )
    # Afterwards: as labels, names that begin with an underscore are left out.
    for text, (_, name) in zip(legend.get_texts(), lines, strict=True):
        text.set_text(name)
