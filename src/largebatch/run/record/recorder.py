"""Everything that an attempt keeps and shows of its training: the one object that the loop tells what has happened.

history.jsonl tells people how the run stands. If an attempt has only begun there after the job is over, the run was
killed, or its first process could not write any more; it can be resumed like a stopped one.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from largebatch.backend.base import Backend
from largebatch.config import RecipeConfig
from largebatch.errors import TrainingFailed, file_errors
from largebatch.model.flops import Utilization
from largebatch.plan.expected import compare, number
from largebatch.run.checkpoint.export import export_intact
from largebatch.run.command_line import RunOptions
from largebatch.run.record.folder import OwnFolder
from largebatch.run.record.journal import Journal
from largebatch.run.record.metrics import StepMetrics, goodput, position_fields
from largebatch.run.record.noise_scale import NoiseScale
from largebatch.run.record.progress import describe_summary, numbers, progress
from largebatch.run.record.trackers import Trackers
from largebatch.run.resume import Start
from largebatch.run.watch.waiting import in_thread, wait_together
from largebatch.storage.attempts import Attempt
from largebatch.storage.catalog import remove_leftovers, set_aside
from largebatch.storage.files import Line
from largebatch.storage.layout import read_object
from largebatch.storage.source_code import GIT
from largebatch.system.endings import Ending, StopReason, decisive, read_endings
from largebatch.system.failures import Kind
from largebatch.system.installed import installed_versions
from largebatch.words import bulleted, printable

MAX_SECONDS_UNWRITTEN = 1.0
"""How long lines that steps add wait for others that are written with them."""


class Recorder:
    """The attempt's metrics, its files in the run folder besides checkpoints, its trackers and what it prints.

    Every process has one and makes the same calls; the main process writes the files, each its own ending. It begins
    the attempt, which takes over the run folder; the folder is unchanged until then.

    Args:
        config: The recipe's config.
        backend: The prepared backend.
        folder: The run's folder.
        start: Where the attempt begins.
        options: The options of the run.
        utilization: The model's operations per sample, and the device's.

    Raises:
        UserError: Another run is writing to the folder, or it cannot be written.
    """

    def __init__(
        self,
        config: RecipeConfig,
        backend: Backend,
        folder: OwnFolder,
        start: Start,
        options: RunOptions,
        utilization: Utilization,
    ):
        self.folder = folder
        self.ending = options.ending
        self.step = start.step  # optimizer steps completed
        self._first_step = start.step
        self._backend = backend
        self._plan = backend.plan
        about = {
            "recipe": options.recipe and str(options.recipe),
            "strategy": backend.launch.strategy,
            "world_size": backend.world_size,
            "micro_batch_size": self._plan.micro_batch_size,
        }

        def begin() -> tuple[int, str]:
            attempt, moved = folder.begin(config, self._plan, start.in_place, about)
            if moved is not None:
                differing = f"; its recipe differs:{bulleted(start.differing)}" if start.differing else ""
                self.say(f"the earlier run in {folder.path} was moved to {moved}{differing}")
            return attempt.number, attempt.token

        self.attempt = Attempt(folder.attempts_dir, *backend.from_main_process(begin))
        journal = partial(Journal, attempt=self.attempt, warn=self.say)
        self._journals = {
            "metrics": journal(folder.metrics_file, max_seconds=MAX_SECONDS_UNWRITTEN),
            "noise_scale": journal(folder.noise_scale_file, max_seconds=MAX_SECONDS_UNWRITTEN),
            "evaluations": journal(folder.evaluations_file),
            "history": journal(folder.history_file),
        }
        self.ending.begin(self.attempt.endings_dir, self._progress, self._ended)
        self._last_logged: Line = {}
        measured = []
        with backend.raise_on_all_ranks(), folder.writing():
            if backend.is_main_process:
                self._last_logged = self._restore(start, about)
                measured = folder.noise_scale()
        self.metrics = StepMetrics(backend, utilization, start.step, number(self._last_logged, "seconds") or 0.0)
        self.noise_scale = NoiseScale(backend, measured, partial(self._add, "noise_scale"))
        self.stack_folder = folder.stacks_dir / f"attempt_{self.attempt.name}"
        trackers = config.logging.trackers if backend.is_main_process else []
        self.trackers = Trackers(trackers, config, folder, start.step, self.say)

    def _restore(self, start: Start, about: dict[str, Any]) -> Line:
        """Restore the folder to its state at the checkpoint, and begin the attempt's history with `about`.

        Returns the latest values in metrics.jsonl.
        """
        latest = {}
        for name, journal in self._journals.items():
            # The history also keeps what is repeated now.
            latest[name] = journal.keep_until(math.inf if name == "history" else start.step)
        remove_leftovers(self.folder.checkpoints_dir)
        set_aside(self.folder.checkpoints_dir, start.step, self.attempt.name)
        for reason in start.skipped:
            self.say(f"WARNING: a checkpoint is not used: {reason}")
        for change in start.changes:
            self.say(f"WARNING: changed, as --allow-change permits: {change}")
        if start.checkpoint is not None:
            self.say(f"  {'Resume':<14}after step {start.step:,}, from {start.checkpoint}")
        self.event(
            "started",
            attempt=self.attempt.number,
            checkpoint=str(start.checkpoint) if start.checkpoint else None,
            checkpoints_not_used=start.skipped,
            changes=start.changes,
            git=read_object(self.folder.source_dir / GIT),
            versions=installed_versions(),
            **about,
        )
        return latest["metrics"]

    def say(self, text: str) -> None:
        """Print a text on the main process."""
        if self._backend.is_main_process:
            print(printable(text), flush=True)

    def _add(self, journal: str, line: Line) -> None:
        """Add a line to a file of JSON lines, by its name without the suffix."""
        if self._backend.is_main_process:
            self._journals[journal].append(line)

    def event(self, name: str, **about: Any) -> None:
        """Add a line to history.jsonl, about the latest step unless `about` says otherwise."""
        self._add("history", {"event": name, "step": self.step, **about, "time": time.time()})

    def flush(self) -> None:
        """Write lines that wait for later ones, or that the file system has refused."""
        for journal in self._journals.values():
            journal.flush()

    def log(self) -> None:
        """Log the latest step; fails as `StepMetrics.check`."""
        line = self._last_logged = self.metrics.log(self.step, self.noise_scale.line)
        self._add("metrics", line)
        self.trackers.add("train", {name: value for name, value in line.items() if name != "step"}, self.step)
        seconds_per_step = self.metrics.stopwatch.seconds / (self.step - self._first_step)
        self.say(progress(line, self._plan.stop_after_steps, seconds_per_step))

    def evaluated(self, means: dict[str, float]) -> None:
        """Log an evaluation's means by name."""
        self._add_evaluation(means, self.step)
        self.say(f"evaluation after step {self.step}: {numbers(means)}")

    def _add_evaluation(self, means: dict[str, float], step: int) -> None:
        self._add("evaluations", position_fields(self._plan, step) | means)
        self.trackers.add("evaluation", means, step)

    def answered(self, step: int, values: dict[str, float]) -> None:
        """Log, on the main process, what the command of `checkpoint.then` has found after a step."""
        self._add_evaluation({f"then/{name}": value for name, value in values.items()}, step)
        self.say(f"checkpoint.then, of step {step}: {numbers(values)}")

    def not_answered(self, step: int, reason: str) -> None:
        """Note, on the main process, that the command of `checkpoint.then` has failed."""
        self.event("then_failed", step=step, reason=reason)
        self.say(f"WARNING: checkpoint.then, of step {step}: {reason}; training is not affected")

    # --- the end --------------------------------------------------------------------------------------------------

    def _progress(self) -> dict[str, Any]:
        """What an ending says of training."""
        trained = self.step > self._first_step
        return {"step": self.step, "trained": trained, "micro_batch_size": self._plan.micro_batch_size}

    def _ended(self, own: Ending) -> None:
        """Add to history.jsonl, on the main process, how the run has ended."""
        if not self._backend.is_main_process:
            return
        # Another process may have failed first.
        ending = decisive([own, *read_endings(self.attempt.endings_dir)]) or own
        event = ending.kind if ending.kind in (Kind.FINISHED, Kind.STOPPED) else "failed"
        # The lines of a later attempt are its own.
        with suppress(TrainingFailed):
            self.flush()
            self.event(event, message=ending.message, kind=ending.kind, reason=ending.reason)

    def stopped(self, reason: StopReason, message: str) -> None:
        """Publish that the run was stopped and can be resumed, and delete the request."""
        with self._backend.raise_on_all_ranks(), file_errors("that the run was stopped cannot be written"):
            if self._backend.is_main_process:
                self.ending.write(Kind.STOPPED, message, reason=reason)
                self.folder.forget_requests()

    def finished(self, checkpoint: Path, about: Mapping[str, Any], heartbeat: Callable[[], None]) -> None:
        """Write the final weights and the summary, which has `about`, publish that the run is finished, and print it.

        Raises:
            StorageError: They cannot be written; every process raises it, and the same command completes the run.
        """
        what = f"training is over, with its state in {checkpoint}, but the weights and the summary cannot be written"
        with self._backend.raise_on_all_ranks(), file_errors(what):
            exported = Event()
            work = partial(self._write_results, checkpoint, about, exported.set)
            result = in_thread("results", work) if self._backend.is_main_process else None
            wait_together(self._backend, heartbeat, result, exported)
            if result is not None:
                result.result()

    def _write_results(self, checkpoint: Path, about: Mapping[str, Any], exported: Callable[[], None]) -> None:
        """Write the final weights, the summary, and that the run is finished, and print the summary."""
        self.attempt.check()
        export_intact(checkpoint, self.folder.model_dir, progress=exported)
        evaluations = self.folder.evaluations()
        # The latest of each name: sets have intervals of their own.
        latest: Line = {}
        for line in evaluations:
            latest |= line
        place = position_fields(self._plan, 0)
        # The answer of `checkpoint.then` is still to come.
        means = {name: mean for name, mean in latest.items() if name not in place and not name.startswith("then/")}
        summary = self.metrics.summary(self.step) | {
            **about,
            "goodput": goodput(self.folder.history(), self.step, self.metrics.train_seconds, time.time()),
            "attempts": self.attempt.number,
            "train_loss": self._last_logged.get("loss"),
            "evaluation": means,
            "strategy": self._backend.launch.strategy,
            **self.noise_scale.summary(),
        }
        if figure := compare(self._plan, evaluations):
            summary["expected"] = asdict(figure) | {"in_words": str(figure)}
        self.folder.write_summary(summary)
        self.ending.write(Kind.FINISHED, f"after step {self.step:,}")
        self.say(describe_summary(summary, self.folder))
