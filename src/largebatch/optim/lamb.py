"""LAMB: Adam with its own learning rate for each layer."""

import math
from typing import Any

import torch

from largebatch.optim.layerwise import LayerwiseOptimizer, local_part


class Lamb(LayerwiseOptimizer):
    """Adam with decoupled weight decay, whose step u = r + lambda w of a layer w is multiplied by |w| / |u|.

    You et al. 2019 (arXiv 1904.00962), algorithm 2 with phi the identity; r is Adam's bias-corrected step with `eps`
    added to its denominator, and lambda is `weight_decay`.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _step_group(self, group: dict[str, Any]) -> None:
        tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
        weights = [local_part(tensor) for tensor in tensors]
        updates = [self._adam_step(tensor, group) for tensor in tensors]
        for weight, update in zip(weights, updates, strict=True):
            update.add_(weight, alpha=group["weight_decay"])
        if group["layerwise"]:
            for view, ratio in self._trust_ratios(tensors, updates, torch.div):
                view.mul_(ratio)
        for weight, update in zip(weights, updates, strict=True):
            weight.add_(update, alpha=-group["lr"])

    def _adam_step(self, tensor: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Update the averages, and return r for what this process has of the tensor."""
        state = self.state[tensor]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(tensor)
            state["exp_avg_sq"] = torch.zeros_like(tensor)
        state["step"] += 1
        steps, (beta1, beta2) = state["step"], group["betas"]
        assert tensor.grad is not None
        gradient = local_part(tensor.grad)
        first, second = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = second.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(group["eps"])
        return torch.div(first, denominator.mul_(1 - beta1**steps), out=denominator)
