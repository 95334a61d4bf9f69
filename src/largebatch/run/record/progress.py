"""What a run prints: a line per logged step, and its final numbers."""

import math
from typing import Any

from tqdm import tqdm

from largebatch.storage.files import Line
from largebatch.storage.layout import folder_name
from largebatch.storage.run_folder import RunFolder


def progress(line: Line, total: int, seconds_per_step: float) -> str:
    """A line of metrics.jsonl as text, with the time that is left of `total` steps."""
    left = tqdm.format_interval((total - line["step"]) * seconds_per_step)
    numbers = f"loss {line['loss']:.4f}, lr {line['lr']:.3g}, {_throughput(line)}"
    return f"step {line['step']}/{total}: {numbers}, {left} left"


def describe_summary(summary: dict[str, Any], folder: RunFolder) -> str:
    """The content of summary.json as text, and where the run's results are."""
    loss = math.nan if summary["train_loss"] is None else summary["train_loss"]
    best = ""
    if found := summary["best"]:
        kept = folder.checkpoints_dir / folder_name(found["step"])
        best = f"  best         {found['metric']} {found['value']:.4f} after step {found['step']:,}: {kept}\n"
    expected = f"  expected     {summary['expected']['in_words']}\n" if "expected" in summary else ""
    curves = ""
    if folder.tensorboard_dir.exists():
        curves = f"  tensorboard  tensorboard --logdir {folder.tensorboard_dir}\n"
    before = summary["steps_before"]
    since = f" after step {before:,}" if before else ""
    return (
        f"\nfinished {summary['steps']:,} steps in {summary['train_seconds']:.1f} s ({_throughput(summary)}{since}) on "
        f"{summary['world_size']} x {summary['strategy']}\n"
        f"  training loss {loss:.4f}; evaluation: {numbers(summary['evaluation'])}\n"
        f"{best}{expected}"
        f"  metrics      {folder.metrics_file}, {folder.evaluations_file}\n"
        f"{curves}"
        f"  weights      {folder.model_dir}"
    )


def _throughput(values: dict[str, Any]) -> str:
    unit = "tokens" if "tokens_per_second" in values else "samples"
    text = f"{values[f'{unit}_per_second']:,.0f} {unit}/s"
    return text if values.get("mfu") is None else f"{text}, mfu {values['mfu']:.1%}"


def numbers(values: dict[str, float]) -> str:
    """Named numbers as text."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
