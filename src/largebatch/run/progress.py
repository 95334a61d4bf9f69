"""What a person sees while a run trains: one bar on a terminal, one line per logged step elsewhere."""

import sys

from tqdm import tqdm

from largebatch.metrics import LoggedStep
from largebatch.plan import RunPlan


class Progress:
    """The progress of a run, on the main process; on the others it shows nothing.

    Args:
        plan: The plan, for the number of steps.
        shown: Whether this process shows it.
        first_step: Steps that earlier attempts have made.
        earlier_seconds: The time they took.
    """

    def __init__(self, plan: RunPlan, shown: bool, first_step: int = 0, earlier_seconds: float = 0.0):
        self._shown = shown
        self._first_step = first_step
        self._earlier_seconds = earlier_seconds
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
                (self._total - logged.step)
                * (logged.seconds - self._earlier_seconds)
                / (logged.step - self._first_step)
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
