"""The run: joins the job, resolves and prints the plan, and carries a recipe through its steps."""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch.backend.batch_norm import RunningStatistics
from largebatch.backend.check import DTYPES, check_backend, check_before, expect
from largebatch.backend.launch import read_launch
from largebatch.backend.start import start
from largebatch.config import RecipeConfig
from largebatch.data.loading import check_size
from largebatch.data.source import SampleSource
from largebatch.errors import BackendMismatch, TrainingFailed, UserError
from largebatch.metrics import StepMetrics, place_of
from largebatch.plan import explain, resolve
from largebatch.run.evaluate import PerSample, mean_over_samples
from largebatch.run.feed import training_feed
from largebatch.run.folder import RunFolder, append_json_line, write_json
from largebatch.run.progress import Progress
from largebatch.run.step import Step
from largebatch.run.weights import save_weights

Config = TypeVar("Config", bound=RecipeConfig)


class Run(Generic[Config]):
    """One run of a recipe in one process of the job.

    Args:
        config: The recipe's validated config.
        run_dir: Folder of the run; its name is the run's name.

    Raises:
        UserError: The job's launch, the batch on this many processes, or the folder cannot be used.
    """

    def __init__(self, config: Config, run_dir: Path):
        self.config = config
        launch = read_launch(precision=config.precision)
        self.plan = resolve(config, launch.world_size)
        self.folder = RunFolder(run_dir)
        self.folder.check_usable()
        _check_trackers(config.logging.trackers)

        self.backend = start(launch, self.plan, list(config.logging.trackers), str(self.folder.tensorboard_dir))
        self._agree_on_the_plan()
        if self.backend.is_main_process:
            print(explain(self.plan, self.folder.path.name), flush=True)
            print(f"  {'Strategy':<14}{launch.strategy} on {self.backend.device.type}", flush=True)

        self._metrics = StepMetrics(self.backend, self.plan)
        self._progress: Progress | None = None
        self._completed_steps = 0
        self._last_logged: dict[str, Any] = {}
        self._last_evaluation: dict[str, float] = {}
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
        sources: tuple[SampleSource, SampleSource] | None = None
        for turn in (True, False):
            with self.backend.agreement():
                if self.backend.is_local_main_process is turn:
                    sources = open_sources(self.config)
                    check_size(sources[0], self.plan.num_train_samples, "data.num_train_samples")
                    check_size(sources[1], self.plan.num_eval_samples, "data.num_eval_samples")
        assert sources is not None
        for name, source in zip(("training", "evaluation"), sources, strict=True):
            available = getattr(source, "num_available", len(source))
            if self.backend.is_main_process and available > len(source):
                print(f"  {'Data':<14}{len(source):,} of {available:,} {name} samples are used", flush=True)
        return sources

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Wrap model and optimizer for the strategy, then check that it does what the plan says.

        Raises:
            BackendMismatch: It does not; training does not start.
        """
        with self.backend.agreement():
            check_before(model, optimizer, self.backend)
            RunningStatistics(model)
        expected = expect(self.plan, self.backend.launch, optimizer)
        prepared = self.backend.prepare(model, optimizer)
        with self.backend.agreement():
            check_backend(self.backend, expected)
        # Models come from `from_pretrained` in evaluation mode, without dropout.
        self.backend.model.train()
        self._open_folder()
        return prepared

    # --- training -------------------------------------------------------------------------------------------------

    def steps(self, train_set: SampleSource) -> Iterator[Step]:
        """The optimizer steps of the run; each must be finished with `step.update()`."""
        self._progress = Progress(self.plan, shown=self.backend.is_main_process)
        first_step = self._completed_steps
        feed = training_feed(self.plan, self.backend, train_set, self._num_workers, first_step)
        self._metrics.stopwatch.start()
        for index, step_feed in enumerate(feed, first_step):
            step = Step(index, self.plan, self.backend, step_feed, self._update)
            yield step
            if not step.updated:
                raise RuntimeError("the loop went on to the next step without step.update()")
        self._metrics.stopwatch.pause()

    def _update(self, index: int, loss_sum: torch.Tensor, weight: int) -> None:
        """Finish step `index` and, where it is due, log it."""
        assert self._progress is not None
        completed = index + 1
        if index == 0:
            self._check_gradients()
        is_logged = self._metrics.is_logged(completed)
        grad_norm = self.backend.update(self.plan.lr_at(index), measure_norm=is_logged)
        self._completed_steps = completed
        self._metrics.add(loss_sum, weight)
        if is_logged:
            logged = self._metrics.log(completed, grad_norm)
            line = {name: value for name, value in dataclasses.asdict(logged).items() if value is not None}
            self._last_logged = line
            if self.backend.is_main_process:
                append_json_line(self.folder.metrics_file, line)
            self._track({f"train/{name}": value for name, value in line.items() if name != "step"})
            self._progress.logged(logged)
        self._progress.step()

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
        self._metrics.stopwatch.pause()
        self._metrics.check(self._completed_steps)
        self.backend.average_statistics(self._completed_steps)
        with torch.no_grad(), _evaluation_mode(self.backend.model):
            means = mean_over_samples(
                self.backend,
                eval_set,
                self.plan.evaluated_samples,
                per_sample,
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
                raise error
        if self.backend.is_main_process:
            place = place_of(self.plan, self._completed_steps)
            append_json_line(self.folder.evaluations_file, place | means)
        self._track({f"evaluation/{name}": value for name, value in means.items()})
        self._last_evaluation = means
        self._progress.say(f"evaluation after step {self._completed_steps}: {_numbers(means)}")
        self._metrics.stopwatch.start()
        return means

    # --- the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the final weights and the summary, and leave the job."""
        assert self._progress is not None
        self._progress.close()
        self.backend.average_statistics(self._completed_steps)
        state = self.backend.full_state_dict()
        if self.backend.is_main_process:
            save_weights(self.backend.unwrapped_model, state, self.folder.model_dir)
            self._summarise()
        self.backend.wait_for_everyone()
        self.backend.end()

    def _summarise(self) -> None:
        plan, logged = self.plan, self._last_logged
        seconds = self._metrics.stopwatch.seconds
        samples = plan.batch_at(self._completed_steps).samples_before
        summary = {
            "steps": self._completed_steps,
            "planned_steps": plan.total_steps,
            "samples": samples,
            "train_loss": logged["loss"],
            "evaluation": self._last_evaluation,
            "train_seconds": round(seconds, 3),
            "samples_per_second": round(samples / seconds, 3),
            "strategy": self.backend.launch.strategy,
            "world_size": plan.world_size,
        }
        throughput = f"{samples / seconds:,.0f} samples/s"
        if plan.loss_unit == "tokens":
            summary["tokens_per_second"] = round(self._metrics.total_weight / seconds, 3)
            throughput += f", {summary['tokens_per_second']:,.0f} tokens/s"
        write_json(self.folder.summary_file, summary)
        path = self.folder.path
        print(
            f"\nfinished {self._completed_steps:,} steps in {seconds:.1f} s ({throughput}) on {plan.world_size} x "
            f"{self.backend.launch.strategy}\n"
            f"  training loss {logged['loss']:.4f}; evaluation: {_numbers(self._last_evaluation)}\n"
            f"  metrics      {path / 'metrics.jsonl'}, {path / 'evaluations.jsonl'}\n"
            f"  tensorboard  tensorboard --logdir {self.folder.tensorboard_dir}\n"
            f"  weights      {self.folder.model_dir}",
            flush=True,
        )

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _num_workers(self) -> int:
        return self.config.data.num_workers

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

    def _open_folder(self) -> None:
        """Make the run folder, and start the trackers in it; only now, so that a start that fails moves no results."""
        with self.backend.agreement():
            if self.backend.is_main_process:
                moved = self.folder.create(self.config, self.plan)
                if moved is not None:
                    print(f"the earlier run in {self.folder.path} was moved to {moved}", flush=True)
        self._init_trackers(self.folder.path.name)

    def _init_trackers(self, name: str) -> None:
        config = json.loads(self.config.model_dump_json(exclude={"schema_"}))
        self.backend.accelerator.init_trackers(name, config=_flatten(config))

    def _track(self, values: dict[str, float]) -> None:
        self.backend.accelerator.log(values, step=self._completed_steps)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards each in the mode it was in."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    yield
    for module, mode in training.items():
        module.training = mode


def _check_trackers(trackers: Sequence[str]) -> None:
    """Accelerate leaves out a tracker whose package is missing."""
    for tracker in trackers:
        if importlib.util.find_spec(tracker) is None:
            raise UserError(f"logging.trackers: {tracker} is not installed; pip install {tracker}, or leave it out")


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested sections as dotted names; lists and nulls as their JSON text, which every tracker takes."""
    flat: dict[str, str | int | float | bool] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str | int | float) else json.dumps(value)
    return flat


def _numbers(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())
