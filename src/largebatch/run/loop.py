"""The training loop: what happens in a step, between steps, and at the end, in this order.

    for step in run.steps(train_set):           # `Loop.steps`
        for batch in step.micro_batches():      # the next samples of this process
            step.backward(…)                    # divides by the weight of the global batch, and adds the gradient
        run.update(step)                        # `Loop.update`: set the learning rate, clip, step, log
        if run.should_evaluate:
            run.evaluate(eval_set, …)           # `Loop.evaluate`
    run.finish()                                # `Loop.finish`

Every process goes through this loop. They decide alike, because each decision depends only on the plan, or on numbers
that all of them have: the reduced gradient, the gathered losses, the vote on a stop, the outcome of a checkpoint.

A request to stop (a signal, a stop file, the end of the job's time): in each step, every process casts its vote.
`update` reads the vote that was cast two steps earlier, so that no process waits for another. If any process asked to
stop, this step is the last: its evaluation follows if one is due, then a checkpoint, and `steps` raises RunStopped,
which makes the process exit with a code that says so. If the step is the run's last anyway, the run just finishes.

A loss or gradient that is not finite: with `faults.on_non_finite` "stop", losses and measured norms are checked at
each logged step, and before each evaluation and checkpoint. Steps until then are still applied, but nothing of them is
saved, and the run fails. With "skip" and "roll_back", each step is checked: `Step.backward` makes the whole gradient
NaN if a loss is not finite, so all processes see it and none applies the update. `BadSteps` then goes on without
the step, or loads the latest checkpoint. The next step takes the next samples: steps are counted, never repeated.
With `faults.spike`, a finite norm that spikes is handled alike, and "stop" also checks each step, before its update.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass

from largebatch.backend.base import Backend, Update
from largebatch.config import RecipeConfig, as_json
from largebatch.data.source import SampleSource
from largebatch.errors import RunStopped, TrainingFailed
from largebatch.run.bad_steps import BadSteps
from largebatch.run.checkpoint.best import Best
from largebatch.run.checkpoint.save import CheckpointWriter
from largebatch.run.checkpoint.then import Then
from largebatch.run.evaluate import Evaluator, PerSample
from largebatch.run.feed import training_feed
from largebatch.run.micro_batch_size import rehearse_longest
from largebatch.run.record.recorder import Recorder
from largebatch.run.resume import Start
from largebatch.run.same_samples import Numbers
from largebatch.run.step import Step
from largebatch.run.watch.stop import StopRequests
from largebatch.run.watch.waiting import in_thread, wait_together
from largebatch.run.watch.watchdog import Watchdog
from largebatch.storage.layout import folder_name
from largebatch.system.endings import StopReason
from largebatch.system.presence import is_folder


@dataclass
class Loop:
    """The steps that an attempt has left, and the end of the run."""

    config: RecipeConfig
    backend: Backend  # the prepared backend, with the weights of the start
    start: Start  # where the attempt begins
    recorder: Recorder  # keeps and shows what happens
    stop: StopRequests  # notes requests to stop
    model_files: dict[str, bytes]  # the files that go with the model's weights, by name
    samples: Numbers  # what `check_same_samples` returned
    stop_reason: StopReason | None = None  # why the run stops after the current step, if it does
    save_due: bool = False  # whether a checkpoint follows the current step
    step: Step | None = None  # the current or latest one

    def __post_init__(self) -> None:
        backend = self.backend
        start = self.start
        recorder = self.recorder
        self.plan = backend.plan
        self.metrics = recorder.metrics
        self.watchdog = Watchdog(
            self.plan.faults.hang_seconds, backend.rank, recorder.ending.hang, recorder.stack_folder
        )
        best = start.manifest.best if start.manifest and start.in_place else None
        if best and not is_folder(recorder.folder.checkpoints_dir / folder_name(best.step)):
            best = None
        self.best = Best(self.plan.checkpoint.keep_best, best, self.plan.evaluation.sets)
        self.then = Then(self.plan.checkpoint, recorder.folder.then_dir, recorder.answered, recorder.not_answered)
        self.writer = CheckpointWriter(
            backend,
            recorder.folder.checkpoints_dir,
            recorder.attempt,
            self.plan.checkpoint,
            as_json(self.config),
            self.model_files,
            warn=recorder.say,
            not_written=self._not_written,
            heartbeat=self.watchdog.heartbeat,
            last_step=start.step,
            latest=start.checkpoint,
        )
        self.bad_steps = BadSteps(backend, start, recorder, self.writer)
        self.evaluator = Evaluator(backend, self.config.data.num_workers, recorder, self.watchdog.heartbeat)

    @property
    def completed_steps(self) -> int:
        """Optimizer steps completed, including those of earlier attempts."""
        return self.recorder.step

    def steps(self, train_set: SampleSource) -> Iterator[Step]:
        """Yield each step to the recipe; between steps, save what is due and stop if asked to."""
        first = self.start.step
        feed = training_feed(self.backend, train_set, self.config.data.num_workers, first, self.metrics.timed)
        with self.watchdog, closing(feed), self.metrics.stopwatch.counting(True):
            for index, step_feed in enumerate(feed, first):
                if index == first + 1 and self.plan.finds_micro_batch_size:
                    rehearse_longest(self.config, self.backend)
                # An all-reduce on the host. It has ended long before `update` reads its result, so nobody waits for it.
                self.stop.vote()
                # The recipe's turn: forward and backward passes, `update`, and an evaluation if one is due.
                self.step = Step(index, index == first, self.backend, step_feed, self.watchdog.heartbeat)
                yield self.step
                if not self.step.updated:
                    raise RuntimeError("the loop asked for the next step without calling run.update(step)")
                self.watchdog.heartbeat()
                self._save_and_stop_if_due()

    def update(self, step: Step) -> None:
        """Set the learning rate, clip, and step, unless the gradient is bad; then collect what is logged."""
        loss_sum = step.finish()
        self.backend.untouched.check()
        if step.is_first:
            self.agree_on_compiling()
        completed = step.index + 1
        with self._checkpoint_finished_before_failing():
            if step.is_first:
                step.check_first()
            self.stop_reason = self.stop.result()
            self.save_due = self.stop_reason is not None or self.plan.checkpoints_after(completed)
            is_logged = self.plan.logs_after(completed)
            # A checkpoint of the step before may still be copying the weights that are about to change.
            self.writer.wait_until_copied()
            update = self._clip_and_step(step, is_logged)
            if step.is_first:
                # Too little memory is refused now, not at the first checkpoint.
                self.writer.reserve()
            norm = update.grad_norm
            self.recorder.step = completed
            self.metrics.add(completed, loss_sum, step.weight, norm, step.own_metrics)
            if not update.applied:
                # The gradient is not finite or spikes, and weights and optimizer are as before: skip it, or roll back.
                # DeepSpeed does not apply such a step with "stop" either; then this fails.
                assert norm is not None
                self.bad_steps.handle(completed, float(loss_sum), float(norm))
                return
            if step.noise_parts and norm is not None:
                self.recorder.noise_scale.add(completed, step.noise_parts, norm)
            self.bad_steps.accept(norm)
            if is_logged:
                # Fails if a loss since the last logged step was not finite.
                self.recorder.log()

    def _clip_and_step(self, step: Step, is_logged: bool) -> Update:
        """Set the learning rate, clip the gradient, and take the optimizer step, unless the gradient forbids it."""
        backend = self.backend
        backend.set_learning_rate(self.plan.lr_of(step.batch))
        ema_weight = self.plan.ema_weight_at(step.index)
        if ema_weight:
            backend.set_ema_weight(ema_weight)
        # A step that is logged or saved needs the norm even if nothing is clipped: to show it, and to save nothing
        # after a gradient that was not finite.
        measure_norm = is_logged or self.save_due or bool(step.noise_parts)
        # The gradient is that of the global batch's mean loss: each backward pass has divided by the weight of the
        # global batch, and the last one has reduced the gradient over the processes. One call clips it, steps and
        # clears it, because DeepSpeed's engine does all of it in one.
        backend.untouched.forget()
        update = backend.clip_and_step(measure_norm, self.bad_steps.max_norm())
        if update.applied and ema_weight:
            # The averages begin with the first update that is applied, after any skipped steps, as weights' do.
            weight = 1.0 if self.bad_steps.count == step.index else ema_weight
            backend.statistics.move_averages(weight)
        backend.untouched.note()
        return update

    def evaluate(
        self, eval_set: SampleSource, per_sample: PerSample, name: str | None, before: Callable[[], object]
    ) -> dict[str, float]:
        """Evaluate a set, record its means, and have a checkpoint written if they are the best so far."""
        with self._checkpoint_finished_before_failing():
            self.metrics.check()
            if self.plan.optimizer.ema_half_life is not None:
                # Evaluating averaged weights changes weights for a while.
                self.writer.wait_until_copied()
            means = self.evaluator.means(eval_set, per_sample, name, before)
        self.agree_on_compiling()
        self.recorder.evaluated(means)
        if self.plan.checkpoint.keep_best is not None and self.completed_steps > self.start.step:
            is_best = self.best.is_found(self.completed_steps, means)
            self.save_due |= self.backend.gather_objects(is_best)[0]
        return means

    def _not_written(self, step: int, reason: str) -> None:
        """On the main process: the storage has refused a checkpoint."""
        self.best.forget(step)
        self.recorder.event("checkpoint_failed", step=step, reason=reason)

    def agree_on_compiling(self) -> None:
        """If one process could not compile the model, let all run it eagerly, and record why."""
        reason = self.backend.agree_on_compiling()
        if reason is not None:
            self.recorder.say(f"WARNING: the model is not compiled: {reason}")
            self.recorder.event("not_compiled", reason=reason)

    def _save_and_stop_if_due(self) -> None:
        """After a step and its evaluation: write a checkpoint if one is due, and stop if a process was asked to."""
        for step in self.writer.poll():
            self._follow_kept(step)
        self.then.poll()
        if warning := self.best.not_found():
            self.recorder.say(f"WARNING: {warning}")
        if not self.save_due:
            return
        with self.metrics.stopwatch.counting(False):
            self._save()
            if self.stop_reason and self.completed_steps < self.plan.stop_after_steps:
                self._end_stopped(self.stop_reason)

    def _save(self) -> None:
        """Begin a checkpoint, of which a thread writes this process's part; the next `update` waits for its copy."""
        with self._checkpoint_finished_before_failing():
            # No state is saved after a loss or norm that is not finite.
            self.metrics.check()
        # A run that resumes from the checkpoint has all lines up to it.
        self.recorder.noise_scale.complete()
        self._finish_checkpoint()
        about = {"best": self.best.latest, "samples": self.samples}
        self.writer.save(self.completed_steps, self.bad_steps.for_manifest() | about)

    def _follow_kept(self, step: int, is_last: bool = False) -> None:
        """Have the command of `checkpoint.then` follow a complete checkpoint, if it is kept."""
        is_best = self.best.latest is not None and self.best.latest.step == step
        if self.backend.is_main_process and (is_last or is_best or self.plan.keeps_checkpoint_of(step)):
            self.then.follow(step, self.writer.folder / folder_name(step))

    def _end_stopped(self, reason: StopReason) -> None:
        """Wait for the checkpoint, report that the run can be resumed, and leave the process group."""
        self.recorder.say(f"stopping after step {self.completed_steps:,}: writing a checkpoint")
        self.then.end("the run was stopped")
        self._finish_checkpoint()
        step = self.completed_steps
        self.writer.require(step)
        message = f"by {reason}, after step {step:,} of {self.plan.stop_after_steps:,}, with a checkpoint"
        self.recorder.stopped(reason, message)
        self._leave()
        raise RunStopped(f"{message}; the same command resumes from there", reason == StopReason.STOP_FILE)

    def finish(self) -> None:
        """Complete the last checkpoint, export its weights, write the summary, and leave the job."""
        if self.completed_steps == 0:
            raise RuntimeError("run.finish was called before run.update; call it after the loop over run.steps(…)")
        with self.watchdog:
            self._finish_checkpoint()
            step = self.completed_steps
            if self.writer.last_step < step:
                # The recipe has left the loop early, or the storage refused the last checkpoint: try again.
                self.best.remember(step)
                self._save()
                self._finish_checkpoint()
            about = {"bad_steps": self.bad_steps.count, "best": self.best.latest and asdict(self.best.latest)}
            self.recorder.finished(self.writer.require(step), about, self.watchdog.heartbeat)
            for each in sorted({*self.writer.poll(), step}):
                self._follow_kept(each, is_last=each == step)
            then = in_thread("then", self.then.finish)
            wait_together(self.backend, self.watchdog.heartbeat, then)
            with self.backend.raise_on_all_ranks():
                then.result()
            self._leave()

    @contextmanager
    def _checkpoint_finished_before_failing(self) -> Iterator[None]:
        """Before a failure that all processes meet together is raised, wait for a checkpoint that is being written."""
        try:
            yield
        except TrainingFailed as error:
            if error.everywhere:
                self._finish_checkpoint()
            raise

    def _finish_checkpoint(self) -> None:
        """Wait for a checkpoint that is being written, and write lines that the file system has refused."""
        self.writer.wait()
        self.recorder.flush()

    def _leave(self) -> None:
        """Close what is open, and leave the process group together with all other processes."""
        self.recorder.trackers.close()
        self.stop.end_votes()
        self.backend.end()
