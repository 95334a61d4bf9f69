"""The proof that a recipe is the same training run on every strategy, number of processes and micro-batch size.

Every combination is trained for some steps from the recipe's own files, and compared with one process without any
strategy. They differ by rounding alone; what else is different is an error, of the recipe or of this library.
"""

import dataclasses
import itertools
import math
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.config import RecipeConfig
from largebatch.config.optimizers import find_optimizer
from largebatch.errors import ConfigError
from largebatch.plan import RunPlan, resolve
from largebatch.plan.strategies import SINGLE
from largebatch.tools.verify.jobs import JobFailed, run_job
from largebatch.tools.verify.launch import launch_environment
from largebatch.tools.verify.training import Trained, read_run, train

MOST_EVALUATED_SAMPLES = 50

# A combination may take this many times the reference's time, and at least so many seconds.
PATIENCE_FACTOR, PATIENCE = 30, 600
PATIENCE_OF_THE_REFERENCE = 6 * 3600

# Of a recipe that enlarges rounding errors, as many times what becomes of the smallest ones.
ROUNDING_FACTOR = 10
PERTURBATIONS = (1, 2, 3)
# The norm of a gradient is nearer to a difference of large numbers than the rest.
GRAD_NORM_FACTOR = 10


@dataclass(frozen=True)
class Combination:
    """One way to share out a global batch."""

    strategy: str  # name of an Accelerate config, or that of one process alone
    world_size: int
    micro_batch_size: int  # samples per process per forward pass


def plan_of(config: RecipeConfig, world_size: int, micro_batch_size: int) -> RunPlan:
    """Return the plan of a recipe with another micro-batch size; a ConfigError as `resolve`."""
    batch = config.batch.model_copy(update={"micro_batch_size": micro_batch_size})
    return resolve(config.model_copy(update={"batch": batch}), world_size)


@dataclass(frozen=True)
class Differences:
    """The largest relative differences of a run from its reference, over all steps."""

    loss: float
    grad_norm: float
    lr: float
    parameters: float
    evaluation: float
    # Of the first step's loss and gradient norm, which no earlier rounding has enlarged; the norm by the measure of
    # the others.
    first_step: float

    def within(self, limits: "Differences") -> bool:
        """Whether none is larger than its limit."""
        return all(
            mine <= most for mine, most in zip(dataclasses.astuple(self), dataclasses.astuple(limits), strict=True)
        )


def usual_limits(tolerance: float) -> Differences:
    """What rounding usually makes; learning rates must be equal."""
    return Differences(tolerance, GRAD_NORM_FACTOR * tolerance, 0.0, tolerance, tolerance, first_step=tolerance)


# Beyond these, errors of the mathematics could not be told from rounding.
CLEAR = Differences(loss=1e-3, grad_norm=1e-2, lr=0.0, parameters=1e-2, evaluation=1e-3, first_step=1e-3)


def limits_with(rounding: Differences, tolerance: float, *, sums_within_the_model: bool) -> Differences:
    """The limits of a recipe that enlarges rounding, column by column.

    Nothing has enlarged that of the first step, unless the model itself sums over processes, as synchronized BatchNorm
    does: then activations are rounded otherwise, and the layers behind them enlarge it.
    """
    usual = usual_limits(tolerance)
    enlarged = ["loss", "grad_norm", "parameters", "evaluation", *(["first_step"] if sums_within_the_model else [])]
    measured = {name: max(getattr(usual, name), ROUNDING_FACTOR * getattr(rounding, name)) for name in enlarged}
    return dataclasses.replace(usual, **measured)


@dataclass(frozen=True)
class Row:
    """What came of one combination."""

    combination: Combination
    # "agrees", "differs", "unclear" (rounding alone differs as much), "failed" (it did not train to the end), or
    # "does not divide" (the global batch is not a multiple of its micro-batch size times its processes).
    verdict: str
    seconds: float = 0.0  # time it took
    differences: Differences | None = None  # from the reference, where it trained to the end
    problem: str | None = None  # what is to be said about it, where something is


class Verification:
    """The comparison of a recipe's combinations.

    Args:
        config: The validated recipe, overrides applied.
        recipe: Its JSON file.
        overrides: Command-line overrides of it.
        accelerate_configs: The Accelerate config of each strategy.
        steps: Steps to train.
    """

    def __init__(
        self,
        config: RecipeConfig,
        recipe: Path,
        overrides: Sequence[str],
        accelerate_configs: Mapping[str, Path],
        steps: int,
    ):
        self._config = config
        self._recipe = recipe.resolve()
        self._accelerate_configs = accelerate_configs
        samples = min(config.evaluation.max_samples or MOST_EVALUATED_SAMPLES, MOST_EVALUATED_SAMPLES)
        self._overrides = [
            *overrides,
            f"--train.stop_after_steps={steps}",
            "--logging.every=1",
            "--logging.trackers=[]",
            "--evaluation.every=null",
            f"--evaluation.max_samples={samples}",
            "--data.num_workers=0",
        ]
        self.tolerance: float = getattr(find_optimizer(config.optimizer.name).tolerance, config.precision)
        self._trained: dict[Combination, Trained | None] = {}
        self._seconds: dict[Combination, float] = {}
        self._spread: dict[Combination, Differences] = {}

    def reference_for(self, combination: Combination) -> Combination:
        """One process, which must have the same micro-batches only where they are part of the loss."""
        model = self._config.model
        if model.synchronizes_batch_norm:
            return Combination(SINGLE.name, 1, combination.micro_batch_size * combination.world_size)
        if model.uses_batch_norm or model.uses_dropout:
            return Combination(SINGLE.name, 1, combination.micro_batch_size)
        return Combination(SINGLE.name, 1, self._config.batch.micro_batch_size)

    def rows(self, combinations: Sequence[Combination]) -> Iterator[Row]:
        """Train each combination, and its reference before it, and compare them; one row as each is done."""
        for combination in combinations:
            problem = self._indivisible(combination)
            if problem:
                yield Row(combination, "does not divide", problem=problem)
                continue
            reference = self.reference_for(combination)
            if reference not in self._trained:
                yield self._reference(reference)
            yield self._compared(combination, reference)

    def _reference(self, reference: Combination) -> Row:
        started = time.monotonic()
        try:
            self._trained[reference] = self._train(reference, PATIENCE_OF_THE_REFERENCE)
            verdict, problem = "reference", None
        except CombinationFailed as failure:
            self._trained[reference] = None
            verdict, problem = "failed", str(failure)
        self._seconds[reference] = time.monotonic() - started
        return Row(reference, verdict, self._seconds[reference], problem=problem)

    def _compared(self, combination: Combination, reference: Combination) -> Row:
        expected = self._trained[reference]
        if expected is None:
            return Row(combination, "failed", problem="there is nothing to compare it with")
        started = time.monotonic()
        try:
            trained = self._train(combination, max(PATIENCE, PATIENCE_FACTOR * self._seconds[reference]))
        except CombinationFailed as failure:
            return Row(combination, "failed", time.monotonic() - started, problem=str(failure))
        seconds = time.monotonic() - started
        differences = compare(trained, expected)
        if differences.within(usual_limits(self.tolerance)):
            return Row(combination, "agrees", seconds, differences)
        # What is more than rounding usually makes may still be rounding, which some recipes enlarge with every step.
        rounding = self._rounding(reference)
        synchronized = self._config.model.synchronizes_batch_norm
        if not differences.within(limits_with(rounding, self.tolerance, sums_within_the_model=synchronized)):
            return Row(combination, "differs", seconds, differences)
        makes = ", ".join(
            f"{name.replace('_', ' ')} {value:.1e}" for name, value in dataclasses.asdict(rounding).items() if value
        )
        problem = f"rounding alone makes as much of it: {makes}"
        if differences.within(CLEAR):
            return Row(combination, "agrees", seconds, differences, problem)
        finer = "fp32" if self._config.precision == "bf16" else "fp64"
        problem += f"; too much to tell: use fewer --steps, or --precision {finer}"
        return Row(combination, "unclear", seconds, differences, problem)

    def _rounding(self, reference: Combination) -> Differences:
        """What becomes of rounding errors: how far the reference gets when each starting weight is moved by one."""
        if reference not in self._spread:
            expected = self._trained[reference]
            assert expected is not None
            perturbed = [self._train(reference, PATIENCE_OF_THE_REFERENCE, seed) for seed in PERTURBATIONS]
            spreads = [dataclasses.astuple(compare(trained, expected)) for trained in perturbed]
            self._spread[reference] = Differences(*(max(column) for column in zip(*spreads, strict=True)))
        return self._spread[reference]

    def _indivisible(self, combination: Combination) -> str | None:
        try:
            plan_of(self._config, combination.world_size, combination.micro_batch_size)
        except ConfigError as error:
            return error.problems[0]
        return None

    def _train(self, combination: Combination, timeout: float, perturbation: int | None = None) -> Trained:
        """Train a combination, from starting weights moved by rounding errors of this seed if there is one.

        Raises:
            CombinationFailed: It did not come to its end.
        """
        try:
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder, "run")
                run_job(
                    train_combination,
                    self._recipe,
                    (*self._overrides, f"--batch.micro_batch_size={combination.micro_batch_size}"),
                    run_dir,
                    perturbation,
                    world_size=combination.world_size,
                    environment=self._environment(combination),
                    folder=Path.cwd(),
                    timeout=timeout,
                )
                return read_run(run_dir)
        except JobFailed as failure:
            raise CombinationFailed(in_one_line(failure, self._recipe.parent)) from failure
        # Whatever the user's Accelerate config or script may bring about: the other combinations go on.
        except Exception as error:
            raise CombinationFailed(f"{type(error).__name__}: {error}".partition("\n")[0]) from error

    def _environment(self, combination: Combination) -> dict[str, str]:
        if combination.strategy == SINGLE.name:
            return {}
        config = self._accelerate_configs[combination.strategy]
        environment = launch_environment(config, combination.world_size)
        name = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
        beside = config.parents[2] / environment.get(name, "")
        if beside.is_file() and not Path(environment[name]).is_file():
            # Written to be launched from the top of its project, which need not be this folder.
            environment[name] = str(beside)
        return environment


class CombinationFailed(Exception):
    """A combination did not train to the end; in one line, why."""


def train_combination(recipe: Path, overrides: Sequence[str], run_dir: Path, perturbation: int | None) -> None:
    """Train in one process of a job, which ends with it."""
    if perturbation is not None:
        _move_starting_weights(perturbation)
    train(recipe, *overrides, run_dir=run_dir)


def _move_starting_weights(seed: int) -> None:
    """Make this process start from weights that differ from the recipe's by the least rounding; zeros stay zero."""
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from largebatch.run import Run

    prepare = Run.prepare

    def prepare_moved(run: Run[Any], model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        # By `prepare`, because a large model has no weights before.
        prepared = prepare(run, model, optimizer)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                up = torch.randint(0, 2, weight.shape, generator=generator).to(weight)
                weight.mul_(1 + (2 * up - 1) * torch.finfo(weight.dtype).eps)
        return prepared

    Run.prepare = prepare_moved  # type: ignore[method-assign,assignment]


# --- comparing ----------------------------------------------------------------------------------------------------


def compare(trained: Trained, reference: Trained) -> Differences:
    """The largest relative differences; infinite where a step, an evaluation or a weight is missing."""
    return Differences(
        loss=_of_lines(trained.metrics, reference.metrics, ["loss"]),
        first_step=max(
            _of_lines(trained.metrics[:1], reference.metrics[:1], ["loss"]),
            _of_lines(trained.metrics[:1], reference.metrics[:1], ["grad_norm"]) / GRAD_NORM_FACTOR,
        ),
        grad_norm=_of_lines(trained.metrics, reference.metrics, ["grad_norm"]),
        lr=_of_lines(trained.metrics, reference.metrics, ["lr"]),
        parameters=_of_weights(trained.weights, reference.weights),
        evaluation=_of_lines(trained.evaluations, reference.evaluations),
    )


def _of_lines(
    lines: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None
) -> float:
    if len(lines) != len(reference):
        return float("inf")
    return max(
        (
            _relative(line.get(name, math.nan), expected[name])
            for line, expected in zip(lines, reference, strict=True)
            for name in names or expected
        ),
        default=0.0,
    )


def _relative(value: float, expected: float) -> float:
    return 0.0 if value == expected else _ratio(abs(value - expected), abs(expected))


def _ratio(difference: float, scale: float) -> float:
    """Infinite where there is none, so that the largest of all is found whatever else there is."""
    ratio = difference / scale if scale else float("inf")
    return ratio if math.isfinite(ratio) else float("inf")


def _of_weights(weights: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """The largest difference of a tensor, relative to its norm.

    A tensor near zero, such as a bias that gets no gradient but rounding errors, is measured by what it would be if its
    elements were a thousandth of the model's.
    """
    shapes, expected_shapes = ({name: tensor.shape for name, tensor in each.items()} for each in (weights, reference))
    if shapes != expected_shapes:
        return float("inf")
    squares = sum(float(np.square(tensor).sum()) for tensor in reference.values())
    typical = np.sqrt(squares / sum(tensor.size for tensor in reference.values()))
    largest = 0.0
    for name, expected in reference.items():
        scale = max(np.linalg.norm(expected), 1e-3 * typical * np.sqrt(expected.size))
        largest = max(largest, _ratio(float(np.linalg.norm(weights[name] - expected)), float(scale)))
    return largest


def in_one_line(failure: JobFailed, folder: Path | None = None) -> str:
    """Why a job failed: the message for the user if there is one, or else the last line of the first traceback, with
    the place in the task's folder that it went through last."""
    for _, _, output in failure.reports:
        lines = output.splitlines()
        for number, line in enumerate(lines):
            message = re.fullmatch(r"(?:\[rank \d+\] )?error: (.*)", line)
            if message:
                more = itertools.takewhile(lambda line: line.startswith("  - "), lines[number + 1 :])
                return " ".join([message[1], *(line.strip() for line in more)])
    rank, reason, _ = failure.reports[0]
    places = re.findall(r'File "(.+)", line (\d+)', reason)
    inside = [f"{file}:{line}" for file, line in places if folder and Path(file).is_relative_to(folder)]
    return f"rank {rank}: {reason.strip().splitlines()[-1]}" + (f" ({inside[-1]})" if inside else "")
