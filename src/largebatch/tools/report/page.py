"""The report as one HTML file that loads nothing: style and plots are in it, and it has no script."""

import re
import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from largebatch import __version__
from largebatch.tools.report.events import KINDS, Event, events_of
from largebatch.tools.report.panels import Panel
from largebatch.tools.report.plots import AXES, marked_kinds, svg
from largebatch.tools.report.results import NONE, Row, config_rows, result_rows
from largebatch.tools.report.runs import ReportedRun
from largebatch.tools.report.styles import MARKS, Shape, style_of

GENERATOR = f"largebatch report {__version__}"
MOST_NAMES = 3  # in the title
YEAR_10000 = 253_402_300_800  # in seconds since 1970


def page(runs: Sequence[ReportedRun], panels: Sequence[Panel], now: float) -> str:
    """Return the whole file, on runs as they stood at `now`, in seconds since 1970."""
    names = ", ".join(run.name for run in runs)
    title = names if len(runs) <= MOST_NAMES else f"{len(runs)} runs"
    sections = [
        _section("Results", _table("Results", runs, result_rows(runs)) + _notes(runs)),
        _section("Plots", _plots(runs, panels)),
        _section("Differences of the recipes", _differences(runs)) if len(runs) > 1 else "",
        _section("Plan", _plans(runs)),
        _section("History", "".join(_history(run, len(runs) > 1) for run in runs)),
    ]
    style = files("largebatch.tools.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="{GENERATOR}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>As the run folders stood at {_time(now)}.</p>
</header>
<main>
{"".join(sections)}</main>
<footer>{GENERATOR}. Live curves: <code>tensorboard --logdir RUN_DIR/tensorboard</code></footer>
</body>
</html>
"""


def _section(title: str, body: str) -> str:
    name = title.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{body}</section>\n'


def _table(caption: str, runs: Sequence[ReportedRun], rows: Sequence[Row]) -> str:
    head = "".join(f'<th scope="col">{_swatch(number)} {_breakable(run.name)}</th>' for number, run in enumerate(runs))
    body = ""
    for name, values in rows:
        cells = "".join(f"<td>{_breakable(value)}</td>" for value in values)
        body += f'<tr><th scope="row">{_breakable(name)}</th>{cells}</tr>\n'
    # What is wider than the window is scrolled within, also by the keyboard.
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0"><table>\n'
        f"<thead><tr><td></td>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _breakable(text: str) -> str:
    """Text of whose words lines may end behind a dot, underscore or slash, numbers apart."""
    return re.sub(r"([._/])(?=[^\W\d])", r"\1<wbr>", escape(text))


def _notes(runs: Sequence[ReportedRun]) -> str:
    """What the table's numbers mean, each note once for the runs that it is true of."""
    about: dict[str, list[str]] = {}
    for run in runs:
        if not run.summary:
            about.setdefault("not finished; means are over the logged steps", []).append(run.name)
        elif run.summary.get("attempts", 1) > 1:
            about.setdefault("rates are means over the last attempt", []).append(run.name)
        if run.summary.get("mfu_convention"):
            about.setdefault(f"model FLOPs utilization: {run.summary['mfu_convention']}", []).append(run.name)
    shown = ""
    for note, names in about.items():
        whose = "all runs" if len(names) == len(runs) > 1 else ", ".join(names)
        shown += f'<p class="note">{escape(whose)}: {escape(note)}</p>\n'
    return shown


# --- plots ------------------------------------------------------------------------------------------------------------


def _plots(runs: Sequence[ReportedRun], panels: Sequence[Panel]) -> str:
    if not panels:
        return "<p>No step has been logged yet.</p>\n"
    figures = "".join(_figure(number, panel, runs) for number, panel in enumerate(panels))
    choices = "".join(
        f'<input type="radio" name="axis" id="by-{axis}"{" checked" if axis == "step" else ""}>'
        f'<label for="by-{axis}">{name}</label>\n'
        for axis, name in AXES.items()
    )
    return (
        f'<div class="switched" role="radiogroup" aria-label="Horizontal axis">\n<span>against</span>\n{choices}'
        f'{_legend(runs)}<div class="plots">\n{figures}</div></div>\n'
    )


def _legend(runs: Sequence[ReportedRun]) -> str:
    entries = [f"<li>{_swatch(number)} {escape(run.name)}</li>\n" for number, run in enumerate(runs)] * (len(runs) > 1)
    entries += [f"<li>{_mark(kind)} {KINDS[kind]}</li>\n" for kind in marked_kinds(runs)]
    return f'<ul class="legend" aria-label="Legend">\n{"".join(entries)}</ul>\n' if entries else ""


def _figure(number: int, panel: Panel, runs: Sequence[ReportedRun]) -> str:
    plots = "\n".join(
        svg(panel, runs, axis, escape(_in_words(panel, runs, axis)), f"plot{number}-{axis}") for axis in AXES
    )
    caption = f"<figcaption>{'; '.join(panel.remarks)}</figcaption>\n" if panel.remarks else ""
    return f"<figure>\n<h3>{escape(panel.title)}</h3>\n{plots}\n{caption}</figure>\n"


def _in_words(panel: Panel, runs: Sequence[ReportedRun], axis: str) -> str:
    curves = [
        f"{runs[series.run].name} from {series.drawn.values[0]:.4g} at step {series.drawn.steps[0]:,.0f} "
        f"to {series.drawn.values[-1]:.4g} at step {series.drawn.steps[-1]:,.0f}"
        for series in panel.series
    ]
    return f"{panel.title} against {AXES[axis]}: {'; '.join(curves)}"


def _swatch(run: int) -> str:
    """How a run is drawn."""
    style = style_of(run)
    dashes = f' stroke-dasharray="{" ".join(map(str, style.dashes))}"' if style.dashes else ""
    return (
        f'<svg class="swatch" style="color: var(--run-{style.number})" viewBox="0 0 40 12" aria-hidden="true">'
        f'<path d="M1 6H39"{dashes}/>{_polygon(style.symbol, 20, 6, 4)}</svg>'
    )


def _mark(kind: str) -> str:
    return f'<svg class="mark" viewBox="0 0 14 14" aria-hidden="true">{_polygon(MARKS[kind], 7, 7, 6)}</svg>'


def _polygon(shape: Shape, x: float, y: float, radius: float) -> str:
    points = " ".join(f"{x + radius * dx:.2f},{y - radius * dy:.2f}" for dx, dy in shape[:-1])
    return f'<polygon points="{points}"/>'


# --- words ------------------------------------------------------------------------------------------------------------


def _differences(runs: Sequence[ReportedRun]) -> str:
    rows = config_rows(runs)
    if not rows:
        return "<p>None: the runs have the same recipe.</p>\n"
    return _table("Differences of the recipes", runs, rows)


def _plans(runs: Sequence[ReportedRun]) -> str:
    """Each plan once, with the names of the runs that have it."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(_plan(run), []).append(run.name)
    if len(runs) == 1:
        return "".join(names)
    return "".join(f"<h3>{escape(', '.join(whose))}</h3>\n{plan}" for plan, whose in names.items())


def _plan(run: ReportedRun) -> str:
    if run.words is None:
        return "<p>plan.json is of another version of largebatch, whose plans this one has no words for.</p>\n"
    body = "".join(
        f"<div><dt>{name}</dt><dd>{'<br>'.join(map(escape, lines))}</dd></div>\n" for name, lines in run.words
    )
    return f"<dl>\n{body}</dl>\n"


def _history(run: ReportedRun, several: bool) -> str:
    events = events_of(run)
    items = "".join(_event(event) for event in events)
    body = f'<ol class="history">\n{items}</ol>\n' if events else "<p>history.jsonl is empty or missing.</p>\n"
    return f"<h3>{escape(run.name)}</h3>\n{body}" if several else body


def _event(event: Event) -> str:
    mark = _mark(event.kind) if event.kind in MARKS else ""
    when = _time(event.time) if 0 < event.time < YEAR_10000 else NONE
    return (
        f'<li data-kind="{escape(event.kind)}" data-step="{event.step}"><span class="when">{when}</span> '
        f'<span class="step">step {event.step:,}</span> {mark} <span>{escape(event.text)}</span></li>\n'
    )


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
