"""An attempt at training: what exists from `Run.prepare` to the end of the run, and what happens in each step."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from largebatch.backend.base import Backend
from largebatch.checkpoint.export import export_intact
from largebatch.checkpoint.load import load
from largebatch.checkpoint.save import CheckpointWriter
from largebatch.config import RecipeConfig, as_json
from largebatch.config.models import LargeModel
from largebatch.data.source import SampleSource
from largebatch.errors import BackendMismatch, RunStopped, TrainingFailed, ordinal
from largebatch.run.feed import rehearsal_feed, training_feed
from largebatch.run.record.folder import RunFolder, cannot_be_written
from largebatch.run.record.metrics import StepMetrics, place_of
from largebatch.run.record.profile import traced
from largebatch.run.record.progress import Progress, in_words
from largebatch.run.record.record import Record
from largebatch.run.record.trackers import Trackers
from largebatch.run.resume import Start, checkpoints_of, newest_usable
from largebatch.run.step import RehearsedStep, Step
from largebatch.run.watch.hang import HangReport, place_of_this_process, report_hang
from largebatch.run.watch.slow_processes import PROBES_IN_A_ROW, SLOW, SlowProcesses
from largebatch.run.watch.stop import Agreement, StopRequests, reason_in_words
from largebatch.run.watch.watchdog import Watchdog
from largebatch.run.weights import save_weights
from largebatch.storage.attempts import Attempt
from largebatch.storage.catalog import entry_at
from largebatch.storage.files import remove_folder, replace_json_file
from largebatch.storage.layout import folder_name, read_manifest


class Training:
    """One attempt: it takes over the run folder, which is unchanged until then, and takes the steps that are left.

    Raises:
        UserError: Another run is writing to the folder, or it cannot be written.
    """

    def __init__(
        self,
        config: RecipeConfig,
        backend: Backend,
        folder: RunFolder,
        start: Start,
        recipe: str | None,
        model_config: str | None,
        metrics: StepMetrics,
        stop: StopRequests,
    ):
        self.config, self.backend, self.folder, self.start = config, backend, folder, start
        self.plan = plan = backend.plan
        self.progress = Progress(plan, backend.is_main_process, start.step)
        self.say = say = self.progress.say
        about = {"recipe": recipe, "strategy": backend.launch.strategy, "world_size": backend.world_size}
        attempt: Attempt | None = None
        with backend.raise_on_all_ranks():
            if backend.is_main_process:
                attempt, moved = folder.begin(config, plan, start.in_place, about)
                if moved is not None:
                    say(f"the earlier run in {folder.path} was moved to {moved}")
        attempt = backend.gather_objects(attempt)[0]
        assert attempt is not None
        self.record = Record(folder, attempt, start, plan.micro_batch_size, backend.is_main_process, say)
        with backend.raise_on_all_ranks():
            try:
                self.last_logged, evaluation = self.record.restore(about)
            except OSError as error:
                raise cannot_be_written(folder.path, error) from error
        self.last_evaluation = {name: value for name, value in evaluation.items() if name not in place_of(plan, 0)}
        self.metrics = metrics
        self.progress.earlier_seconds = backend.gather_objects(self.last_logged.get("seconds", 0.0))[0]
        metrics.resume(start.step, self.progress.earlier_seconds)
        self.writer = CheckpointWriter(
            backend,
            folder.checkpoints_dir,
            self.record.attempt,
            config.checkpoint,
            as_json(config),
            model_config,
            say,
            lambda step, reason: self.record.event("checkpoint_failed", step, reason=reason),
        )
        self.bad_steps = start.manifest.bad_steps if start.manifest else 0
        """Steps of the whole run that were skipped because their loss or gradient was not finite."""
        self.stop = stop
        self.agreement = Agreement(backend.largest_of_processes)
        stack_file = self.record.stack_folder / f"rank_{backend.rank:05d}.txt"
        self._places = backend.gather_objects(place_of_this_process())
        hang = HangReport(stack_file.parent, backend.rank, self._places)
        self.watchdog = Watchdog(config.faults.hang_seconds, stack_file, hang.explain, report_hang)
        self.trackers = Trackers(config, folder, start.step, backend.is_main_process, say)
        self.slow_processes = SlowProcesses(backend)
        self.watch = ExitStack()  # entered while signals are noted and progress is watched
        self.rehearses = False  # whether the current step is made for its memory only
        self.saves = False  # whether a checkpoint follows the current step
        self.stop_reason = 0  # why the run stops after the current step, by its number in `REASONS`; 0 if it does not
        self.saved_step = start.step

    @property
    def completed_steps(self) -> int:
        """Optimizer steps completed, including those of earlier attempts."""
        return self.record.step

    # --- a step ---------------------------------------------------------------------------------------------------

    def steps(self, train_set: SampleSource) -> Iterator[Step]:
        """See `Run.steps`."""
        first = self.start.step
        feed = training_feed(
            self.plan, self.backend, train_set, self.config.data.num_workers, first, self.slow_processes.timed
        )
        trace = self.record.profile_folder / f"rank_{self.backend.rank:05d}.json.gz"
        try:
            self.watch.enter_context(self.stop.listening())
            self.watch.enter_context(self.watchdog.watching())
            if self.config.train.rehearse_largest_batch:
                yield from self._rehearse(train_set)
            self.metrics.stopwatch.start()
            with closing(traced(feed, first, self.config.logging.profile, trace)) as feeds:
                for index, step_feed in enumerate(feeds, first):
                    self.agreement.vote(self.stop.requested())
                    step = Step(index, self.backend, step_feed, self.watchdog.heartbeat)
                    yield from _until_updated(step)
                    if index == first:
                        step.check_passes()
                    self._after_step()
        except BaseException:
            self.watch.close()
            raise
        # After the last step, `finish` closes it: that may hang, too, and signals must not cut it short.
        self.metrics.stopwatch.pause()

    def _rehearse(self, train_set: SampleSource) -> Iterator[Step]:
        """A step of the longest micro-batch, without an update."""
        with self.backend.raise_on_all_ranks():
            feed, samples = rehearsal_feed(self.plan, self.backend, train_set, self.start.step)
        self.say(f"rehearsing a step without an update, for its memory, with {samples}")
        self.rehearses = True
        with self.backend.rehearsing():
            yield from _until_updated(RehearsedStep(self.start.step, self.backend, feed, self.watchdog.heartbeat))
        self.rehearses = False

    def update(self, step: Step) -> None:
        """See `Run.update`."""
        loss_sum = step.finish()
        if self.rehearses:
            return
        completed = step.index + 1
        with self.saved_before_failing():
            if step.index == self.start.step:
                self._check_gradients()
            self.stop_reason = self.agreement.reason()
            self.saves = self.stop_reason > 0 or self.plan.checkpoints_after(completed)
            is_logged = self.metrics.is_logged(completed)
            self.writer.wait_until_copied()
            update = self.backend.update(self.plan.lr_of(step.batch), measure_norm=is_logged or self.saves)
            self.record.step = completed
            self.metrics.add(completed, loss_sum, step.weight, update.grad_norm)
            if not update.applied:
                if self.plan.on_non_finite == "stop":
                    # Raises, and names step and rank.
                    self.metrics.check(completed)
                self.metrics.leave_out(completed)
                self._skip(completed, float(loss_sum))
            elif is_logged:
                self.last_logged = line = self.metrics.log(completed)
                self.record.logged(line)
                self.trackers.add("train", {name: value for name, value in line.items() if name != "step"}, completed)
                self.progress.logged(line)
        self.progress.step()

    def _check_gradients(self) -> None:
        """Strategies differ in what they do with a parameter that gets no gradient: skip it, decay it, or fail."""
        with self.backend.raise_on_all_ranks():
            names = self.backend.parameters_without_gradient()
            if names:
                raise BackendMismatch(
                    f"{len(names)} trainable parameters got no gradient, such as {names[0]}; remove them from the "
                    "model, or freeze them (requires_grad = False) before the optimizer is built"
                )

    def _skip(self, step: int, loss_sum: float) -> None:
        """Continue without the update of `step`, or of all steps since the last checkpoint if the plan says so.

        Every process calls it, because they have all seen the same gradient. `loss_sum` is this process's.
        """
        losses = self.backend.gather_objects(loss_sum)
        bad_ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        where = (
            f"the loss is {losses[bad_ranks[0]]} on rank {bad_ranks[0]}" if bad_ranks else "the gradient is not finite"
        )
        what = f"{where} at step {step}"
        self.bad_steps += 1
        most = self.plan.max_bad_steps
        if self.bad_steps > most:
            raise TrainingFailed(
                f"{what}, and it is the {ordinal(self.bad_steps)} such step, more than faults.max_bad_steps {most}. "
                "Look at the data of these steps (history.jsonl), or try a longer learning_rate.warmup or a lower "
                "learning_rate.base_lr",
                everywhere=True,
            )
        first = step
        if self.plan.on_non_finite == "roll_back":
            first = self._roll_back(what) + 1
        else:
            self.backend.forget_step()
        self.record.event("skipped", step, first_skipped_step=first, bad_steps=self.bad_steps, reason=what)
        skipped = f"steps {first} to {step} are" if first < step else "the step is"
        self.say(f"WARNING: {what}; {skipped} skipped ({self.bad_steps} of at most {most} such steps)")

    def _roll_back(self, what: str) -> int:
        """Load the newest intact checkpoint and return its step."""
        self.writer.wait()
        candidates = checkpoints_of(self.folder.checkpoints_dir, self.backend)
        candidates += [entry_at(self.start.checkpoint)] if self.start.checkpoint is not None else []
        usable, skipped = newest_usable(candidates, self.backend)
        if usable is None:
            why = skipped[0] if skipped else "none has been written yet"
            raise TrainingFailed(
                f"{what}, and no checkpoint can be restored ({why}); try a longer learning_rate.warmup, a lower "
                "learning_rate.base_lr, or a shorter checkpoint.every",
                everywhere=True,
            )
        with self.backend.raise_on_all_ranks():
            manifest = read_manifest(usable.path)
            load(self.backend, usable.path, manifest)
        return manifest.step

    def _after_step(self) -> None:
        """After a step and its evaluation: write a checkpoint if one is due, and stop if that was asked for."""
        self.watchdog.heartbeat()
        newest = self.writer.last_step
        self.writer.poll()
        if self.writer.last_step > newest:
            self.record.running()
        evaluated = self.plan.evaluates_after(self.completed_steps)
        if not self.saves and not evaluated:
            return
        self.metrics.stopwatch.pause()
        self._name_slow_processes()
        if self.saves:
            self._save()
        if self.stop_reason and self.completed_steps < self.plan.stop_after_steps:
            self._end_stopped()
        self.metrics.stopwatch.start()

    def _name_slow_processes(self) -> None:
        taken = self.completed_steps - self.start.step
        for slow in self.slow_processes.probe(taken, self.metrics.stopwatch.seconds):
            place = self._places[slow.rank]
            what = (
                f"rank {slow.rank} ({place}) is slow: {slow.what} took {1000 * slow.seconds:.2f} ms, the median of all "
                f"processes is {1000 * slow.median:.2f} ms, and it was over {SLOW:g} times the median in "
                f"{PROBES_IN_A_ROW} probes in a row"
            )
            about = {"rank": slow.rank, "place": place, "what": slow.what, "ratio": round(slow.ratio, 3)}
            self.record.event("slow_process", self.completed_steps, **about, reason=what)
            self.say(f"WARNING: {what}")

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        # A run that resumes from the checkpoint has all lines up to it.
        self.record.flush()
        # A state that is not finite must not be written.
        with self.saved_before_failing():
            self.metrics.check(self.completed_steps)
        self.writer.save(self.completed_steps, self.bad_steps)
        self.saved_step = self.completed_steps

    @contextmanager
    def saved_before_failing(self) -> Iterator[None]:
        """Before a failure that all processes meet together is raised, wait for a checkpoint that is being written."""
        try:
            yield
        except TrainingFailed as error:
            if error.everywhere:
                self._wait_for_checkpoint()
            raise

    def _wait_for_checkpoint(self) -> None:
        self.progress.close()
        self.writer.wait()
        self.record.flush()
        self.trackers.flush()

    # --- the end --------------------------------------------------------------------------------------------------

    def _end_stopped(self) -> None:
        """Wait for the checkpoint, report that the run can be resumed, and leave the job."""
        self._wait_for_checkpoint()
        saved, step = max(self.writer.last_step, self.start.step), self.completed_steps
        newest = "with a checkpoint" if saved == step else f"with no checkpoint after step {saved}"
        message = f"by {reason_in_words(self.stop_reason)}, after step {step:,} of {self.plan.total_steps:,}, {newest}"
        self.record.end("stopped", message, message=message)
        if self.backend.is_main_process:
            for file in self.folder.stop_files.values():
                file.unlink(missing_ok=True)
        self._leave()
        raise RunStopped(f"{message}; the same command resumes from there", everywhere=True)

    def finish(self) -> None:
        """See `Run.finish`."""
        if self.completed_steps > self.saved_step:
            self._save()
        self._wait_for_checkpoint()
        self.backend.average_statistics(self.completed_steps)
        self._save_model()
        if self.backend.is_main_process:
            about = {
                "bad_steps": self.bad_steps,
                "attempts": self.record.attempt.number,
                "train_loss": self.last_logged.get("loss"),
                "evaluation": self.last_evaluation,
                "strategy": self.backend.launch.strategy,
            }
            summary = self.metrics.summary(self.completed_steps, about)
            replace_json_file(self.folder.summary_file, summary)
            print(in_words(summary, self.folder), flush=True)
        self.record.end("finished", f"after step {self.completed_steps:,}")
        self._leave()
        self.watch.close()

    def _leave(self) -> None:
        self.trackers.close()
        self.agreement.close()
        self.backend.wait_for_everyone()
        self.backend.end()

    def _save_model(self) -> None:
        """Write the final weights; those of a large model from its last checkpoint, if that could be written."""
        step, checkpoint = self.completed_steps, None
        if isinstance(self.config.model, LargeModel) and self.writer.last_step == step:
            checkpoint = self.folder.checkpoints_dir / folder_name(step)
        elif isinstance(self.config.model, LargeModel) and self.start.step == step:
            checkpoint = self.start.checkpoint
        state = self.backend.full_state_dict() if checkpoint is None else {}
        if not self.backend.is_main_process:
            return
        self.record.attempt.check()
        if checkpoint is not None:
            remove_folder(self.folder.model_dir)
            export_intact(checkpoint, self.folder.model_dir)
        else:
            save_weights(self.backend.unwrapped_model, state, self.folder.model_dir)


def _until_updated(step: Step) -> Iterator[Step]:
    yield step
    if not step.updated:
        raise RuntimeError("the loop asked for the next step without calling run.update(step)")
