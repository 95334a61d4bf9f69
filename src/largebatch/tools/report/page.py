"""The report as one HTML file that loads nothing else: style and plots are in it, and it has no script."""

import time
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from largebatch import __version__
from largebatch.errors import UserError
from largebatch.plan.explain import bodies
from largebatch.storage.files import replace_file
from largebatch.tools.report.plots import AXES, COLORS, DASHES, MARKS, marked_kinds, panels_of, svg
from largebatch.tools.report.results import config_rows, result_rows
from largebatch.tools.report.runs import ReportedRun

Plan = tuple[tuple[str, tuple[str, ...]], ...]

GENERATOR = '<meta name="generator" content="largebatch report '
"""Text among the first bytes of the pages of all versions."""
FIRST_BYTES = 4096
MOST_NAMES = 3  # in the title


def write_report(runs: Sequence[ReportedRun], out: Path) -> None:
    """Write the page to `out`, in place of an older report.

    Raises:
        UserError: The file exists and is not a report, or it cannot be written.
    """
    try:
        if out.exists() and GENERATOR.encode() not in out.read_bytes()[:FIRST_BYTES]:
            raise UserError(f"{out} exists and is not a report; choose another --out, or move it away")
        # Names of files may have lone surrogates, which cannot be encoded.
        content = page(runs, time.time()).encode(errors="replace")
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, [memoryview(content)])
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}; choose another --out") from error


def page(runs: Sequence[ReportedRun], now: float) -> str:
    """Return the whole file, about runs as they stood at `now`, in seconds since 1970."""
    # Each plan in words, with the names of the runs that have it; without words if it cannot be read.
    plans: dict[Plan, list[str]] = {}
    for run in runs:
        plan = tuple((name, tuple(lines)) for name, lines in (bodies(run.plan) if run.plan else ()))
        plans.setdefault(plan, []).append(run.name)
    environment = Environment(
        loader=PackageLoader("largebatch.tools.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["utc"] = lambda seconds: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    return environment.get_template("page.html").render(
        version=__version__,
        now=now,
        title=", ".join(run.name for run in runs) if len(runs) <= MOST_NAMES else f"{len(runs)} runs",
        runs=runs,
        results=result_rows(runs),
        plots=[
            (panel, [svg(panel, runs, axis, f"plot{number}-{axis}") for axis in AXES])
            for number, panel in enumerate(panels_of(runs))
        ],
        differences=config_rows(runs),
        plans=plans,
        axes=AXES,
        colors=COLORS,
        dashes=DASHES,
        marks=[MARKS[kind] for kind in marked_kinds(runs)],
        mark_of=MARKS,
    )
