"""The numbers of runs side by side, and what their recipes differ in: as text, row by row."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from largebatch.config import flatten
from largebatch.tools.report.events import events_of
from largebatch.tools.report.runs import Line, ReportedRun, is_number

NONE = "–"
LOWER_IS_BETTER = ("loss", "perplexity", "error")
PLACE = ("step", "samples", "epoch")
SHOWN_VERSIONS = ("largebatch", "torch", "accelerate", "deepspeed", "transformers")
"""The others are in history.jsonl."""

Row = tuple[str, list[str]]


def result_rows(runs: Sequence[ReportedRun]) -> list[Row]:
    """A row a quantity: its name, and its value in each run."""
    rows: list[Row] = [
        ("outcome", [_outcome(run) for run in runs]),
        ("recipe", [_of_last_start(run, "recipe") for run in runs]),
        ("task", [str(run.plan.get("task", NONE)) for run in runs]),
        ("processes x strategy", [_processes(run) for run in runs]),
        ("global batch size, largest", [_count(run.plan.get("global_batch_size")) for run in runs]),
        ("peak learning rate", [_number(run.plan.get("peak_lr")) for run in runs]),
        ("steps", [f"{run.step:,} of {run.plan.get('total_steps', 0):,}" for run in runs]),
        ("samples", [_count(run.samples_at(run.step)) for run in runs]),
        ("training loss of the last logged step", [_last(run, "loss") for run in runs]),
    ]
    for name in evaluated(runs):
        which, extreme = ("lowest", min) if lower_is_better(name) else ("highest", max)
        best = partial(extreme, key=itemgetter(name))
        rows.append((f"evaluation: {name}, last", [_evaluation(run, name, itemgetter(-1)) for run in runs]))
        rows.append((f"evaluation: {name}, {which}", [_evaluation(run, name, best) for run in runs]))
    rows += [
        ("time in training", [_duration(run) for run in runs]),
        ("samples per second, mean", [_mean_rate(run, "samples_per_second") for run in runs]),
        ("tokens per second, mean", [_mean_rate(run, "tokens_per_second") for run in runs]),
        ("model FLOPs utilization, mean", [_utilization(run) for run in runs]),
        ("starts", [_count(len(run.starts)) for run in runs]),
        ("steps that were not finite", [_count(_kinds(run, "skipped")) for run in runs]),
        ("checkpoints not written", [_count(_kinds(run, "checkpoint_failed")) for run in runs]),
        ("versions, of the last start", [_versions(run) for run in runs]),
    ]
    return [(name, values) for name, values in rows if any(value != NONE for value in values)]


def lower_is_better(name: str) -> bool:
    """Whether the best evaluation of this name is the lowest."""
    return any(word in name for word in LOWER_IS_BETTER)


def evaluated(runs: Sequence[ReportedRun]) -> list[str]:
    """Names of what any of the runs has evaluated, in the order in which they come up."""
    lines = (line for run in runs for line in run.evaluations)
    return list(dict.fromkeys(name for line in lines for name in line if name not in PLACE and is_number(line, name)))


def config_rows(runs: Sequence[ReportedRun]) -> list[Row]:
    """A row a field in which the recipes differ: its name, and its value in each as JSON."""
    configs = [flatten(run.config) for run in runs]
    fields = sorted({field for config in configs for field in config})
    rows = [
        (field, [json.dumps(config[field], ensure_ascii=False) if field in config else NONE for config in configs])
        for field in fields
    ]
    return [(field, values) for field, values in rows if len(set(values)) > 1]


def _outcome(run: ReportedRun) -> str:
    outcome = str(run.status.get("outcome", NONE))
    message = run.status.get("message")
    if outcome == "running":
        # Whether the process is alive, the folder does not say without being locked.
        return f"running, or killed; {message}"
    return f"{outcome} {message}" if message else outcome


def _processes(run: ReportedRun) -> str:
    """Of the last start."""
    about = run.summary or (run.starts[-1] if run.starts else {})
    return f"{about.get('world_size', run.plan.get('world_size', '?'))} x {about.get('strategy', '?')}"


def _of_last_start(run: ReportedRun, name: str) -> str:
    return str(run.starts[-1].get(name, NONE)) if run.starts else NONE


def _versions(run: ReportedRun) -> str:
    versions = run.starts[-1].get("versions", {}) if run.starts else {}
    return ", ".join(f"{name} {versions[name]}" for name in SHOWN_VERSIONS if name in versions) or NONE


def _last(run: ReportedRun, name: str) -> str:
    lines = [line for line in run.metrics if is_number(line, name)]
    return _number(lines[-1][name]) if lines else NONE


def _evaluation(run: ReportedRun, name: str, choose: Callable[[list[Line]], Line]) -> str:
    lines = [line for line in run.evaluations if is_number(line, name)]
    return f"{_number(choose(lines)[name])} after step {choose(lines)['step']:,}" if lines else NONE


def _duration(run: ReportedRun) -> str:
    seconds = run.summary.get("train_seconds") or (run.metrics[-1].get("seconds") if run.metrics else None)
    if seconds is None:
        return NONE
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


def _mean_rate(run: ReportedRun, name: str) -> str:
    """Of a finished run as its last attempt measured it; else the mean of the logged rates, by their time."""
    value = run.summary.get(name)
    if value is None:
        weighted, seconds, before = 0.0, 0.0, 0.0
        for line in run.metrics:
            if is_number(line, name) and is_number(line, "seconds"):
                elapsed = max(line["seconds"] - before, 0.0)
                weighted, seconds, before = weighted + line[name] * elapsed, seconds + elapsed, line["seconds"]
        value = weighted / seconds if seconds else None
    return NONE if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _utilization(run: ReportedRun) -> str:
    value = run.summary.get("mfu")
    return NONE if value is None else f"{value:.1%}"


def _kinds(run: ReportedRun, kind: str) -> int:
    return sum(event.kind == kind for event in events_of(run))


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"
