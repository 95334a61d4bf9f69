"""The report as one HTML file that loads nothing else: tables, and plotly's curves with plotly's own script."""

import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader

from largebatch import __version__
from largebatch.errors import UserError
from largebatch.plan.expected import compare
from largebatch.storage.files import Line, replace_file
from largebatch.system.failures import Kind
from largebatch.system.regular_file import read_bytes
from largebatch.tools.report.curves import curves_html
from largebatch.tools.reported_runs import EVALUATION, ReportedRun, columns

GENERATOR = b'<meta name="generator" content="largebatch report '
"""In the pages of all versions."""
NONE = "–"
MAX_EVENTS = 20
MAX_EVENT_CHARACTERS = 300
# What most decides the outcome: these fields precede others.
DECISIVE = ("batch.", "learning_rate.", "model.", "optimizer.")


def write_page(text: str, out: Path) -> None:
    """Write a page to `out`, in place of an older one.

    Raises:
        UserError: The file exists and is not a report.
        OSError: It cannot be written.
    """
    if out.exists() and GENERATOR not in read_bytes(out):
        raise UserError(f"{out} exists and is not a report; choose another --out, or move it away")
    # Names of files may have lone surrogates, which cannot be encoded.
    content = text.encode(errors="replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, content)


def page(runs: Sequence[ReportedRun], axis: str, sweep: str) -> str:
    """Return the whole file, with curves against `axis`; `sweep` is the table of the sweep that the runs are from."""
    names = [run.name for run in runs]
    fields = _side_by_side(runs, lambda run: run.config)
    fields.sort(key=lambda row: (_is_shared(row), not row[0].startswith(DECISIVE)))
    # What is off in all runs is no difference: a run without warmup has no length of it, others have none in steps.
    differences = [row for row in fields if not _is_shared(row) and {*row[1:]} - {NONE, "null"}]
    by_run = [["run", *names], *_side_by_side(runs, _outcome), *_side_by_side(runs, _progress), *differences]
    recipes = dict.fromkeys(_started_with(run, "recipe") for run in runs)
    recipes.pop(NONE, None)
    environment = Environment(loader=PackageLoader(__package__, "."), autoescape=True, trim_blocks=True)
    return environment.get_template("page.html").render(
        version=__version__,
        now=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs compared",
        recipes=", ".join(recipes),
        runs=list(zip(*by_run, strict=True)),
        curves=curves_html(runs, axis),
        sweep=sweep,
        fields=[["", *names], *fields],
        results=[["", *names], *_side_by_side(runs, _results)],
    )


def _outcome(run: ReportedRun) -> dict[str, str]:
    """The columns that show what came out of a run."""
    outcome = {}
    for title, (_, values) in run.curves.items():
        if title == "loss" or title.startswith(EVALUATION):
            outcome[f"{title}, last and range"] = f"{values[-1]:.4g}\n{values.min():.4g} to {values.max():.4g}"
    if run.plan and (figure := compare(run.plan, run.evaluations)):
        outcome["expected"] = str(figure)
    return outcome


def _progress(run: ReportedRun) -> dict[str, str]:
    """The columns that show where a run has trained, and how far it has come."""
    state = {}
    if run.start:
        state["processes x strategy"] = f"{_started_with(run, 'world_size')} x {_started_with(run, 'strategy')}"
    if run.ending:
        is_failure = run.ending.kind not in (Kind.FINISHED, Kind.STOPPED)
        state["status"] = f"{'failed' if is_failure else run.ending.kind} {run.ending.message}"
    elif run.step == run.last_step:
        state["status"] = f"after its last step, {run.step:,}"
    else:
        # Only the lock of the folder would tell whether the process is alive.
        state["status"] = f"running, or killed; after step {run.step:,}"
    return state


def _results(run: ReportedRun) -> dict[str, str]:
    """The details of a run, by the names of rows."""
    results = {}
    if run.plan is None:
        results["plan"] = "damaged, or written by a different version of largebatch"
    for axis, (place,) in run.places([run.step]).items():
        results[f"{axis}, last known"] = f"{place:,.2f}".removesuffix(".00")
    for name in ("samples_per_second", "tokens_per_second", "mfu", "data_wait_seconds"):
        # Each line is weighted by the time in training since the last one.
        values, seconds = columns(run.metrics, name, "seconds")
        weights = np.diff(seconds, prepend=0.0).clip(0.0)
        if weights.any():
            results[f"{name}, mean"] = f"{np.average(values, weights=weights):,.3f}"
    results["recipe"] = _started_with(run, "recipe")
    results["history"] = "\n".join(_event(line) for line in run.history[-MAX_EVENTS:]) or NONE
    versions = run.start.get("versions")
    if isinstance(versions, dict):
        results["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return results


def _event(line: Line) -> str:
    """What happened in a run, and where it was started, or why."""
    about = f"on {line.get('world_size')} x {line.get('strategy')}"
    if line.get("event") != "started":
        about = str(line.get("message") or line.get("reason") or "")
    return textwrap.shorten(f"after step {line.get('step')}: {line.get('event')} {about}", MAX_EVENT_CHARACTERS)


def _started_with(run: ReportedRun, name: str) -> str:
    return str(run.start.get(name) or NONE)


def _side_by_side(runs: Sequence[ReportedRun], describe: Callable[[ReportedRun], dict[str, str]]) -> list[list[str]]:
    """A row for each name that some run is described by, with its text for every run."""
    columns_of_runs = [describe(run) for run in runs]
    names = dict.fromkeys(name for column in columns_of_runs for name in column)
    return [[name, *(column.get(name, NONE) for column in columns_of_runs)] for name in names]


def _is_shared(row: Sequence[str]) -> bool:
    """Whether the texts after the name are all the same."""
    return len(set(row[1:])) == 1
