"""The report as one HTML file that loads nothing else: style and plots are in it, and it has no script."""

import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from largebatch import __version__
from largebatch.errors import UserError
from largebatch.plan.explain import bodies
from largebatch.storage.files import replace_file
from largebatch.tools.report.plots import AXES, COLORS, DASHES, MARKS, marked_kinds, panels_of, svg
from largebatch.tools.report.results import NONE, Row, config_rows, result_rows
from largebatch.tools.report.runs import Event, ReportedRun

GENERATOR = '<meta name="generator" content="largebatch report '
"""Text among the first bytes of the pages of all versions."""
FIRST_BYTES = 4096
MOST_NAMES = 3  # in the title
YEAR_10000 = 253_402_300_800  # in seconds since 1970


def write_report(runs: Sequence[ReportedRun], out: Path) -> None:
    """Write the page to `out`, in place of an older report.

    Raises:
        UserError: The file exists and is not a report, or it cannot be written.
    """
    try:
        if out.exists() and GENERATOR.encode() not in out.read_bytes()[:FIRST_BYTES]:
            raise UserError(f"{out} exists and is not a report; choose another --out, or move it away")
        # JSON may have lone surrogates, which cannot be encoded.
        content = page(runs, time.time()).encode(errors="replace")
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, [memoryview(content)])
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}; choose another --out") from error


def page(runs: Sequence[ReportedRun], now: float) -> str:
    """Return the whole file, about runs as they stood at `now`, in seconds since 1970."""
    title = escape(", ".join(run.name for run in runs) if len(runs) <= MOST_NAMES else f"{len(runs)} runs")
    sections = {
        "Results": _table("Results", runs, result_rows(runs)),
        "Plots": _plots(runs),
        "Differences between the recipes": _differences(runs) if len(runs) > 1 else "",
        "Plan": _plans(runs),
        "History": "".join(f"<h3>{escape(run.name)}</h3>\n{_history(run)}" for run in runs),
    }
    body = "".join(
        f"<section>\n<h2>{name}</h2>\n{section}</section>\n" for name, section in sections.items() if section
    )
    style = files("largebatch.tools.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{GENERATOR}{__version__}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>As the run folders stood at {_time(now)}.</p>
</header>
<main>
{body}</main>
<footer>largebatch report {__version__}. Live curves: <code>tensorboard --logdir RUN_DIR/tensorboard</code></footer>
</body>
</html>
"""


def _table(caption: str, runs: Sequence[ReportedRun], rows: Sequence[Row]) -> str:
    head = "".join(f'<th scope="col">{_swatch(number)} {escape(run.name)}</th>' for number, run in enumerate(runs))
    body = ""
    for name, values in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        body += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>\n'
    # A table wider than the window scrolls by itself, with the keyboard too.
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0"><table>\n'
        f"<thead><tr><td></td>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )


def _swatch(run: int) -> str:
    """A sample of how a run's curves are drawn."""
    color, dashes = run % len(COLORS), " ".join(map(str, DASHES[run % len(DASHES)]))
    return (
        f'<svg class="swatch" style="color: var(--run-{color})" viewBox="0 0 40 12" aria-hidden="true">'
        f'<path d="M1 6H39" stroke-dasharray="{dashes}"/></svg>'
    )


def _plots(runs: Sequence[ReportedRun]) -> str:
    panels = panels_of(runs)
    if not panels:
        return "<p>No step has been logged yet.</p>\n"
    choices = "".join(
        f'<input type="radio" name="axis" id="by-{axis}"{" checked" if axis == "step" else ""}>'
        f'<label for="by-{axis}">{name}</label>\n'
        for axis, name in AXES.items()
    )
    legend = [f"{_swatch(number)} {escape(run.name)}" for number, run in enumerate(runs)]
    legend += [f"{MARKS[kind][1]} {MARKS[kind][2]}" for kind in marked_kinds(runs)]
    entries = "".join(f"<li>{entry}</li>\n" for entry in legend)
    figures = ""
    for number, panel in enumerate(panels):
        plots = "\n".join(svg(panel, runs, axis, f"plot{number}-{axis}") for axis in AXES)
        caption = f"<figcaption>{'; '.join(panel.remarks)}</figcaption>\n" if panel.remarks else ""
        figures += f"<figure>\n<h3>{escape(panel.title)}</h3>\n{plots}\n{caption}</figure>\n"
    return (
        f'<div class="switched" role="radiogroup" aria-label="Horizontal axis">\n<span>against</span>\n{choices}'
        f'<ul class="legend" aria-label="Legend">\n{entries}</ul>\n<div class="plots">\n{figures}</div></div>\n'
    )


def _differences(runs: Sequence[ReportedRun]) -> str:
    rows = config_rows(runs)
    same = "<p>None: all runs have the same recipe.</p>\n"
    return _table("Differences between the recipes", runs, rows) if rows else same


def _plans(runs: Sequence[ReportedRun]) -> str:
    """Each plan once, with the names of the runs that have it."""
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(_plan(run), []).append(run.name)
    return "".join(f"<h3>{escape(', '.join(whose))}</h3>\n{plan}" for plan, whose in names.items())


def _plan(run: ReportedRun) -> str:
    if run.plan is None:
        return "<p>plan.json is damaged, or was written by a different version of largebatch.</p>\n"
    rows = (f"<dt>{name}</dt><dd>{'<br>'.join(map(escape, lines))}</dd>\n" for name, lines in bodies(run.plan))
    return f"<dl>\n{''.join(rows)}</dl>\n"


def _history(run: ReportedRun) -> str:
    if not run.events:
        return "<p>history.jsonl is empty or missing.</p>\n"
    return f'<ol class="history">\n{"".join(map(_event, run.events))}</ol>\n'


def _event(event: Event) -> str:
    symbol = MARKS[event.kind][1] if event.kind in MARKS else ""
    when = _time(event.time) if 0 < event.time < YEAR_10000 else NONE
    return (
        f'<li data-kind="{escape(event.kind)}" data-step="{event.step}"><span class="when">{when}</span> '
        f'<span class="step">step {event.step:,}</span> {symbol} {escape(event.text)}</li>\n'
    )


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
