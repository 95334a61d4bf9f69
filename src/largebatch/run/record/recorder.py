"""Everything that an attempt keeps and shows of its training: the one object that the loop tells what has happened."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from largebatch.backend.base import Backend
from largebatch.config import RecipeConfig
from largebatch.errors import file_errors
from largebatch.model.flops import Utilization
from largebatch.plan.expected import compare
from largebatch.run.checkpoint.export import export_intact
from largebatch.run.record.folder import OwnFolder
from largebatch.run.record.metrics import StepMetrics, goodput, position_fields
from largebatch.run.record.noise_scale import NoiseScale
from largebatch.run.record.progress import describe_summary, numbers, progress
from largebatch.run.record.record import Record
from largebatch.run.record.trackers import Trackers, connect
from largebatch.run.resume import Start
from largebatch.run.watch.waiting import Progress, in_thread, wait_together
from largebatch.storage.attempts import Attempt
from largebatch.system.endings import OwnEnding, StopReason
from largebatch.system.failures import Kind
from largebatch.words import printable


class Recorder:
    """The attempt's metrics, its record in the run folder, its trackers and what it prints.

    Every process has one and makes the same calls. It begins the attempt, which takes over the run folder; the folder
    is unchanged until then.

    Args:
        config: The recipe's config.
        backend: The prepared backend.
        folder: The run's folder.
        start: Where the attempt begins.
        recipe: The file of the recipe, for the history.
        utilization: The model's operations per sample, and the device's.
        ending: That of this process.

    Raises:
        UserError: Another run is writing to the folder, or it cannot be written.
    """

    def __init__(
        self,
        config: RecipeConfig,
        backend: Backend,
        folder: OwnFolder,
        start: Start,
        recipe: str | None,
        utilization: Utilization,
        ending: OwnEnding,
    ):
        self.folder = folder
        self._backend = backend
        self._plan = backend.plan
        about = {"recipe": recipe, "strategy": backend.launch.strategy, "world_size": backend.world_size}
        attempt = self._begin_attempt(config, start, about)
        self.record = Record(
            folder, attempt, start, backend.plan.micro_batch_size, backend.is_main_process, self.say, ending
        )
        with backend.raise_on_all_ranks(), folder.writing():
            self._last_logged, evaluation = self.record.restore(about)
            measured = folder.noise_scale() if backend.is_main_process else []
        self._last_evaluation = {
            name: value for name, value in evaluation.items() if name not in position_fields(backend.plan, 0)
        }
        seconds = self._last_logged.get("seconds", 0.0)
        # The line may be damaged.
        seconds = seconds if isinstance(seconds, int | float) and math.isfinite(seconds) else 0.0
        seconds = backend.gather_objects(seconds)[0]
        self.metrics = StepMetrics(backend, utilization, start.step, seconds)
        self.noise_scale = NoiseScale(backend, measured, partial(self.record.add, "noise_scale"))
        self.stack_folder = folder.stacks_dir / f"attempt_{attempt.name}"
        trackers = config.logging.trackers if backend.is_main_process else []
        open_run = partial(connect, config=config, folder=folder, first_step=start.step)
        self._trackers = Trackers(trackers, open_run, self.say)

    def _begin_attempt(self, config: RecipeConfig, start: Start, about: dict[str, Any]) -> Attempt:
        mine: tuple[int, str] | None = None
        with self._backend.raise_on_all_ranks():
            if self._backend.is_main_process:
                attempt, moved = self.folder.begin(config, self._plan, start.in_place, about)
                mine = attempt.number, attempt.token
                if moved is not None:
                    self.say(f"the earlier run in {self.folder.path} was moved to {moved}")
        number, token = self._backend.gather_objects(mine)[0]
        return Attempt(self.folder.attempts_dir, number, token)

    def say(self, text: str) -> None:
        """Print a text on the main process."""
        if self._backend.is_main_process:
            print(printable(text), flush=True)

    def log(self, step: int) -> None:
        """Log the step that was added to the metrics last; fails as `StepMetrics.check`."""
        line = self._last_logged = self.metrics.log(step, self.noise_scale.line)
        self.record.add("metrics", line)
        self._trackers.add("train", {name: value for name, value in line.items() if name != "step"}, step)
        seconds_per_step = self.metrics.stopwatch.seconds / (step - self.record.start.step)
        self.say(progress(line, self._plan.stop_after_steps, seconds_per_step))

    def evaluated(self, step: int, means: dict[str, float]) -> None:
        """Log an evaluation's means by name; the summary has the latest of each name."""
        self._last_evaluation |= means
        self.record.add("evaluations", position_fields(self._plan, step) | means)
        self._trackers.add("evaluation", means, step)
        self.say(f"evaluation after step {step}: {numbers(means)}")

    def answered(self, step: int, values: dict[str, float]) -> None:
        """On the main process: log what the command of `checkpoint.then` has found after a step."""
        means = {f"then/{name}": value for name, value in values.items()}
        self.record.add("evaluations", position_fields(self._plan, step) | means)
        self.say(f"checkpoint.then, of step {step}: {numbers(values)}")

    def not_answered(self, step: int, reason: str) -> None:
        """On the main process: note that the command of `checkpoint.then` has failed."""
        self.record.event("then_failed", self.record.step, reason=reason)
        self.say(f"WARNING: checkpoint.then, of step {step}: {reason}; training goes on")

    # --- the end --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write and show everything that still waits."""
        self.record.flush()

    def stopped(self, reason: StopReason, message: str) -> None:
        """Publish that the run was stopped and can be resumed, and delete the request."""
        with self._backend.raise_on_all_ranks(), file_errors("that the run was stopped cannot be written"):
            self.record.end(Kind.STOPPED, message, reason, message=message)
        if self._backend.is_main_process:
            self.folder.forget_requests()

    def finished(self, checkpoint: Path, about: Mapping[str, Any], heartbeat: Callable[[], None]) -> None:
        """Write the final weights and the summary, which has `about`, publish that the run is finished, and print it.

        Raises:
            StorageError: They cannot be written; every process raises it, and the same command completes the run.
        """
        what = f"training is over, with its state in {checkpoint}, but the weights and the summary cannot be written"
        with self._backend.raise_on_all_ranks(), file_errors(what):
            exported = Progress()
            work = partial(self._write_results, checkpoint, about, exported)
            result = in_thread("results", work) if self._backend.is_main_process else None
            wait_together(self._backend, heartbeat, result, exported)
            summary = result.result() if result else None
            self.record.end(Kind.FINISHED, f"after step {self.record.step:,}")
        if summary is not None:
            print(describe_summary(summary, self.folder), flush=True)

    def _write_results(
        self, checkpoint: Path, about: Mapping[str, Any], exported: Callable[[], None]
    ) -> dict[str, Any]:
        """Write the final weights and the summary, and return the latter."""
        self.record.attempt.check()
        export_intact(checkpoint, self.folder.model_dir, progress=exported)
        summary = self.metrics.summary(self.record.step) | {
            **about,
            "goodput": goodput(self.folder.history(), self.record.step, self.metrics.train_seconds, time.time()),
            "attempts": self.record.attempt.number,
            "train_loss": self._last_logged.get("loss"),
            "evaluation": self._last_evaluation,
            "strategy": self._backend.launch.strategy,
            **self.noise_scale.summary(),
        }
        if figure := compare(self._plan, self.folder.evaluations()):
            summary["expected"] = asdict(figure) | {"in_words": str(figure)}
        self.folder.write_summary(summary)
        return summary

    def close(self) -> None:
        """End the run in each tracker."""
        self._trackers.close()
