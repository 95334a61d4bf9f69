"""The final numbers of a run, for programs and for a person."""

import math
from typing import Any

from largebatch.metrics import StepMetrics
from largebatch.plan import RunPlan
from largebatch.run.folder import RunFolder


def summarise(
    plan: RunPlan, first_step: int, completed_steps: int, metrics: StepMetrics, about: dict[str, Any]
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        plan: The plan of the run.
        first_step: Steps that earlier attempts have made; rates are of this attempt.
        completed_steps: Steps of the run.
        metrics: The time and the tokens of this attempt, and the time of earlier ones.
        about: What else to tell, taken over as it is.
    """
    attempt_seconds = max(metrics.stopwatch.seconds, 1e-9)
    samples = plan.batch_at(completed_steps).samples_before
    attempt_samples = samples - plan.batch_at(first_step).samples_before
    summary = {
        "steps": completed_steps,
        "planned_steps": plan.total_steps,
        "samples": samples,
        "train_seconds": round(metrics.seconds, 3),
        "samples_per_second": round(attempt_samples / attempt_seconds, 3),
        "world_size": plan.world_size,
        **about,
    }
    if plan.loss_unit == "tokens":
        summary["tokens_per_second"] = round(metrics.total_weight / attempt_seconds, 3)
    summary["mfu"] = metrics.utilisation.at(attempt_samples / attempt_seconds)
    summary["mfu_convention"] = metrics.utilisation.convention
    return summary


def in_words(summary: dict[str, Any], folder: RunFolder) -> str:
    """The summary as text, with the places of what the run has written."""
    throughput = f"{summary['samples_per_second']:,.0f} samples/s"
    if "tokens_per_second" in summary:
        throughput += f", {summary['tokens_per_second']:,.0f} tokens/s"
    if summary["mfu"] is not None:
        throughput += f", mfu {summary['mfu']:.1%}"
    loss = math.nan if summary["train_loss"] is None else summary["train_loss"]
    return (
        f"\nfinished {summary['steps']:,} steps in {summary['train_seconds']:.1f} s ({throughput}) on "
        f"{summary['world_size']} x {summary['strategy']}\n"
        f"  training loss {loss:.4f}; evaluation: {numbers(summary['evaluation'])}\n"
        f"  metrics      {folder.metrics_file}, {folder.evaluations_file}\n"
        f"  tensorboard  tensorboard --logdir {folder.tensorboard_dir}\n"
        f"  weights      {folder.model_dir}"
    )


def numbers(values: dict[str, float]) -> str:
    """Named numbers for a person."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
