"""The output of a run: a progress bar on a terminal, otherwise one line per logged step, and its final numbers."""

import math
import sys
from typing import Any

from tqdm import tqdm

from largebatch.plan import RunPlan
from largebatch.run.record.folder import RunFolder


class ProgressBar:
    """The progress of a run that begins after `first_step` steps, shown by the main process only."""

    def __init__(self, plan: RunPlan, shown: bool, first_step: int = 0):
        self._shown = shown
        self._first_step = first_step
        self.earlier_seconds = 0.0  # seconds that the steps before `first_step` took
        self._total = plan.stop_after_steps
        no_bar = not (shown and sys.stderr.isatty())
        self._bar = tqdm(total=self._total, initial=first_step, unit="step", dynamic_ncols=True, disable=no_bar)

    def step(self) -> None:
        """Count an optimizer step."""
        self._bar.update()

    def logged(self, line: dict[str, Any]) -> None:
        """Show a line of metrics.jsonl."""
        text = f"loss {line['loss']:.4f}, lr {line['lr']:.3g}, {_throughput(line)}"
        self._bar.set_postfix_str(text, refresh=False)
        if self._shown and self._bar.disable:
            seconds_per_step = (line["seconds"] - self.earlier_seconds) / (line["step"] - self._first_step)
            left = tqdm.format_interval((self._total - line["step"]) * seconds_per_step)
            print(f"step {line['step']}/{self._total}: {text}, {left} left", flush=True)

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        if self._shown:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Close the bar, which stays visible."""
        self._bar.close()


def in_words(summary: dict[str, Any], folder: RunFolder) -> str:
    """The content of summary.json as text, and where the run's results are."""
    loss = math.nan if summary["train_loss"] is None else summary["train_loss"]
    expected = f"  expected     {summary['expected']['in_words']}\n" if "expected" in summary else ""
    return (
        f"\nfinished {summary['steps']:,} steps in {summary['train_seconds']:.1f} s ({_throughput(summary)}) on "
        f"{summary['world_size']} x {summary['strategy']}\n"
        f"  training loss {loss:.4f}; evaluation: {numbers(summary['evaluation'])}\n"
        f"{expected}"
        f"  metrics      {folder.metrics_file}, {folder.evaluations_file}\n"
        f"  tensorboard  tensorboard --logdir {folder.tensorboard_dir}\n"
        f"  weights      {folder.model_dir}"
    )


def _throughput(values: dict[str, Any]) -> str:
    unit = "tokens" if "tokens_per_second" in values else "samples"
    text = f"{values[f'{unit}_per_second']:,.0f} {unit}/s"
    return text if values.get("mfu") is None else f"{text}, mfu {values['mfu']:.1%}"


def numbers(values: dict[str, float]) -> str:
    """Named numbers as text."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
