"""The run: joins the job, resolves and prints the plan, and carries a recipe through its steps."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch.backend.batch_norm import RunningStatistics
from largebatch.backend.check import DTYPES, check_backend, check_before, expect
from largebatch.backend.launch import end_with_the_launcher, read_launch
from largebatch.backend.start import start
from largebatch.backend.state import check_savable
from largebatch.batch import GlobalBatch
from largebatch.checkpoint.export import export_intact
from largebatch.checkpoint.load import load
from largebatch.checkpoint.save import CheckpointWriter, Retention
from largebatch.config import RecipeConfig, as_json
from largebatch.config.models import LargeModel
from largebatch.data.loading import check_size
from largebatch.data.source import Batch, SampleSource
from largebatch.errors import BackendMismatch, RunStopped, TrainingFailed, UserError
from largebatch.flops import utilisation_of
from largebatch.initialization.building import build_without_weights
from largebatch.initialization.drawn import DrawnWeights
from largebatch.initialization.setting import StartingWeights, set_weights
from largebatch.memory.activation_checkpointing import checkpoint_activations
from largebatch.metrics import StepMetrics, place_of
from largebatch.plan import explain, resolve
from largebatch.run.attempt import Attempt
from largebatch.run.command_line import RunOptions
from largebatch.run.evaluate import PerSample, evaluation_mode, mean_over_samples, rows_of_samples
from largebatch.run.feed import training_feed
from largebatch.run.folder import RunFolder
from largebatch.run.profile import profiled
from largebatch.run.progress import Progress
from largebatch.run.record import Record
from largebatch.run.resume import find_start
from largebatch.run.skipping import SkippedSteps
from largebatch.run.status import report_failure
from largebatch.run.step import Step
from largebatch.run.stop import REASONS, StopRequests
from largebatch.run.summary import in_words, numbers, summarise
from largebatch.run.trackers import Trackers, check_trackers
from largebatch.run.watchdog import Watchdog
from largebatch.run.weights import model_config, save_weights
from largebatch.storage.files import remove_folder, replace_json_file
from largebatch.storage.layout import folder_name

Config = TypeVar("Config", bound=RecipeConfig)
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
Values = TypeVar("Values")

LARGEST_LOSS_OF_A_PERPLEXITY = 700.0  # the exponential of a larger one is no number


class Run(Generic[Config]):
    """One run of a recipe in one process of the job.

    Args:
        config: The recipe's validated config.
        options: Where the run writes, and whether it goes on from a checkpoint.

    Raises:
        UserError: The job's launch, the batch on this many processes, the folder or the checkpoint cannot be used.
        SystemExit: The run is finished; there is nothing left to do.
    """

    def __init__(self, config: Config, options: RunOptions):
        self.config = config
        end_with_the_launcher()
        # slurm/launch.sh may have been asked to stop, and have passed it on, while Python was starting.
        self._began = float(os.environ.get("LARGEBATCH_BEGAN", time.time()))
        launch = read_launch(precision=config.precision)
        self.plan = resolve(config, launch.world_size)
        self.folder = RunFolder(options.run_dir)
        self._recipe = None if options.recipe is None else str(options.recipe)
        self.folder.check_usable()
        check_trackers(config.logging.trackers)

        trackers: list[str] = [*config.logging.trackers]
        tensorboard_dir = str(self.folder.tensorboard_dir)
        self.backend = start(launch, self.plan, trackers, tensorboard_dir, config.faults.hang_seconds)
        self._agree_on_the_plan()
        if self.backend.is_main_process:
            print(explain(self.plan, self.folder.path.name), flush=True)
            print(f"  {'Strategy':<14}{launch.strategy} on {self.backend.device.type}", flush=True)

        with self.backend.agreement():
            if self.backend.is_main_process:
                self.folder.hold()
        self._start = find_start(options.resume, options.allow_change, self.folder, config, self.plan, self.backend)
        if self._start.is_over:
            self._leave_finished()

        self._starting_weights: StartingWeights | None = None
        self._metrics = StepMetrics(self.backend, self.plan)
        self._progress: Progress | None = None
        self._completed_steps = self._first_step = self._start.step
        self._last_logged: dict[str, Any] = {}
        self._last_evaluation: dict[str, float] = {}
        self._will_save = False
        self._saved_step = 0
        self._stop_vote: Callable[[], int] = int
        self._stop_reason = 0
        self._watch = ExitStack()
        torch.set_default_dtype(self.dtype)
        # The recipe builds its model next: every process draws the same initial weights.
        torch.manual_seed(config.seed)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, gradients and losses: float32, also under bf16 autocast, or float64."""
        return DTYPES[self.plan.precision]

    def load(
        self, open_sources: Callable[[Config], tuple[SampleSource, SampleSource]]
    ) -> tuple[SampleSource, SampleSource]:
        """The training and evaluation sets, checked to have the sizes that the plan was made for.

        The first process of each machine opens them before the others do, so that what is downloaded or tokenised is
        cached by one and read by the rest.

        Args:
            open_sources: From the config to both sets.

        Raises:
            UserError: They cannot be opened, or have other sizes; every process raises it.
        """

        def open_checked() -> tuple[SampleSource, SampleSource]:
            train_set, eval_set = open_sources(self.config)
            check_size(train_set, self.plan.num_train_samples, "train")
            check_size(eval_set, self.plan.num_eval_samples, "eval")
            return train_set, eval_set

        sources = self._one_a_machine_first(open_checked)
        for name, source in zip(("training", "evaluation"), sources, strict=True):
            available = getattr(source, "num_available", len(source))
            if self.backend.is_main_process and available > len(source):
                print(f"  {'Data':<14}{len(source):,} of {available:,} {name} samples are used", flush=True)
            remark = getattr(source, "remark", None)
            if self.backend.is_main_process and remark:
                print(f"  {'Data':<14}{remark}", flush=True)
        return sources

    def build(self, build_model: Callable[[Config], M]) -> M:
        """The recipe's model.

        Where the config's model section is a `LargeModel`, it is built without weights: `prepare` sets them when the
        strategy has said which ranges of them are this process's.

        Args:
            build_model: From the config to the model with the weights that it would begin with.

        Raises:
            UserError: The files that it is to begin with cannot be used; every process raises it.
        """
        section = self.config.model
        if not isinstance(section, LargeModel):
            with self.backend.agreement():
                return build_model(self.config)
        with self.backend.agreement():
            model, distributions = build_without_weights(partial(build_model, self.config))
        if self._start.manifest is None and section.initial_weights is not None:
            # Imported only where it is used: with `transformers` and `datasets` it takes seconds.
            from largebatch.initialization.pretrained import PretrainedWeights, find_folder

            folder = self._one_a_machine_first(partial(find_folder, section.initial_weights))
            with self.backend.agreement():
                self._starting_weights = PretrainedWeights(folder, model)
        else:
            self._starting_weights = DrawnWeights(model, distributions, self.config.seed)
        return model

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Wrap model and optimizer for the strategy, then check that it does what the plan says.

        Raises:
            BackendMismatch: It does not; training does not start.
        """
        with self.backend.agreement():
            check_before(model, optimizer, self.backend)
            check_savable(model)
            RunningStatistics(model)
            if self.config.compute.activation_checkpointing:
                checkpoint_activations(model)
        # Strategies change the model's class.
        self._model_config = model_config(model)
        self._metrics.utilisation = utilisation_of(self.config, model, self.backend.device, self.plan.world_size)
        if self.backend.is_main_process and self._metrics.utilisation.at(0) is not None:
            print(f"  {'MFU':<14}{self._metrics.utilisation.convention}", flush=True)
        expected = expect(self.plan, self.backend.launch, optimizer)
        prepared = self.backend.prepare(model, optimizer)
        with self.backend.agreement():
            check_backend(self.backend, expected)
            # What a checkpoint cannot hold is refused now, not at the first one.
            self.backend.engine_state()
        # Models come from `from_pretrained` in evaluation mode, without dropout.
        self.backend.model.train()
        if self._start.manifest is not None:
            assert self._start.checkpoint is not None
            with self.backend.agreement():
                load(self.backend, self._start.checkpoint, self._start.manifest)
        elif self._starting_weights is not None:
            with self.backend.agreement():
                set_weights(self.backend, self._starting_weights)
        self._begin_attempt()
        return prepared

    # --- training -------------------------------------------------------------------------------------------------

    def steps(self, train_set: SampleSource) -> Iterator[Step]:
        """The optimizer steps of the run that are still to be made; each must be finished with `step.update()`.

        Where a checkpoint is due, or the run was asked to stop, that happens when the loop asks for the next step, so
        that a step's evaluation is before its checkpoint.

        Raises:
            RunStopped: The run was asked to stop.
        """
        self._progress = Progress(self.plan, self.backend.is_main_process, self._first_step, self._metrics.seconds)
        feed = training_feed(self.plan, self.backend, train_set, self._num_workers, self._first_step)
        self._metrics.stopwatch.start()
        with ExitStack() as watch:
            watch.enter_context(self._stop.listening())
            watch.enter_context(self._watchdog.watching())
            trace_file = self._record.profile_folder / f"rank_{self.backend.rank:05d}.json.gz"
            tracing = profiled(feed, self._first_step, self.config.logging.profile, trace_file)
            for index, step_feed in enumerate(watch.enter_context(tracing), self._first_step):
                self._stop_vote = self.backend.largest_of_processes(self._stop.requested())
                step = Step(index, self.plan, self.backend, step_feed, self._update, self._watchdog.beat)
                yield step
                if not step.updated:
                    raise RuntimeError("the loop went on to the next step without step.update()")
                if index == self._first_step:
                    step.check_passes()
                self._after_step()
            # The end may hang, too, and signals must not cut it short.
            self._watch = watch.pop_all()
        self._metrics.stopwatch.pause()

    def _update(self, index: int, batch: GlobalBatch, loss_sum: torch.Tensor, weight: int) -> None:
        """Finish step `index` and, where it is due, log it."""
        with self._saved_before_failing():
            self._make_update(index, batch, loss_sum, weight)

    def _make_update(self, index: int, batch: GlobalBatch, loss_sum: torch.Tensor, weight: int) -> None:
        assert self._progress is not None
        completed = index + 1
        if index == self._first_step:
            self._check_gradients()
        self._stop_reason = self._stop_vote()
        self._will_save = self._stop_reason > 0 or self.plan.checkpoints_after(completed)
        is_logged = self._metrics.is_logged(completed)
        self._writer.wait_until_copied()
        update = self.backend.update(self.plan.lr_of(batch), measure_norm=is_logged or self._will_save)
        self._completed_steps = self._record.status.step = completed
        self._metrics.add(completed, loss_sum, weight, update.grad_norm)
        if not update.applied:
            if self.plan.on_non_finite == "stop":
                # Raises, and names step and rank.
                self._metrics.check(completed)
            self._metrics.leave_out(completed)
            self._say(self._skipped.leave_out(completed, float(loss_sum)))
        elif is_logged:
            logged = self._metrics.log(completed)
            line = {name: value for name, value in vars(logged).items() if value is not None}
            self._last_logged = line
            self._record.logged(line)
            values = {name: value for name, value in line.items() if name != "step"}
            self._trackers.add("train", values, completed)
            self._progress.logged(logged)
        self._progress.step()

    @contextmanager
    def _saved_before_failing(self) -> Iterator[None]:
        """A failure that all processes meet together waits for the checkpoint that is being written."""
        try:
            yield
        except TrainingFailed as error:
            if error.everywhere:
                self._wait_for_checkpoint()
            raise

    def _after_step(self) -> None:
        """What follows a step and its evaluation: a checkpoint where it is due, and the end where it was asked for."""
        self._watchdog.beat()
        newest = self._writer.last_step
        self._writer.poll()
        if self._writer.last_step > newest:
            self._record.outcome("running", f"from step {self._first_step:,}", resume=True)
        if not self._will_save:
            return
        self._metrics.stopwatch.pause()
        self._save()
        if self._stop_reason and self._completed_steps < self.plan.stop_after_steps:
            self._end_stopped()
        self._metrics.stopwatch.start()

    def _save(self) -> None:
        # A run that goes on from the checkpoint has all lines up to it.
        self._record.flush()
        # What is not finite must not be written.
        with self._saved_before_failing():
            self._metrics.check(self._completed_steps)
        self._writer.save(self._completed_steps, self._skipped.count)
        self._saved_step = self._completed_steps

    def _end_stopped(self) -> None:
        """Wait for the checkpoint, say that the run can be resumed, and leave."""
        self._wait_for_checkpoint()
        saved, step = max(self._writer.last_step, self._start.step), self._completed_steps
        newest = "with a checkpoint" if saved == step else f"with no checkpoint after step {saved}"
        message = f"by {REASONS[self._stop_reason]}, after step {step:,} of {self.plan.total_steps:,}, {newest}"
        self._record.event("stopped", step, message=message)
        self._record.outcome("stopped", message, resume=True)
        if self.backend.is_main_process:
            self.folder.stop_file.unlink(missing_ok=True)
        self.backend.wait_for_everyone()
        self.backend.end()
        stopped = RunStopped(f"{message}; the same command goes on from there")
        stopped.everywhere = True
        raise stopped

    def _wait_for_checkpoint(self) -> None:
        assert self._progress is not None
        self._progress.close()
        self._writer.wait()
        self._record.flush()
        self._trackers.flush()

    def _check_gradients(self) -> None:
        """Strategies differ in what they do with a parameter that gets no gradient: skip it, decay it, or fail."""
        with self.backend.agreement():
            names = self.backend.parameters_without_gradient()
            if names:
                raise BackendMismatch(
                    f"{len(names)} trainable parameters got no gradient, such as {names[0]}; leave them out of the "
                    "model, or freeze them (requires_grad = False) before the optimizer is built"
                )

    # --- evaluation -----------------------------------------------------------------------------------------------

    @property
    def should_evaluate(self) -> bool:
        """Whether an evaluation is due after the step just completed."""
        return self.plan.evaluates_after(self._completed_steps)

    def evaluate(self, eval_set: SampleSource, per_sample: PerSample) -> dict[str, float]:
        """Means over the evaluation set, each sample counted once, with the model in evaluation mode.

        Args:
            eval_set: The evaluation set.
            per_sample: From a batch to values by name, one a sample: {"loss": (batch,), "accuracy": (batch,)}; or to
                pairs of sums and weights, {"loss": ((batch,), (batch,))}, whose mean is that of sums over weights.

        Raises:
            TrainingFailed: A mean is not finite.
        """
        assert self._progress is not None
        with self._saved_before_failing():
            self._metrics.check(self._completed_steps)
        with self._evaluating():
            means = mean_over_samples(
                self.backend,
                eval_set,
                self.plan.evaluated_samples,
                self._watched(per_sample),
                self.plan.micro_batch_size,
                self._num_workers,
            )
        for name, value in means.items():
            if not math.isfinite(value):
                error = TrainingFailed(
                    f"the evaluation's {name} is {value} after step {self._completed_steps}; training stopped and no "
                    "weights were written"
                )
                error.everywhere = True
                with self._saved_before_failing():
                    raise error
        if self.plan.loss_unit == "tokens" and means.get("loss", math.inf) < LARGEST_LOSS_OF_A_PERPLEXITY:
            # Of the mean over all tokens: a mean of batches' or samples' perplexities would be another number.
            means["perplexity"] = math.exp(means["loss"])
        self._record.evaluated(place_of(self.plan, self._completed_steps) | means)
        self._trackers.add("evaluation", means, self._completed_steps)
        self._last_evaluation = means
        self._progress.say(f"evaluation after step {self._completed_steps}: {numbers(means)}")
        return means

    def rows(
        self, source: SampleSource, num_samples: int, per_sample: Callable[[Batch], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Values of single samples, without augmentation and with the model in evaluation mode.

        Args:
            source: Either set.
            num_samples: How many of it, from the first on.
            per_sample: From a batch to tensors with a row a sample, by name.

        Returns:
            By name, a row for each of the samples, in their order; whole and the same on every process.
        """
        with self._evaluating():
            return rows_of_samples(
                self.backend,
                source,
                num_samples,
                self._watched(per_sample),
                self.plan.micro_batch_size,
                self._num_workers,
            )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Without gradients, in evaluation mode, on averaged statistics; the time is none of the training's."""
        self._metrics.stopwatch.pause()
        self.backend.average_statistics(self._completed_steps)
        with torch.no_grad(), evaluation_mode(self.backend.model):
            yield
        self._metrics.stopwatch.start()

    def _watched(self, per_sample: Callable[[Batch], Values]) -> Callable[[Batch], Values]:
        def watched(batch: Batch) -> Values:
            self._watchdog.beat()
            return per_sample(batch)

        return watched

    # --- the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the last checkpoint, write the final weights and the summary, and leave the job.

        Where the loop was left before the end of the run, a checkpoint is written first.
        """
        if self._completed_steps > max(self._saved_step, self._first_step):
            self._save()
        self._wait_for_checkpoint()
        self.backend.average_statistics(self._completed_steps)
        self._save_model()
        if self.backend.is_main_process:
            self._write_summary()
        self._record.event("finished", self._completed_steps)
        self._record.outcome("finished", f"after step {self._completed_steps:,}", resume=False)
        self.backend.wait_for_everyone()
        self.backend.end()
        self._watch.close()

    def _save_model(self) -> None:
        """Write the final weights: those of a large model from its last checkpoint, one parameter at a time."""
        checkpoint = self._last_checkpoint() if isinstance(self.config.model, LargeModel) else None
        state = self.backend.full_state_dict() if checkpoint is None else {}
        if not self.backend.is_main_process:
            return
        self._record.attempt.check()
        if checkpoint is not None:
            remove_folder(self.folder.model_dir)
            export_intact(checkpoint, self.folder.model_dir)
        else:
            save_weights(self.backend.unwrapped_model, state, self.folder.model_dir)

    def _last_checkpoint(self) -> Path | None:
        """The folder of the checkpoint of the last step; None where it could not be written."""
        if self._writer.last_step == self._completed_steps:
            return self.folder.checkpoints_dir / folder_name(self._completed_steps)
        return self._start.checkpoint if self._start.step == self._completed_steps else None

    def _write_summary(self) -> None:
        summary = summarise(
            self.plan,
            self._first_step,
            self._completed_steps,
            self._metrics,
            {
                "bad_steps": self._skipped.count,
                "attempts": self._record.attempt.number,
                "train_loss": self._last_logged.get("loss"),
                "evaluation": self._last_evaluation,
                "strategy": self.backend.launch.strategy,
            },
        )
        replace_json_file(self.folder.summary_file, summary)
        print(in_words(summary, self.folder), flush=True)

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _num_workers(self) -> int:
        return self.config.data.num_workers

    def _one_a_machine_first(self, function: Callable[[], T]) -> T:
        """What `function` gives, on the first process of each machine before the others: what it downloads is cached.

        Raises:
            UserError: One of them raised it; every process does.
        """
        results: list[T] = []
        for turn in (True, False):
            with self.backend.agreement():
                if self.backend.is_local_main_process is turn:
                    results.append(function())
        return results[0]

    def _agree_on_the_plan(self) -> None:
        """Machines with another copy of the recipe would train something else without a word."""
        launch = self.backend.launch
        mine = (self.config.model_dump_json(), self.plan.to_json(), launch.strategy, launch.deepspeed_config)
        with self.backend.agreement():
            everyones = self.backend.gather_objects(mine)
            ranks = [str(rank) for rank, other in enumerate(everyones) if other != everyones[0]]
            if ranks:
                raise UserError(
                    f"ranks {', '.join(ranks)} have another config than rank 0; launch them with the same recipe, "
                    "overrides, Accelerate config and DeepSpeed config"
                )

    def _leave_finished(self) -> None:
        if self.backend.is_main_process:
            print(
                f"the run in {self.folder.path} is finished, after step {self._start.step:,}; nothing is left to do "
                "(--resume none trains it anew and moves this one aside)",
                flush=True,
            )
        self.backend.wait_for_everyone()
        self.backend.end()
        raise SystemExit(0)

    def _begin_attempt(self) -> None:
        """Make the run folder or go on in it, and start all that writes to it; only now, so that a start that fails
        moves no results."""
        start, launch = self._start, self.backend.launch
        attempt: Attempt | None = None
        about = {"recipe": self._recipe, "strategy": launch.strategy, "world_size": launch.world_size}
        with self.backend.agreement():
            if self.backend.is_main_process:
                attempt, moved = self.folder.begin(self.config, self.plan, start.in_place, about)
                if moved is not None:
                    print(f"the earlier run in {self.folder.path} was moved to {moved}", flush=True)
        attempt = self.backend.gather_objects(attempt)[0]
        assert attempt is not None
        self._record = Record(self.folder, attempt, start, self.backend.is_main_process, self._say)
        evaluation: dict[str, Any] = {}
        with self.backend.agreement():
            try:
                self._last_logged, evaluation = self._record.take_up(self._began, about)
            except OSError as error:
                raise UserError(f"--run_dir: {self.folder.path} cannot be written: {error}") from error
        self._last_evaluation = {
            name: value for name, value in evaluation.items() if name not in place_of(self.plan, 0)
        }
        self._metrics.resume(start.step, self.backend.gather_objects(self._last_logged.get("seconds", 0.0))[0])
        self._writer = self._make_writer()
        skipped = start.manifest.bad_steps if start.manifest else 0
        self._skipped = SkippedSteps(
            self.backend,
            self._record,
            self._writer,
            self.folder.checkpoints_dir,
            start.checkpoint,
            self.config.faults.max_bad_steps,
            skipped,
        )
        self._stop = StopRequests(
            self.folder.stop_file if self.backend.is_main_process else None,
            self.config.faults.time_limit_margin_seconds,
        )
        stack_file = self._record.stack_folder / f"rank_{self.backend.rank:05d}.txt"
        self._watchdog = Watchdog(self.config.faults.hang_seconds, stack_file, partial(report_failure, resume=True))
        self._trackers = Trackers(
            self.backend.accelerator, self.config, self.folder.path.name, self._first_step, self._say
        )

    def _make_writer(self) -> CheckpointWriter:
        checkpoint = self.config.checkpoint
        return CheckpointWriter(
            self.backend,
            self.folder.checkpoints_dir,
            self._record.attempt,
            Retention(checkpoint.keep_last, self.plan.keeps_checkpoint_of),
            as_json(self.config),
            json.loads(self.plan.to_json()),
            self._model_config,
            checkpoint.asynchronous,
            self._say,
            lambda step, reason: self._record.event("checkpoint_failed", step, reason=reason),
        )

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.say(text)
        elif self.backend.is_main_process:
            print(text, flush=True)
