"""What a person sees of a run: one bar on a terminal, one line per logged step elsewhere, and its final numbers."""

import math
import sys
from typing import Any

from tqdm import tqdm

from largebatch.plan import RunPlan
from largebatch.run.folder import RunFolder
from largebatch.run.metrics import LoggedStep


class Progress:
    """The progress of a run that begins after `first_step` steps, shown by the main process only."""

    def __init__(self, plan: RunPlan, shown: bool, first_step: int = 0):
        self._shown = shown
        self._first_step = first_step
        self.earlier_seconds = 0.0
        """The time they took."""
        self._total = plan.stop_after_steps
        self._bar = tqdm(
            total=self._total,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            disable=not (shown and sys.stderr.isatty()),
        )

    def step(self) -> None:
        """One optimizer step is done."""
        self._bar.update()

    def logged(self, logged: LoggedStep) -> None:
        """Show the numbers of a logged step."""
        if logged.tokens_per_second is None:
            throughput = f"{logged.samples_per_second:,.0f} samples/s"
        else:
            throughput = f"{logged.tokens_per_second:,.0f} tokens/s"
        if logged.mfu is not None:
            throughput += f", mfu {logged.mfu:.1%}"
        numbers = f"loss {logged.loss:.4f}, lr {logged.lr:.3g}, {throughput}"
        self._bar.set_postfix_str(numbers, refresh=False)
        if self._shown and self._bar.disable:
            left = (
                (self._total - logged.step) * (logged.seconds - self.earlier_seconds) / (logged.step - self._first_step)
            )
            print(f"step {logged.step}/{self._total}: {numbers}, {tqdm.format_interval(left)} left", flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._shown:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def in_words(summary: dict[str, Any], folder: RunFolder) -> str:
    """The summary as text, and where to find what the run has written."""
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
