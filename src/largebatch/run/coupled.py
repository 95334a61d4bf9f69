"""A loss that couples the whole global batch, exact for every division into micro-batches and processes.

Contrastive losses tell each sample from all others, so that they are no sum over micro-batches. Two passes make them
one (Gao et al. 2021, "GradCache", arXiv 2101.06983). The first computes the features of every micro-batch, without
gradients, and gathers those of the whole global batch, in its order of samples. Every process computes the same loss of
them all, and its gradient by each feature, g. The second pass goes through the micro-batches once more, with the same
randomness, and adds the gradient of (features * g).sum(), which is, by the chain rule, the loss's own; and that *is* a
sum over micro-batches. No gradient travels between processes but the usual ones: each uses the rows of g that belong to
its own features, and has all that the loss says of them.
"""

from collections.abc import Iterator, Sequence

import torch

from largebatch.backend.base import Backend
from largebatch.plan import RunPlan

# Relative differences between the features of both passes that rounding may make, by precision.
PASSES_AGREE = {"fp64": 1e-9, "fp32": 1e-2, "bf16": 5e-2}


class FeatureCache:
    """The features of one step's global batch, and the gradient of the loss by them.

    Args:
        plan: The plan of the run.
        backend: The prepared backend.
        step: The step, counted from 0.
        mine: This process's features, a tensor a micro-batch with a row a sample.
    """

    def __init__(self, plan: RunPlan, backend: Backend, step: int, mine: Sequence[torch.Tensor]):
        self._plan = plan
        self._backend = backend
        self._mine = mine
        self._gradient: torch.Tensor | None = None
        self._largest_difference = torch.zeros((), device=backend.device)
        self.everyones = self._gather(plan.batch_at(step).size).requires_grad_()
        """Features of the global batch, a row a sample, in the order of samples; the loss is to be computed of them."""

    def _gather(self, size: int) -> torch.Tensor:
        """Slot m x world_size + r of the global batch is micro-batch m of process r; only its last rows can lack.

        What a process computes only because the others do (see `order.MicroBatch`) is in slots behind its end.
        """
        row_shape = self._mine[0].shape[1:]
        padded = self._mine[0].new_zeros(len(self._mine), self._plan.micro_batch_size, *row_shape)
        for slot, features in zip(padded, self._mine, strict=True):
            slot[: len(features)] = features
        slots = self._backend.all_gather(padded).transpose(0, 1)
        return slots.flatten(0, 2)[:size].contiguous()

    def differentiate(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Take the loss of the global batch, and keep its gradient.

        Args:
            loss_sum: A scalar, computed of `everyones` and of nothing else that is trained; the same on every process.

        Returns:
            This process's share of it: one process has the whole, others nothing, so that they add up to it.

        Raises:
            ValueError: It is not.
        """
        others = [leaf for leaf in _leaves(loss_sum) if leaf is not self.everyones]
        if others:
            raise ValueError(
                f"the loss depends on a trained tensor of shape {tuple(others[0].shape)} besides the features, which "
                "would get no gradient; use it in the model's forward pass, as a factor of the features, say"
            )
        if loss_sum.grad_fn is None:
            raise ValueError("the loss does not depend on the features that step.gather has returned")
        (gradient,) = torch.autograd.grad(loss_sum, self.everyones)
        loss_sum = loss_sum.detach()
        # A loss that is not finite must not be lost where its gradient is.
        self._gradient = gradient * torch.where(torch.isfinite(loss_sum), 1.0, torch.nan)
        return loss_sum if self._backend.rank == 0 else loss_sum * 0.0

    def surrogate(self, micro_step: int, features: torch.Tensor) -> torch.Tensor:
        """A scalar whose gradient is that of the loss by way of these features.

        Args:
            micro_step: The micro-batch.
            features: Of its second pass, with gradients.

        Raises:
            ValueError: There are other features than in the first pass.
            RuntimeError: The loss has not been given.
        """
        if self._gradient is None:
            raise RuntimeError("step.backward_features was called before step.couple; give the loss first")
        first = self._mine[micro_step]
        if features.shape != first.shape:
            raise ValueError(
                f"the micro-batch's features have shape {tuple(features.shape)}, and had {tuple(first.shape)} in "
                "step.gather; compute them by the same function"
            )
        difference = (features.detach() - first).norm() / first.norm()
        self._largest_difference = torch.maximum(self._largest_difference, difference)
        slot = micro_step * self._backend.world_size + self._backend.rank
        # Behind the end of the global batch there are no rows.
        rows = self._gradient[slot * self._plan.micro_batch_size :][: len(features)]
        return (features[: len(rows)] * rows).sum()

    def passes_agree(self) -> bool:
        """Whether both passes had the same features, up to rounding; waits for the device."""
        return not float(self._largest_difference) > PASSES_AGREE[self._plan.precision]


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that gradients of `loss` would be accumulated in."""
    nodes = [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            yield node.variable
        parents = {parent for parent, _ in node.next_functions} - seen
        seen |= parents
        nodes += parents
