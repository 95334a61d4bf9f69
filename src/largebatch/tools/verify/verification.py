"""Checks that a recipe is the same training run on every strategy, number of processes and micro-batch size.

Every combination is trained for some steps from the recipe's own files, and compared with one process without any
strategy. They may differ only by rounding; any other difference is an error of the recipe or of this library.
"""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from largebatch.backend.accelerate_configs import rehearsal_environment
from largebatch.config import RecipeConfig
from largebatch.errors import ConfigError
from largebatch.model.attention import KEY_BIASES
from largebatch.plan import resolve
from largebatch.plan.strategies import SINGLE
from largebatch.task_folders import folder_of
from largebatch.tools.verify.differences import (
    CLEAR,
    UPDATE,
    Differences,
    Trained,
    compare,
    limits_with,
    of_tensors,
    of_updates,
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
NOT_KEPT = (
    "a run that is not stopped does not differ, so training depends on something that checkpoints do not have, such as "
    "an average in train.py; keep it with run.keep(name, state)"
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


class _Rounding(NamedTuple):
    """What one process shows about rounding, trained again, and from weights perturbed by it."""

    differences: Differences  # what grows from one rounding error of each weight
    is_repeatable: bool  # whether it trains the same again
    noise: frozenset[str]  # weights whose gradient is only rounding


@dataclass
class _Reference:
    """What combinations are compared with."""

    row: Row
    trained: Trained | None  # None if it failed
    rounding: _Rounding | None = None  # measured if a combination differs


_Training = Callable[[Combination, float], Trained]  # given the seconds that it may take


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
    _references: dict[Combination, _Reference] = field(default_factory=dict, init=False)

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
                self._references[reference] = _Reference(*self._try(reference, REFERENCE_TIMEOUT, self._train))
                yield self._references[reference].row
            yield self._compared(combination, self._references[reference], self._train)

    def pair_to_resume(self, rows: Sequence[Row]) -> tuple[Row, Row] | None:
        """Two outcomes that agree, of different strategies and numbers of processes; None without, or in one step."""
        same = [row for row in rows if row.verdict in ("agrees", "reference")]
        for first, then in itertools.product(reversed(same), same):
            one, other = first.combination, then.combination
            differ = one.strategy != other.strategy and one.world_size != other.world_size
            if self.steps > 1 and differ and self._reference_for(one) == self._reference_for(other):
                return first, then
        return None

    def resumed(self, first: Combination, then: Combination) -> Row:
        """Stop one combination halfway, resume as another, and compare with the reference of both."""
        reference = self._references[self._reference_for(then)]

        def train(_: Combination, timeout: float) -> Trained:
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder, "run")
                self._run(run_dir, first, timeout, self.steps // 2)
                trained = self._run(run_dir, then, timeout, self.steps)
            assert reference.trained is not None
            # A run is also evaluated where it stops; its first update has been compared already.
            evaluations = trained.evaluations[-len(reference.trained.evaluations) :]
            return dataclasses.replace(trained, evaluations=evaluations, updated=reference.trained.updated)

        row = self._compared(then, reference, train)
        return dataclasses.replace(row, problem=f"{row.problem}; {NOT_KEPT}") if row.verdict == "differs" else row

    def _reference_for(self, combination: Combination) -> Combination:
        """One process. It must have the same micro-batches only if they are part of the loss."""
        model, size = self.config.model, self.config.batch.micro_batch_size
        if model.synchronizes_batch_norm:
            size = combination.micro_batch_size * combination.world_size
        elif model.uses_batch_norm or model.uses_dropout:
            size = combination.micro_batch_size
        return Combination(SINGLE.name, 1, size)

    def _try(self, combination: Combination, timeout: float, train: _Training) -> tuple[Row, Trained | None]:
        started = time.monotonic()
        try:
            trained = train(combination, timeout)
        except CombinationFailed as failure:
            return Row(combination, "failed", time.monotonic() - started, problem=str(failure)), None
        return Row(combination, "reference", time.monotonic() - started), trained

    def _compared(self, combination: Combination, reference: _Reference, train: _Training) -> Row:
        expected = reference.trained
        if expected is None:
            return Row(combination, "failed", problem="its reference failed, so there is nothing to compare it with")
        row, trained = self._try(combination, max(MIN_TIMEOUT, TIMEOUT_FACTOR * reference.row.seconds), train)
        if trained is None:
            return row
        row = dataclasses.replace(row, verdict="agrees", differences=compare(trained, expected))
        if row.differences and row.differences.within(usual_limits(self.tolerance)):
            return row
        # Differences larger than usual may still be rounding, which some recipes enlarge with every step.
        if reference.rounding is None:
            try:
                reference.rounding = self._measure_rounding(reference.row.combination, expected)
            except CombinationFailed as failure:
                problem = (
                    f"it differs, and one process whose initial weights are perturbed by rounding fails: {failure}"
                )
                return dataclasses.replace(row, verdict="failed", problem=problem)
        return self._judged(row, trained, expected, reference.rounding)

    def _measure_rounding(self, reference: Combination, expected: Trained) -> _Rounding:
        repeated = compare(self._train(reference, REFERENCE_TIMEOUT), expected)
        perturbed = [self._train(reference, REFERENCE_TIMEOUT, seed) for seed in PERTURBATIONS]
        # Adam makes a whole step of any gradient, so one rounding error turns the whole update.
        updates = [of_updates(each, expected) for each in perturbed]
        noise = frozenset(name for each in updates for name, difference in each.items() if difference > CLEAR.update)
        differences = Differences(*map(max, *(compare(each, expected, noise) for each in perturbed)))
        # Kernels of GPUs may round differently each time, which later steps enlarge.
        return _Rounding(differences, repeated.within(CLEAR._replace(first_step=self.tolerance)), noise)

    def _judged(self, row: Row, trained: Trained, expected: Trained, rounding: _Rounding) -> Row:
        """The row of a combination that differs more than usual."""
        if not rounding.is_repeatable:
            return dataclasses.replace(row, verdict="differs", problem=UNSEEDED)
        differences = compare(trained, expected, rounding.noise)
        row = dataclasses.replace(row, differences=differences)
        synchronizes = self.config.model.synchronizes_batch_norm
        if not differences.within(
            limits_with(rounding.differences, self.tolerance, sums_within_the_model=synchronizes)
        ):
            return dataclasses.replace(row, verdict="differs", problem=_largest(trained, expected, rounding.noise))
        makes = ", ".join(
            f"{name.replace('_', ' ')} {value:.1e}" for name, value in rounding.differences._asdict().items() if value
        )
        problem = f"rounding alone causes such differences: {makes}"
        if rounding.noise:
            problem += f"; not compared, because their gradients are only rounding: {_listed(rounding.noise)}"
        if differences.within(CLEAR):
            return dataclasses.replace(row, problem=problem)
        finer = "fp32" if self.config.precision == "bf16" else "fp64"
        problem += f"; too large to tell apart from errors: use fewer --steps, or --precision {finer}"
        return dataclasses.replace(row, verdict="unclear", problem=problem)

    def _train(self, combination: Combination, timeout: float, seed: int | None = None) -> Trained:
        """Train a combination, and separately its first update.

        A reference starts from weights perturbed by rounding errors if there is a seed for them.
        """
        plan = resolve(self.config, combination.world_size, combination.micro_batch_size)
        first = next((step for step in range(1, self.steps) if plan.lr_of(plan.batch_at(step - 1))), self.steps)
        perturbed = [] if seed is None else [f"--perturb-weights={seed}"]
        with tempfile.TemporaryDirectory() as folder:

            def run(name: str, steps: int, *words: str) -> Trained:
                return self._run(Path(folder, name), combination, timeout, steps, *words)

            trained = run("run", self.steps, *perturbed)
            updated = trained if first == self.steps else run("updated", first, *perturbed)
            if combination.strategy == SINGLE.name and seed is None:
                # Steps this small are lost in rounding.
                initial = run("initial", first, "--learning_rate.base_lr=1e-30").weights
                trained = dataclasses.replace(trained, initial=initial)
        return dataclasses.replace(trained, updated=updated.weights)

    def _run(self, run_dir: Path, combination: Combination, timeout: float, steps: int, *words: str) -> Trained:
        """Train up to a step, from the start or what is in the run's folder, with further words on the command line."""
        recipe, task = self.recipe.resolve(), folder_of(type(self.config))
        samples = min(self.config.evaluation.max_samples or MAX_EVALUATED_SAMPLES, MAX_EVALUATED_SAMPLES)
        overrides = [
            *self.overrides,
            f"--batch.micro_batch_size={combination.micro_batch_size}",
            f"--train.stop_after_steps={steps}",
            "--logging.every=1",
            "--logging.trackers=[]",
            "--evaluation.every=null",
            f"--evaluation.max_samples={samples}",
            *(f'--evaluation.sets.{name}={{"max_samples": {samples}}}' for name in self.config.evaluation.sets),
            "--data.num_workers=0",
            *words,
        ]
        try:
            environment = {}
            if combination.strategy != SINGLE.name:
                accelerate_config = self.accelerate_configs[combination.strategy]
                environment = rehearsal_environment(accelerate_config, combination.world_size)
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


def _largest(trained: Trained, expected: Trained, noise: Collection[str]) -> str:
    """Which weights differ most: already in their first update, if that shows it."""
    updates, weights = of_updates(trained, expected), of_tensors(trained.weights, expected.weights)
    update = max(updates.keys() - noise, key=updates.__getitem__, default=None)
    if update is not None and updates[update] > UPDATE:
        return f"the first update differs most in {update}, by {updates[update]:.1e} of its norm"
    return f"the weights that differ most are {max(weights.keys() - noise, key=weights.__getitem__)}"


def _listed(names: Collection[str]) -> str:
    """The names in one line, and the remedy for the biases of keys."""
    biases = any(name.endswith(KEY_BIASES) for name in names)
    return ", ".join(sorted(names)) + ("; call freeze_key_biases(model) in build_model" if biases else "")
