"""The numbers of runs side by side, and how their recipes differ: as text, row by row."""

import json
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from largebatch.config import flatten
from largebatch.tools.report.runs import ReportedRun, number

NONE = "–"
LOWER_IS_BETTER = ("loss", "perplexity", "error")
PLACE = ("step", "samples", "epoch")
SHOWN = ("largebatch", "torch", "accelerate", "deepspeed", "transformers")
"""Packages whose versions are shown; those of the others are in history.jsonl."""

Row = tuple[str, list[str]]


def result_rows(runs: Sequence[ReportedRun]) -> list[Row]:
    """One row per quantity: its name, and its value in each run. Rows without any value are omitted."""
    columns = [_results(run, evaluated(runs)) for run in runs]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    return [(name, values) for name, values in rows if set(values) != {NONE}]


def config_rows(runs: Sequence[ReportedRun]) -> list[Row]:
    """One row per field in which the recipes differ: its name, and its value in each as JSON."""
    configs = [flatten(run.config) for run in runs]
    rows = [
        (field, [json.dumps(config[field], ensure_ascii=False) if field in config else NONE for config in configs])
        for field in sorted(set().union(*configs))
    ]
    return [(field, values) for field, values in rows if len(set(values)) > 1]


def lower_is_better(name: str) -> bool:
    """Whether the best evaluation of this name is the lowest."""
    return any(word in name for word in LOWER_IS_BETTER)


def evaluated(runs: Sequence[ReportedRun]) -> list[str]:
    """Names of what any of the runs has evaluated, in the order of their first appearance."""
    lines = (line for run in runs for line in run.evaluations)
    names = (name for line in lines for name in line if name not in PLACE and number(line, name) is not None)
    return list(dict.fromkeys(names))


def _results(run: ReportedRun, evaluations: Sequence[str]) -> dict[str, str]:
    start, plan = (run.starts or [{}])[-1], run.plan
    kinds = [event.kind for event in run.events]
    versions = [f"{name} {version}" for name, version in start.get("versions", {}).items() if name in SHOWN]
    losses = [loss for line in run.metrics if (loss := number(line, "loss")) is not None]
    results = {
        "outcome": _outcome(run),
        "recipe": start.get("recipe") or NONE,
        "task": plan.task if plan else NONE,
        "processes x strategy": f"{start.get('world_size', '?')} x {start.get('strategy', '?')}" if start else NONE,
        "global batch size, largest": f"{plan.global_batch_size:,}" if plan else NONE,
        "peak learning rate": f"{plan.peak_lr:.4g}" if plan else NONE,
        "steps": f"{run.step:,} of {plan.total_steps:,}" if plan else f"{run.step:,}",
        "samples": f"{run.samples_at(run.step):,.0f}",
        "training loss of the last logged step": f"{losses[-1]:.4g}" if losses else NONE,
    }
    for name in evaluations:
        which, extreme = ("lowest", min) if lower_is_better(name) else ("highest", max)
        found = [(value, line["step"]) for line in run.evaluations if (value := number(line, name)) is not None]
        best = extreme(found, key=itemgetter(0), default=None)
        for shown, chosen in (("last", found[-1] if found else None), (which, best)):
            results[f"evaluation: {name}, {shown}"] = f"{chosen[0]:.4g} after step {chosen[1]:,}" if chosen else NONE
    return results | {
        "time in training": _duration(run),
        "samples per second, mean": _mean(run, "samples_per_second", ",.2f"),
        "tokens per second, mean": _mean(run, "tokens_per_second", ",.2f"),
        "model FLOPs utilization, mean": _mean(run, "mfu", ".1%"),
        "model FLOPs, as counted": run.summary.get("mfu_convention", NONE),
        "starts": str(len(run.starts)),
        "steps that were not finite": str(kinds.count("skipped")),
        "checkpoints not written": str(kinds.count("checkpoint_failed")),
        "versions at the last start": ", ".join(versions) or NONE,
    }


def _outcome(run: ReportedRun) -> str:
    outcome, message = run.status.get("outcome", ""), run.status.get("message", "")
    if outcome == "running":
        # Only the lock of the folder would tell whether the process is alive.
        return f"running, or killed; {message}"
    return f"{outcome} {message}".strip() or NONE


def _duration(run: ReportedRun) -> str:
    seconds = number(run.metrics[-1], "seconds") if run.metrics else None
    if seconds is None:
        return NONE
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:,}:{minutes % 60:02}:{rest:02}"


def _mean(run: ReportedRun, name: str, form: str) -> str:
    """The mean of what the metrics have under a name, each line weighted by the time in training since the last one."""
    logged = [(number(line, name), number(line, "seconds")) for line in run.metrics]
    values, ends = np.array([pair for pair in logged if None not in pair], dtype=float).reshape(-1, 2).T
    weights = np.diff(ends, prepend=0.0).clip(0.0)
    return format(np.average(values, weights=weights), form) if weights.any() else NONE
