"""A loss that couples the whole global batch, exact for every division into micro-batches and processes.

Such a loss compares each sample with all others, so it is not a sum over micro-batches. Its gradient is one, by the
chain rule: with g, the loss's gradient with respect to the features, it is that of (features * g).sum() (Gao et al.
2021, "GradCache", arXiv 2101.06983). So the features of the global batch are gathered once. Each process computes the
losses of an equal share of the samples against all of them, in tiles of a few rows with their gradient, so that no
matrix of all pairs exists. A reduce-scatter sums the shares of g, and leaves each process the rows of its own samples.

With one micro-batch per process, the graph of its features is kept for the backward pass. With several, a first pass
without gradients computes the features, and a second one, with the same randomness, those of one micro-batch at a time.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from largebatch.backend.base import Backend
from largebatch.data.source import Batch
from largebatch.errors import UserError
from largebatch.model.coupled_losses import Encoded
from largebatch.plan.contract import PAIRS_PER_TILE

Encode = Callable[[Batch], Encoded]
CoupledLoss = Callable[[slice, Encoded, Encoded], torch.Tensor]
"""Maps a range of samples, what these are encoded as, and what all of the global batch are, to the losses of the range.
"""

# Relative differences between the features of both passes, or the losses of two tiles, that rounding may cause.
ROUNDING = {"fp64": 1e-9, "fp32": 1e-2, "bf16": 5e-2}


class CoupledBatch:
    """The loss of one step's global batch, and its gradient with respect to what this process encodes.

    Args:
        backend: The prepared backend.
        size: Samples of the global batch.
        mine: What `encode` returned for each of this process's micro-batches.
        loss: See `Step.couple`.
        is_first: Whether this is the first step of an attempt, in which `encode` and `loss` are checked.
    """

    def __init__(self, backend: Backend, size: int, mine: Sequence[Encoded], loss: CoupledLoss, is_first: bool):
        self._plan = backend.plan
        self._rank = backend.rank
        self._size = size
        mine = [{name: values.detach() for name, values in each.items()} for each in mine]
        # Compared with what is encoded again.
        self._compared = mine if is_first else None
        self._passes_differ = torch.zeros((), dtype=torch.bool, device=backend.device)
        rows = [{name: values for name, values in each.items() if values.ndim} for each in mine]
        if is_first:
            backend.check_rows(rows, "step.couple")
        # Passes that do not contribute (see `order.MicroBatch`) are beyond the end of the global batch.
        everything = backend.gather_rows(rows, size)
        everything |= {name: values.clone() for name, values in mine[0].items() if not values.ndim}
        trained = {name: values.requires_grad_() for name, values in everything.items() if values.is_floating_point()}
        start = size * backend.rank // backend.world_size
        stop = size * (backend.rank + 1) // backend.world_size
        # The vectors of a sample: a pair, or more with hard negatives.
        num_vectors = sum(values[0].numel() // values.shape[-1] for values in trained.values() if values.ndim)
        tile = max(1, 2 * PAIRS_PER_TILE // (size * max(2, num_vectors)))
        if is_first:
            with backend.raise_on_all_ranks():
                _check(loss, slice(start, min(start + tile, stop)), everything, backend)
        self.loss_sum = torch.zeros((), dtype=next(iter(trained.values())).dtype, device=backend.device)
        """This process's share of the sum of all samples' losses."""
        gradients = {name: torch.zeros_like(values) for name, values in trained.items()}
        for name, values in trained.items():
            values.grad = gradients[name]
        for first in range(start, stop, tile):
            self.loss_sum += _add_gradients(loss, slice(first, min(first + tile, stop)), everything, gradients)
        # A loss that is not finite must show even if its gradient is finite.
        factor = torch.where(torch.isfinite(self.loss_sum), 1.0, torch.nan)
        self._gradients = {name: backend.sum_rows(share.mul_(factor), len(mine)) for name, share in gradients.items()}

    def surrogate(self, micro_step: int, encoded: Encoded) -> torch.Tensor:
        """A scalar whose gradient is the loss's through what `encode` returned for a micro-batch."""
        slot = micro_step * self._plan.world_size + self._rank
        # There are no rows beyond the end of the global batch.
        count = min(max(self._size - slot * self._plan.micro_batch_size, 0), self._plan.micro_batch_size)
        parts = []
        for name, gradient in self._gradients.items():
            values = encoded[name]
            if self._compared is not None:
                first = self._compared[micro_step][name]
                # False for NaN, which the loss shows.
                self._passes_differ |= (values.detach() - first).norm() > ROUNDING[self._plan.precision] * first.norm()
            if values.ndim:
                parts.append((values[:count] * gradient[micro_step][:count]).sum())
            else:
                # Each sample of the global batch adds its part.
                parts.append(values * gradient * (count / self._size))
        return torch.stack(parts).sum()

    def passes_agree(self) -> bool:
        """Whether both passes of the first step had the same features, up to rounding; waits for the device."""
        return not self._passes_differ


def _part(everything: Encoded, rows: slice) -> Encoded:
    """What the samples in `rows` are encoded as, as new tensors: gradients of slices would be as large as the whole."""
    return {
        name: values[rows].detach().requires_grad_(values.requires_grad) if values.ndim else values
        for name, values in everything.items()
    }


def _add_gradients(
    loss: CoupledLoss, rows: slice, everything: Encoded, gradients: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the sum of some samples' losses, and add their gradients, by the names of what is trained."""
    own = _part(everything, rows)
    with torch.enable_grad():
        losses = loss(rows, own, everything).sum()
    leaves = {name: values for name, values in own.items() if values.ndim and values.requires_grad}
    torch.autograd.backward(losses, inputs=[*(everything[name] for name in gradients), *leaves.values()])
    for name, values in leaves.items():
        if values.grad is not None:
            gradients[name][rows] += values.grad
    return losses.detach()


def _check(loss: CoupledLoss, rows: slice, everything: Encoded, backend: Backend) -> None:
    """Raise UserError unless these samples' losses compare them with all samples, and depend on nothing else."""
    plan = backend.plan
    numbers = sum(values[0].numel() for values in everything.values() if values.ndim and values.requires_grad)
    if numbers != plan.coupled_features:
        raise UserError(
            f"step.couple: `encode` returns {numbers} numbers per sample, but the plan counts {plan.coupled_features}; "
            "correct coupled_features of Config in config.py"
        )
    rounding = ROUNDING[plan.precision]
    count = rows.stop - rows.start
    if not count:
        return
    part = slice(rows.start, rows.start + (count + 1) // 2)
    with torch.enable_grad():
        both = loss(rows, _part(everything, rows), everything).detach()
        losses = loss(part, _part(everything, part), everything)
    if both.shape != (count,) or losses.shape != (part.stop - part.start,):
        raise UserError(
            f"step.couple: for {count} samples the loss has shape {tuple(both.shape)}; return the loss of each sample "
            "in `rows`, without a sum or mean over them"
        )
    if not torch.allclose(both[: len(losses)], losses, rtol=rounding, atol=rounding, equal_nan=True):
        raise UserError(
            "step.couple: the losses of samples change with the range of samples that is asked for, which is "
            "arbitrary; compare the samples in `rows` with all samples, not only with each other"
        )
    if not losses.requires_grad:
        raise UserError("step.couple: the loss does not depend on what `encode` returns, so nothing would be trained")
    parameters = {
        name: parameter for name, parameter in backend.unwrapped_model.named_parameters() if parameter.requires_grad
    }
    features = [values for values in everything.values() if values.requires_grad and values.ndim]
    total = losses.sum()
    # Together: a compiled loss frees in a backward pass what a second one would need.
    gradients = torch.autograd.grad(total, [*parameters.values(), *features], allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=False):
        if gradient is not None:
            raise UserError(
                f"step.couple: the loss depends on the parameter {name} itself, which would get no gradient; return "
                "it from the model's forward pass, and from `encode` as a scalar"
            )
    reaches_others = False
    for gradient in gradients[len(parameters) :]:
        if gradient is not None:
            reaches_others |= bool(gradient[: part.start].any() or gradient[part.stop :].any())
    if total > rounding and not reaches_others:
        raise UserError(
            "step.couple: the loss has no gradient for the samples that it compares its own with, so a part of the "
            "gradient would be missing; do not detach them"
        )
