"""Run folders as a run would leave them, without a run: to see what reads them."""

import json
import math
from pathlib import Path
from typing import Any

from ending_files import end_run
from largebatch.config import as_json, load_config
from largebatch.plan import RunPlan, resolve
from paths import DIGITS

START = 1_795_000_000.0


def write_lines(path: Path, lines: list[dict[str, Any]], torn: str = "") -> None:
    """JSON lines, and what was left of one more."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


def started(step: int, attempt: int = 1, **about: Any) -> dict[str, Any]:
    """The line of a start."""
    defaults = {"checkpoint": None, "checkpoints_not_used": [], "changes": [], "strategy": "ddp", "world_size": 2}
    return {"event": "started", "step": step, "attempt": attempt, **defaults, **about, "time": START + 60 * attempt}


HISTORY = [
    started(0),
    {"event": "checkpoint_failed", "step": 50, "reason": "[Errno 28] No space left on device", "time": 1.0},
    {"event": "stopped", "step": 73, "message": "by SIGTERM, after step 73", "time": 2.0},
    started(
        60,
        2,
        checkpoint="/runs/a/checkpoints/step_00000060",
        checkpoints_not_used=["/runs/a/checkpoints/step_00000073: complete.json is missing"],
    ),
    {"event": "skipped", "step": 120, "first_skipped_step": 118, "reason": "the loss is nan", "time": 3.0},
    {"event": "failed", "step": 150, "message": "no progress", "time": 4.0},
    started(150, 3, checkpoint="/runs/a/checkpoints/step_00000150"),
    {"event": "finished", "step": 200, "time": 5.0},
]
"""Of a run of 200 steps to which everything happens."""


def metric_line(plan: RunPlan, step: int, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl with a loss that falls and a learning rate of the plan."""
    return {
        "step": step,
        "samples": plan.batch_at(step).samples_before,
        "epoch": float(plan.timeline.progress(step, "epochs")),
        "loss": 2.3 * math.exp(-step / 40) + 0.03 + 0.02 * math.sin(step),
        "lr": plan.lr_at(step - 1),
        "grad_norm": 1.0 + 0.5 * math.sin(step / 3),
        "global_batch_size": plan.batch_at(step - 1).size,
        "samples_per_second": 900.0 + 50 * math.cos(step),
        "seconds": 0.07 * step,
    } | values


def evaluation_line(plan: RunPlan, step: int) -> dict[str, Any]:
    """A line of evaluations.jsonl, whose best accuracy is not its last."""
    place = {"step": step, "samples": plan.batch_at(step).samples_before, "epoch": 0.0}
    return place | {"loss": 2.2 * math.exp(-step / 60) + 0.1, "accuracy": 0.98 - ((step - 100) / 400) ** 2}


def write_run(
    folder: Path,
    words: tuple[str, ...] = (),
    steps: range = range(10, 201, 10),
    kind: str | None = "finished",
    history: list[dict[str, Any]] | None = None,
    config: Path = DIGITS,
    metrics: list[dict[str, Any]] | None = None,
) -> RunPlan:
    """A run of a recipe with some overrides, logged and evaluated at `steps`; None as `kind` if it has not ended."""
    recipe = load_config(config, words)
    plan = resolve(recipe, 2)
    last = steps[-1]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(as_json(recipe)))
    (folder / "plan.json").write_text(plan.to_json())
    end_run(folder, kind, f"after step {last}", step=last)
    lines = [metric_line(plan, step) for step in steps] if metrics is None else metrics
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "evaluations.jsonl", [evaluation_line(plan, step) for step in steps if step % 50 == 0])
    write_lines(folder / "history.jsonl", [started(0)] if history is None else history)
    return plan
