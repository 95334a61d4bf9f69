"""Checks that a recipe is the same training run on every strategy, number of processes and micro-batch size.

Every combination is trained for some steps from the recipe's own files, and compared with one process without any
strategy. They may differ only by rounding; any other difference is an error of the recipe or of this library.
"""

import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError, UserError
from largebatch.model.attention import KEY_BIASES
from largebatch.plan import resolve
from largebatch.plan.strategies import SINGLE
from largebatch.storage.run_folder import RunFolder
from largebatch.system.failures import Kind
from largebatch.tools.local_jobs.jobs import JobFailed, run_job
from largebatch.tools.local_jobs.training import train
from largebatch.tools.plan.accelerate_configs import rehearsal_environment
from largebatch.tools.verify.differences import (
    MAX_DISTINGUISHABLE,
    MEASURES,
    Differences,
    Trained,
    Weights,
    beyond,
    compare,
    factors_of_the_first_step,
    largest,
    limits,
    of_updates,
    read_run,
)
from largebatch.tools.verify.samples import fault_of_samples

MIN_EVALUATED_SAMPLES = 50

# A job that hangs ends earlier, by its own watchdog.
TIMEOUT = 6 * 3600  # seconds
REFERENCE_HANG_SECONDS = 1800
# A step is taken for a hang after this many times the time of the whole reference run, or after a minute if that is
# longer, because the machine may be busy.
HANG_FACTOR = 5
MIN_HANG_SECONDS = 60

# Seeds of the runs that measure how rounding errors grow.
PERTURBATIONS = (1, 2, 3)

# If the loss is multiplied by one number, its gradient is, too: the two factors differ by at most this part of their
# distance from 1. Noise does not do that, nor do numbers that differ from one micro-batch to the next.
PART_OF_A_FACTOR = 1e-3

UNSEEDED = (
    "one process differs from itself when it trains again: the data, the model or train.py draws random numbers that "
    "do not follow from the recipe's seed"
)
NOT_KEPT = (
    "a run that is not stopped does not differ, so training depends on something that checkpoints do not have, such as "
    "an average in train.py (keep it in a buffer of the model), a copy of the starting weights (make it before "
    "run.prepare) or an attribute of the optimizer (use optimizer.state)"
)


@dataclass(frozen=True)
class Combination:
    """One way to divide a global batch."""

    strategy: str  # name of an Accelerate config, or that of one process alone
    world_size: int
    micro_batch_size: int  # samples per process per forward pass
    resumes: bool = False  # whether it resumes a run that one process has trained for half of the steps


@dataclass
class Row:
    """The outcome of one combination."""

    combination: Combination
    # "reference", "agrees", "differs", "unclear" (rounding alone differs as much), "failed" (it did not train to the
    # end), or "does not divide" (the global batch is not a multiple of its micro-batch size times its processes).
    verdict: str
    seconds: float = 0.0  # time it took
    trained: Trained | None = None  # the numbers of a reference, if it trained to the end
    differences: Differences | None = None  # from the reference, if it trained to the end
    problem: str | None = None  # a remark on the verdict, if there is one
    # The names of the differences that are larger than rounding makes them; none if one process differs from itself.
    beyond: frozenset[str] = frozenset()
    # Whether the first loss and its gradient are those of the reference times one number.
    is_scaled: bool = False


_Rounding = tuple[Differences, frozenset[str]]
"""How rounding errors grow in one process that starts from weights perturbed by them, and the weights whose gradient is
only rounding."""


@dataclass(frozen=True)
class Verification:
    """The comparison of a recipe's combinations."""

    config: RecipeConfig  # the validated recipe, overrides applied
    recipe: Path  # the recipe's JSON file
    overrides: Sequence[str]  # command-line overrides of the recipe
    accelerate_configs: Mapping[str, Path]  # the Accelerate config of each strategy
    steps: int  # steps to train
    # What combinations are compared with.
    _references: dict[Combination, Row] = field(default_factory=dict, init=False)
    # Measured if a combination differs; None if a reference differs from itself.
    _rounding: dict[Combination, _Rounding | None] = field(default_factory=dict, init=False)

    @property
    def task(self) -> Path:
        """The folder of the recipe's task."""
        return self.config.task_folder()

    def limits(self, rounding: Differences | None = None) -> Differences:
        """The largest differences with which a run agrees; `rounding` as in `differences.limits`."""
        precision = self.config.precision
        tolerance = float(getattr(self.config.optimizer_entry.tolerance, precision))
        return limits(tolerance, precision, rounding, self.config.model.synchronizes_batch_norm)

    def rows(self, combinations: Sequence[Combination]) -> Iterator[Row]:
        """Train each combination, and its reference before it, and compare them; yield each row when it is done.

        Combinations whose reference does not divide have no row. One that fails is the last row, because whatever is
        compared would most likely fail for the same reason.
        """
        for combination in combinations:
            reference = self._reference_for(combination)
            if reference not in self._references:
                self._references[reference] = self._tried(reference)
                yield self._references[reference]
            row = self._references[reference]
            if row.verdict == "failed":
                return
            if row.trained:
                yield self._tried(combination, row.trained)

    def agrees_in_fp32(self, combination: Combination) -> bool:
        """Whether a combination and its reference, both trained in fp32, agree; False if the recipe has no fp32."""
        overrides = [*self.overrides, "--precision=fp32"]
        try:
            config = load_config(self.recipe, overrides, task=self.task)
        except ConfigError:
            return False
        finer = dataclasses.replace(self, config=config, overrides=overrides)
        return [row.verdict for row in finer.rows([combination])] == ["reference", "agrees"]

    def fault_of_samples(self) -> str | None:
        """What is wrong with the source itself, seen without a training; None if nothing is."""
        arguments = (self.recipe.resolve(), self.overrides, self.task)
        with suppress(JobFailed):
            faults: list[str | None] = run_job(fault_of_samples, *arguments, timeout=TIMEOUT)
            return faults[0]
        return None

    def _reference_for(self, combination: Combination) -> Combination:
        """What a combination is compared with: one process, with the same micro-batches if the loss depends on them."""
        model = self.config.model
        size = self.config.batch.micro_batch_size
        if model.synchronizes_batch_norm:
            size = combination.micro_batch_size * combination.world_size
        elif model.uses_batch_norm or model.uses_dropout:
            size = combination.micro_batch_size
        return Combination(SINGLE.name, 1, size)

    def _tried(self, combination: Combination, expected: Trained | None = None) -> Row:
        """Train a combination and compare it with what is expected; if nothing is, it is a reference."""
        row = Row(combination, "reference")
        started = time.monotonic()
        try:
            trained = self._train(combination)
            row.seconds = time.monotonic() - started
            if expected:
                self._judge(row, trained, expected)
            else:
                row.trained = trained
        except ConfigError as error:
            row.verdict = "does not divide"
            row.problem = error.problems[0]
        # Whatever the user's Accelerate config or script may cause, the other combinations continue.
        except Exception as error:
            row.verdict = "failed"
            row.problem = f"{type(error).__name__}: {error}".partition("\n")[0]
            if isinstance(error, JobFailed):
                row.problem = error.in_one_line(self.task)
        return row

    def _judge(self, row: Row, trained: Trained, expected: Trained) -> None:
        """Set the differences, verdict and problem of a combination."""
        row.verdict = "agrees"
        row.differences = compare(trained, expected)
        usual = self.limits()
        if not beyond(row.differences, usual):
            return
        # Differences larger than usual may still be rounding, which some recipes enlarge with every step.
        reference = self._reference_for(row.combination)
        if reference not in self._rounding:
            self._rounding[reference] = self._measure_rounding(reference, expected)
        rounding = self._rounding[reference]
        if rounding is None:
            row.verdict = "differs"
            row.problem = UNSEEDED
            return
        made, noise = rounding
        row.differences = compare(trained, expected, noise)
        allowed = self.limits(made)
        row.beyond = beyond(row.differences, allowed)
        if row.beyond:
            row.verdict = "differs"
            if row.beyond & {"first_loss", "first_grad_norm"}:
                loss, gradient = factors_of_the_first_step(trained, expected)
                row.is_scaled = math.isfinite(loss) and abs(gradient - loss) <= PART_OF_A_FACTOR * abs(loss - 1)
                row.problem = (
                    f"in the first step, the loss is {loss:.5g} times that of one process, and the gradient norm "
                    f"{gradient:.5g} times"
                )
            elif row.beyond == {"evaluation"}:
                row.problem = "the weights agree; only the evaluation differs"
            else:
                row.problem = largest(trained, expected, noise, usual["update"])
            if row.combination.resumes:
                row.problem += f"; {NOT_KEPT}"
            return
        unusual = beyond(row.differences, usual)
        measured = ", ".join(f"{name.replace('_', ' ')} {allowed[name]:.1e}" for name in MEASURES if name in unusual)
        row.problem = "rounding alone causes such differences" + (f"; allowed: {measured}" if measured else "")
        row.problem += _listed(noise)
        if beyond(row.differences, MAX_DISTINGUISHABLE):
            finer = "fp32" if self.config.precision == "bf16" else "fp64"
            row.verdict = "unclear"
            row.problem += f"; too large to tell apart from errors: use fewer --steps, or --precision {finer}"

    def _measure_rounding(self, reference: Combination, expected: Trained) -> _Rounding | None:
        # Kernels of GPUs may round differently each time, which later steps enlarge.
        usual = self.limits()
        first = {name: usual[name] for name in ("first_loss", "first_grad_norm")}
        if beyond(compare(self._train(reference), expected), {**MAX_DISTINGUISHABLE, **first}):
            return None
        perturbed = [self._train(reference, seed) for seed in PERTURBATIONS]
        # Adam makes a whole step of any gradient, so one rounding error turns the whole update.
        updates = [of_updates(each, expected) for each in perturbed]
        noise = frozenset(
            name for each in updates for name, difference in each.items() if difference > MAX_DISTINGUISHABLE["update"]
        )
        differences = [compare(each, expected, noise) for each in perturbed]
        return {name: max(each[name] for each in differences) for name in MEASURES}, noise

    def _train(self, combination: Combination, seed: int | None = None) -> Trained:
        """Train a combination, and separately its first update.

        A reference starts from weights perturbed by rounding errors if there is a seed for them.
        """
        plan = resolve(self.config, combination.world_size, combination.micro_batch_size)
        # The first step whose learning rate is not 0.
        first = next((step for step in range(1, self.steps) if plan.lr_of(plan.batch_at(step - 1))), self.steps)
        perturbed = [] if seed is None else [f"--perturb-weights={seed}"]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if combination.resumes:
                self._run(folder, self._reference_for(combination), self.steps // 2)
                trained = self._run(folder, combination, self.steps)
                # A run is also evaluated where it stops.
                at_the_end = [line for line in trained.evaluations if line["step"] == self.steps]
                return dataclasses.replace(trained, evaluations=at_the_end)
            initial: Weights = {}
            if combination.strategy == SINGLE.name and seed is None:
                # Steps this small are lost in rounding.
                initial = self._run(folder / "initial", combination, first, "--learning_rate.base_lr=1e-30").weights
            trained = updated = self._run(folder / "updated", combination, first, *perturbed)
            if first < self.steps:
                trained = self._run(folder / "run", combination, self.steps, *perturbed)
        return dataclasses.replace(trained, updated=updated.weights, initial=initial)

    def _run(self, run_dir: Path, combination: Combination, steps: int, *words: str) -> Trained:
        """Train up to a step, from the start or what is in the run's folder, with further words on the command line."""
        environment = {}
        if combination.strategy != SINGLE.name:
            accelerate_config = self.accelerate_configs[combination.strategy]
            environment = rehearsal_environment(accelerate_config, combination.world_size)
        try:
            run_job(
                partial(train, run_dir=run_dir, task=self.task),
                self.recipe.resolve(),
                *self._overrides(combination, steps),
                *words,
                world_size=combination.world_size,
                environment=environment,
                timeout=TIMEOUT,
            )
        except JobFailed:
            ending = RunFolder(run_dir).ending()
            if ending is None or ending.kind != Kind.HANG:
                raise
            raise UserError(
                f"no progress for {self._hang_seconds(combination):.0f} s; rank after rank waits in "
                f"{_where_they_wait(run_dir, self.task)}: processes must make the same calls, so neither a layer nor a "
                "call of `run` may depend on a process's rank or data"
            ) from None
        return read_run(run_dir)

    def _hang_seconds(self, combination: Combination) -> float:
        """How long a step of a combination may take."""
        reference = self._references.get(self._reference_for(combination))
        if reference is None:
            return max(REFERENCE_HANG_SECONDS, self.config.faults.hang_seconds or TIMEOUT)
        return max(MIN_HANG_SECONDS, HANG_FACTOR * reference.seconds)

    def _overrides(self, combination: Combination, steps: int) -> list[str]:
        # More than a micro-batch, which other sizes then divide otherwise.
        samples = max(MIN_EVALUATED_SAMPLES, 3 * self.config.batch.micro_batch_size // 2)
        samples = min(self.config.evaluation.max_samples or samples, samples)
        return [
            *self.overrides,
            f"--batch.micro_batch_size={combination.micro_batch_size}",
            f"--train.stop_after_steps={steps}",
            "--logging.every=1",
            "--logging.trackers=[]",
            "--evaluation.every=null",
            "--checkpoint.then=null",
            f"--evaluation.max_samples={samples}",
            *(f'--evaluation.sets.{name}={{"max_samples": {samples}}}' for name in self.config.evaluation.sets),
            "--data.num_workers=0",
            f"--faults.hang_seconds={self._hang_seconds(combination)}",
        ]


def _where_they_wait(run_dir: Path, task: Path) -> str:
    """The line of the task in which each process of a run that hangs is, by rank, as its watchdog has written it."""
    places = []
    for file in sorted(RunFolder(run_dir).stacks_dir.glob("*/rank_*.txt")):
        found = re.findall(r'File "(.+)", line (\d+)', file.read_text())
        # The innermost call comes first.
        inside = next((f"{Path(name).name}:{line}" for name, line in found if Path(name).is_relative_to(task)), "?")
        places.append(inside)
    return ", ".join(places)


def _listed(noise: Collection[str]) -> str:
    """What is not compared, and the remedy for the biases of keys."""
    if not noise:
        return ""
    biases = any(name.endswith(KEY_BIASES) for name in noise)
    remedy = "; call freeze_key_biases(model) in build_model" if biases else ""
    return f"; not compared, because their gradients are only rounding: {', '.join(sorted(noise))}{remedy}"
