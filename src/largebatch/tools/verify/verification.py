"""Checks that a recipe is the same training run on every strategy, number of processes and micro-batch size.

Every combination is trained for some steps from the recipe's own files, and compared with one process without any
strategy. They may differ only by rounding; any other difference is an error of the recipe or of this library.
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from largebatch.backend.accelerate_configs import rehearsal_environment
from largebatch.config import RecipeConfig
from largebatch.errors import ConfigError
from largebatch.plan import resolve
from largebatch.plan.strategies import SINGLE
from largebatch.task_folders import folder_of
from largebatch.tools.verify.differences import (
    CLEAR,
    Differences,
    Trained,
    compare,
    limits_with,
    of_tensors,
    read_run,
    usual_limits,
)
from largebatch.tools.verify.jobs import JobFailed, run_job
from largebatch.tools.verify.training import train

MAX_EVALUATED_SAMPLES = 50

# A combination may take this multiple of the reference's time, and at least this many seconds.
TIMEOUT_FACTOR, MIN_TIMEOUT = 30, 600
REFERENCE_TIMEOUT = 6 * 3600  # seconds

# Seeds of the runs that measure how rounding errors grow.
PERTURBATIONS = (1, 2, 3)

UNSEEDED = (
    "one process differs from itself when it trains again: the data, the model or train.py draws random numbers that "
    "do not follow from the recipe's seed"
)


@dataclass(frozen=True)
class Combination:
    """One way to divide a global batch."""

    strategy: str  # name of an Accelerate config, or that of one process alone
    world_size: int
    micro_batch_size: int  # samples per process per forward pass


@dataclass(frozen=True)
class Row:
    """The outcome of one combination."""

    combination: Combination
    # "reference", "agrees", "differs", "unclear" (rounding alone differs as much), "failed" (it or what it is compared
    # with did not train to the end), or "does not divide" (the global batch is not a multiple of its micro-batch size
    # times its processes).
    verdict: str
    seconds: float = 0.0  # time it took
    differences: Differences | None = None  # from the reference, if it trained to the end
    problem: str | None = None  # a remark on the verdict, if there is one


class CombinationFailed(Exception):
    """A combination did not train to the end; the message is one line."""


@dataclass(frozen=True)
class Verification:
    """The comparison of a recipe's combinations."""

    config: RecipeConfig  # the validated recipe, overrides applied
    recipe: Path  # the recipe's JSON file
    overrides: Sequence[str]  # command-line overrides of the recipe
    accelerate_configs: Mapping[str, Path]  # the Accelerate config of each strategy
    steps: int  # steps to train
    _references: dict[Combination, tuple[Row, Trained | None]] = field(default_factory=dict, init=False)
    _rounding: dict[Combination, Differences] = field(default_factory=dict, init=False)
    _unseeded: set[Combination] = field(default_factory=set, init=False)

    @property
    def tolerance(self) -> float:
        """The relative difference that rounding usually makes."""
        return float(getattr(self.config.optimizer_entry.tolerance, self.config.precision))

    def rows(self, combinations: Sequence[Combination]) -> Iterator[Row]:
        """Train each combination, and its reference before it, and compare them; yield each row when it is done."""
        for combination in combinations:
            try:
                resolve(self.config, combination.world_size, combination.micro_batch_size)
            except ConfigError as error:
                yield Row(combination, "does not divide", problem=error.problems[0])
                continue
            reference = self._reference_for(combination)
            if reference not in self._references:
                self._references[reference] = self._try(reference, REFERENCE_TIMEOUT)
                yield self._references[reference][0]
            yield self._compared(combination, reference)

    def _reference_for(self, combination: Combination) -> Combination:
        """One process. It must have the same micro-batches only if they are part of the loss."""
        model, size = self.config.model, self.config.batch.micro_batch_size
        if model.synchronizes_batch_norm:
            size = combination.micro_batch_size * combination.world_size
        elif model.uses_batch_norm or model.uses_dropout:
            size = combination.micro_batch_size
        return Combination(SINGLE.name, 1, size)

    def _try(self, combination: Combination, timeout: float) -> tuple[Row, Trained | None]:
        started = time.monotonic()
        try:
            trained = self._train(combination, timeout)
        except CombinationFailed as failure:
            return Row(combination, "failed", time.monotonic() - started, problem=str(failure)), None
        return Row(combination, "reference", time.monotonic() - started), trained

    def _compared(self, combination: Combination, reference: Combination) -> Row:
        row_of_reference, expected = self._references[reference]
        if expected is None:
            return Row(combination, "failed", problem="its reference failed, so there is nothing to compare it with")
        row, trained = self._try(combination, max(MIN_TIMEOUT, TIMEOUT_FACTOR * row_of_reference.seconds))
        if trained is None:
            return row
        differences = compare(trained, expected)
        row = dataclasses.replace(row, verdict="agrees", differences=differences)
        if differences.within(usual_limits(self.tolerance)):
            return row
        # Differences larger than usual may still be rounding, which some recipes enlarge with every step: measure how
        # far the reference diverges when each starting weight is perturbed by one rounding error.
        if reference not in self._rounding:
            try:
                repeated = compare(self._train(reference, REFERENCE_TIMEOUT), expected)
                perturbed = [self._train(reference, REFERENCE_TIMEOUT, seed) for seed in PERTURBATIONS]
            except CombinationFailed as failure:
                problem = (
                    f"it differs, and one process whose initial weights are perturbed by rounding fails: {failure}"
                )
                return dataclasses.replace(row, verdict="failed", problem=problem)
            # Kernels of GPUs may round differently each time, which later steps enlarge.
            if not repeated.within(CLEAR._replace(first_step=self.tolerance)):
                self._unseeded.add(reference)
            self._rounding[reference] = Differences(*map(max, *(compare(each, expected) for each in perturbed)))
        if reference in self._unseeded:
            return dataclasses.replace(row, verdict="differs", problem=UNSEEDED)
        rounding, synchronizes = self._rounding[reference], self.config.model.synchronizes_batch_norm
        if not differences.within(limits_with(rounding, self.tolerance, sums_within_the_model=synchronizes)):
            tensors = of_tensors(trained, expected)
            problem = f"the weights that differ most are {max(tensors, key=tensors.__getitem__)}"
            return dataclasses.replace(row, verdict="differs", problem=problem)
        makes = ", ".join(
            f"{name.replace('_', ' ')} {value:.1e}" for name, value in rounding._asdict().items() if value
        )
        problem = f"rounding alone causes such differences: {makes}"
        if differences.within(CLEAR):
            return dataclasses.replace(row, problem=problem)
        finer = "fp32" if self.config.precision == "bf16" else "fp64"
        problem += f"; too large to tell apart from errors: use fewer --steps, or --precision {finer}"
        return dataclasses.replace(row, verdict="unclear", problem=problem)

    def _train(self, combination: Combination, timeout: float, seed: int | None = None) -> Trained:
        """Train a combination, from starting weights perturbed by rounding errors if there is a seed for them."""
        recipe, task = self.recipe.resolve(), folder_of(type(self.config))
        samples = min(self.config.evaluation.max_samples or MAX_EVALUATED_SAMPLES, MAX_EVALUATED_SAMPLES)
        overrides = [
            *self.overrides,
            f"--batch.micro_batch_size={combination.micro_batch_size}",
            f"--train.stop_after_steps={self.steps}",
            "--logging.every=1",
            "--logging.trackers=[]",
            "--evaluation.every=null",
            f"--evaluation.max_samples={samples}",
            *(f'--evaluation.sets.{name}={{"max_samples": {samples}}}' for name in self.config.evaluation.sets),
            "--data.num_workers=0",
        ]
        if seed is not None:
            overrides.append(f"--perturb-weights={seed}")
        try:
            environment = {}
            if combination.strategy != SINGLE.name:
                accelerate_config = self.accelerate_configs[combination.strategy]
                environment = rehearsal_environment(accelerate_config, combination.world_size)
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder, "run")
                run_job(
                    partial(train, run_dir=run_dir, task=task),
                    recipe,
                    *overrides,
                    world_size=combination.world_size,
                    environment=environment,
                    folder=Path.cwd(),
                    timeout=timeout,
                )
                return read_run(run_dir)
        except JobFailed as failure:
            raise CombinationFailed(failure.in_one_line(task)) from failure
        # Whatever the user's Accelerate config or script may cause, the other combinations continue.
        except Exception as error:
            raise CombinationFailed(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
