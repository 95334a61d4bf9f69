"""A loop in several layouts: what the optimizer gets in each, beside one process and each sample alone."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.linalg import lstsq, norm

from largebatch.errors import UserError
from largebatch.tools.audit.observe import Observed, Vector, observe
from largebatch.tools.local_jobs.jobs import JobFailed, JobTimedOut, run_job
from largebatch.tools.plan.accelerate_configs import rehearsal_environment
from largebatch.words import counted, some

# A parameter whose gradient is so small a part of all is rounding, such as the bias of an attention's keys.
NEGLIGIBLE = 1e-10
# Samples can be told apart if the smallest singular value of their gradients is so large a part of the largest.
INDEPENDENT = 1e-5
# What rounding may make of a gradient, as a part of it, by the dtype that has it.
TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-3, torch.float64: 1e-7}
# What rounding may make of an update, as a part of it: Muon's iterations in bf16 differ by 2 % if they are sharded.
UPDATE = 0.1
# What rounding may make at most, as multiples of what it makes if the samples are in reverse order, as in bf16.
MULTIPLES_OF_NOISE = 5
# Factors that differ from 1 by less are shown as 1.
SAME_FACTOR = 1e-4
# A sample that weighs less is lost.
NO_WEIGHT = 0.01
# What the order of samples may make of a gradient, as a part of it.
MAX_NOISE = 0.02


@dataclass(frozen=True)
class Layout:
    """One way to divide a batch."""

    world_size: int
    accumulation: int  # backward passes of a step

    def __str__(self) -> str:
        return f"W = {self.world_size}, A = {self.accumulation}"

    @property
    def parts(self) -> int:
        return self.world_size * self.accumulation

    @property
    def factors(self) -> Mapping[str, float]:
        """What a wrong loop may multiply by, by name, the simplest first."""
        w = self.world_size
        a = self.accumulation
        return {
            "1": 1,
            "W": w,
            "1/W": 1 / w,
            "A": a,
            "1/A": 1 / a,
            "W·A": w * a,
            "1/(W·A)": 1 / (w * a),
            "A/W": a / w,
            "1/√W": w**-0.5,
            "√W": w**0.5,
            "√A": a**0.5,
            "√(W·A)": (w * a) ** 0.5,
        }


ALONE = Layout(1, 1)


class NotTogether(UserError):
    """Processes did not end in time, or failed after others had ended: another try would end in the same way."""


@dataclass(frozen=True)
class Loop:
    """A user's function that trains a model for one epoch on given samples."""

    file: Path
    function: str
    batch_size: int  # samples of a step
    accelerate_config: Path | None
    timeout: float  # seconds of a call
    precision: str = "float64"  # torch's default dtype

    def call(self, layout: Layout, indices: Sequence[int]) -> list[Observed]:
        """Train on samples in a layout; what each process noted, by rank.

        Raises:
            UserError: A process failed or ended; the message says how.
            NotTogether: Some processes did not return, or failed when others had ended.
        """
        environment = rehearsal_environment(self.accelerate_config, layout.world_size) | {"ACCELERATE_USE_CPU": "true"}
        try:
            observed = run_job(
                observe,
                self.file,
                self.function,
                self.precision,
                list(indices),
                self.batch_size // layout.parts,
                layout.accumulation,
                world_size=layout.world_size,
                environment=environment,
                timeout=self.timeout,
            )
        except JobFailed as failure:
            said = re.sub(r"largebatch\.\S+: ", "", failure.in_one_line(self.file.parent))
            if re.search("cuda|nvidia|device_ids", said, re.IGNORECASE):
                said += "; the audit is on the CPU: choose the device, and device_ids, by torch.cuda.is_available()"
            is_late = isinstance(failure, JobTimedOut)
            if is_late or len(failure.reports) < layout.world_size:
                why = "give it a longer --timeout if it is slow, or" if is_late else "others had ended:"
                raise NotTogether(f"{layout}: {said}; {why} all processes must make the same calls") from failure
            raise UserError(f"{layout}: {said}") from failure
        if None in observed:
            raise UserError(f"{layout}: a process called exit(0) before the function had returned; return the model")
        return observed

    def one_step(self, indices: Sequence[int]) -> Observed:
        """What one process notes if it trains on all samples in one backward pass."""
        observed = self.call(ALONE, indices)[0]
        if len(observed.gradients) != 1:
            raise UserError(
                f"{counted(len(indices), 'sample')} in one micro-batch make "
                f"{counted(len(observed.gradients), 'step')} of a torch optimizer; train on the given indices alone, "
                "once, in micro-batches of micro_batch_size, and step after `accumulation` of them"
            )
        return observed


@dataclass(frozen=True)
class Outcome:
    """The reference's samples in another layout."""

    by_rank: Sequence[Observed]
    # How the gradient of the first step differs from that of one process:
    # "same": not at all
    # "not finite": it has a NaN or an infinity
    # "update": not at all, but the optimizer makes another update of it
    # "multiple": each parameter's is multiplied by a number
    # "unequal", "lost": samples have other weights, some of them none
    # "coupled": samples change each other's gradients
    # "own", "clipped": each process has another one, because it is not averaged, or is clipped before that
    # "start": it is that of other starting weights
    # "often": it is clipped in each micro-batch
    # "steps": there is not exactly one step
    kind: str
    said: str  # the same in words
    factors: Mapping[str, float] = field(default_factory=dict)  # those of its parameters

    @property
    def num_steps(self) -> int:
        """The steps that all processes have made."""
        return min(len(each.gradients) for each in self.by_rank)


@dataclass(frozen=True)
class Reference:
    """A batch in one backward pass of one process, and each of its samples alone.

    The gradient is a sum over samples unless they change each other's losses, as by BatchNorm.
    """

    loop: Loop
    whole: Observed
    reverse: Observed  # the same with the samples in reverse order, which differs by rounding
    samples: np.ndarray  # the gradient of each in a column; without columns if a sample cannot be trained alone

    @property
    def tolerance(self) -> float:
        """What rounding may make of a gradient, as a part of it."""
        return TOLERANCES[self.whole.dtype]

    def outcome(self, layout: Layout, num_samples: int) -> Outcome:
        """Train on the samples in a layout, and compare."""
        by_rank = self.loop.call(layout, range(num_samples))
        if any(each.parts != self.whole.parts for each in by_rank):
            raise UserError(f"{layout}: the returned model has other parameters than in one process")
        num_steps = min(len(each.gradients) for each in by_rank)
        if num_steps != 1:
            return Outcome(by_rank, "steps", f"{counted(num_steps, 'step')} instead of one")
        return Outcome(by_rank, *self._difference(by_rank))

    def _starts_elsewhere(self, start: Vector) -> bool:
        """Whether weights before the first step differ by more than rounding, of parameters that both train."""
        both = start * self.whole.start != 0
        return bool(norm((start - self.whole.start)[both]) > self.tolerance * norm(self.whole.start[both]))

    def _difference(self, by_rank: Sequence[Observed]) -> tuple[str, str, Mapping[str, float]]:
        """How a step differs, as the kind, what is said and the factors of an `Outcome`.

        What may explain all that follows comes first.
        """
        found = by_rank[0]
        if not all(np.isfinite(each.gradient).all() for each in by_rank):
            return "not finite", "not finite", {}
        if step_that_differs(each.unclipped for each in by_rank):
            kind = "own" if step_that_differs(each.gradients for each in by_rank) else "clipped"
            return kind, "another one in each process", {}
        if any(self._starts_elsewhere(each.start) for each in by_rank):
            return "start", "that of other weights", {}
        if found.num_clips > self.whole.num_clips:
            return "often", f"clipped {found.num_clips} times", {}
        factors = {}
        others = []
        for name, part in self.whole.parts.items():
            expected = self.whole.gradient[part]
            if norm(expected) > self._rounding(part):
                multiple = self._multiples(expected[:, None], found.gradient, part)
                if multiple is None:
                    others.append(name)
                else:
                    factor = float(multiple[0])
                    factors[name] = 1 if abs(factor - 1) < max(SAME_FACTOR, self.tolerance) else factor
        if not others:
            if any(factor != 1 for factor in factors.values()):
                return "multiple", f"{span(factors.values())} times", factors
            update = self.whole.update
            noise = norm(self.reverse.update - update)
            of_weights = torch.finfo(self.whole.dtype).eps * norm(self.whole.start)
            rounding = max(UPDATE * norm(update), MULTIPLES_OF_NOISE * noise, of_weights)
            if norm(found.update - update) <= rounding:
                return "same", "the same", factors
            times = norm(found.update) / norm(update)
            return "update", f"the same, but the update is {times:.4g} times as large", factors
        weights = self.weights_in(found.gradient)
        whole = self.weights_in(self.whole.gradient)
        if weights is None or whole is None:
            return "coupled", f"another gradient of {some(others)}", {}
        # Those of samples without a gradient cannot be told.
        ratios = np.divide(weights, whole, out=np.ones_like(weights), where=whole != 0)
        if lost := [str(sample) for sample in np.flatnonzero(np.abs(ratios) < NO_WEIGHT)]:
            return "lost", f"without samples {some(lost)} of {len(ratios)}, counted from 0", {}
        return "unequal", f"samples count {span(ratios)} times", {}

    def weights_in(self, gradient: Vector) -> Vector | None:
        """The weight of each sample in a gradient; None if it is not a sum over them, or they cannot be told apart."""
        return self._multiples(self.samples, gradient, slice(None))

    def _multiples(self, columns: np.ndarray, gradient: Vector, part: slice) -> Vector | None:
        """What multiplies the columns that a part of a gradient is a sum of; None if it is none, or not of only one."""
        multiples, _, rank, _ = lstsq(columns, gradient[part], rcond=INDEPENDENT)
        error = norm(columns @ multiples - gradient[part])
        size = np.maximum(1, norm(gradient[part]) / norm(self.whole.gradient[part]))
        # A sample without a target has no gradient.
        told_apart = rank == np.count_nonzero(columns.any(axis=0))
        return multiples if told_apart and error <= size * self._rounding(part) else None

    def _rounding(self, part: slice) -> np.floating:
        """What rounding may make of a part of the gradient."""
        gradient = self.whole.gradient
        return max(
            self.tolerance * norm(gradient[part]),
            MULTIPLES_OF_NOISE * norm(self.reverse.gradient[part] - gradient[part]),
            NEGLIGIBLE * norm(gradient),
        )


def reference_of(loop: Loop) -> Reference:
    """What the loop is compared with, in fp64, or in fp32 if its code fails with that."""
    indices = range(loop.batch_size)
    try:
        whole = loop.one_step(indices)
    except NotTogether:
        raise
    except UserError:
        loop = replace(loop, precision="float32")
        whole = loop.one_step(indices)
    if not whole.gradient.any():
        raise UserError(
            "the optimizer gets no gradient; make it after the model is wrapped or sharded, call backward before step, "
            "and reduce gradients in the last micro-batch"
        )
    if not np.isfinite(whole.gradient).all():
        raise UserError("the gradient is not finite; correct the loss")
    reverse = loop.one_step(indices[::-1])
    noise = norm(reverse.gradient - whole.gradient) / norm(whole.gradient)
    if not noise < MAX_NOISE:
        raise UserError(
            f"with the samples in reverse order, the gradient differs by {noise:.2g} of itself: random numbers do not "
            "follow from a seed or depend on the order; seed them, turn shuffling and augmentation off, and train in "
            "fp32"
        )
    samples = np.empty((whole.gradient.size, 0))
    # A sample alone has no statistics for BatchNorm, and no negatives.
    with suppress(UserError):
        alone = replace(loop, batch_size=1)
        found = np.stack([alone.one_step([sample]).gradient for sample in indices], axis=1)
        # A mean over no targets is NaN.
        samples = np.nan_to_num(found, posinf=0, neginf=0)
    return Reference(loop, whole, reverse, samples)


def step_that_differs(by_rank: Iterable[Sequence[Vector]]) -> int:
    """The number of the first step in which processes have different gradients; 0 if there is none."""
    for number, gradients in enumerate(zip(*by_rank, strict=False), start=1):
        if not np.allclose(gradients, gradients[0], rtol=1e-5, atol=0, equal_nan=True):
            return number
    return 0


def span(values: Iterable[float]) -> str:
    """The smallest and the largest of several numbers."""
    ends = (min(values), max(values))
    return " to ".join(dict.fromkeys(f"{end:.4g}" for end in ends))
