"""A loss that couples the whole global batch, exact for every division into micro-batches and processes.

Such a loss compares each sample with all others, so it is not a sum over micro-batches. Two passes turn it into one
(Gao et al. 2021, "GradCache", arXiv 2101.06983). The first computes the features of each micro-batch, without
gradients, and gathers those of the whole global batch, in its order of samples. Every process computes the same loss
from all of them, and g, the loss's gradient with respect to the features. The second pass goes through the
micro-batches again, with the same randomness, and adds the gradient of (features * g).sum(), which is the loss's own,
by the chain rule, and *is* a sum over micro-batches. Each process needs only the rows of g of its own features, so
processes exchange no gradients but the usual ones.
"""

from collections.abc import Sequence

import torch

from largebatch.backend.base import Backend

# Relative differences between the features of both passes that rounding may cause, by precision.
PASSES_AGREE = {"fp64": 1e-9, "fp32": 1e-2, "bf16": 5e-2}


class FeatureCache:
    """The features of one step's global batch, and the gradient of the loss with respect to them.

    Args:
        backend: The prepared backend.
        size: Samples of the global batch.
        mine: This process's features: one tensor per micro-batch, one row per sample.
    """

    def __init__(self, backend: Backend, size: int, mine: Sequence[torch.Tensor]):
        self._backend = backend
        self._mine = mine
        self._gradient: torch.Tensor | None = None
        self._largest_difference = torch.zeros((), device=backend.device)
        # Passes that do not contribute (see `order.MicroBatch`) are beyond the end of the global batch.
        rows = [{"features": features} for features in mine]
        if not backend.has_checked_features:
            backend.check_rows(rows, "step.gather")
            backend.has_checked_features = True
        gathered = backend.gather_rows(rows, size)
        self.gathered = gathered["features"].contiguous().requires_grad_()
        """The features of the global batch, one row per sample, in the order of samples."""

    def differentiate(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Take the loss of the global batch, and keep its gradient.

        Args:
            loss_sum: A scalar, the same on every process, computed from `gathered` and nothing else that is trained.

        Returns:
            This process's share of the loss: all of it on the first process, zero on the others.
        """
        trained = {
            name: parameter
            for name, parameter in self._backend.unwrapped_model.named_parameters()
            if parameter.requires_grad
        }
        gradient, *others = torch.autograd.grad(loss_sum, [self.gathered, *trained.values()], allow_unused=True)
        for name, other in zip(trained, others, strict=True):
            if other is not None:
                raise ValueError(
                    f"the loss depends on the parameter {name} besides the features, which would get no gradient; use "
                    "it in the model's forward pass, for example as a factor of the features"
                )
        loss_sum = loss_sum.detach()
        # A loss that is not finite must show even if its gradient is finite.
        self._gradient = gradient * torch.where(torch.isfinite(loss_sum), 1.0, torch.nan)
        return loss_sum if self._backend.rank == 0 else loss_sum * 0.0

    def surrogate(self, micro_step: int, features: torch.Tensor) -> torch.Tensor:
        """A scalar whose gradient is the loss's through the features of a micro-batch in the second pass."""
        if self._gradient is None:
            raise RuntimeError("step.backward_features was called before step.couple; give the loss first")
        first = self._mine[micro_step]
        difference = (features.detach() - first).norm() / first.norm()
        self._largest_difference = torch.maximum(self._largest_difference, difference)
        slot = micro_step * self._backend.world_size + self._backend.rank
        # There are no rows beyond the end of the global batch.
        rows = self._gradient[slot * self._backend.plan.micro_batch_size :][: len(features)]
        return (features[: len(rows)] * rows).sum()

    def passes_agree(self) -> bool:
        """Whether both passes had the same features, up to rounding; waits for the device."""
        return not float(self._largest_difference) > PASSES_AGREE[self._backend.plan.precision]
