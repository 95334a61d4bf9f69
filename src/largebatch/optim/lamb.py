"""LAMB: Adam with its own learning rate for each layer."""

import math

import torch

from largebatch.optim.layerwise import Group, LayerwiseOptimizer, PartsOfLayers


class Lamb(LayerwiseOptimizer):
    """Adam with decoupled weight decay, whose step u = r + lambda w of a layer w is multiplied by |w| / |u|.

    You et al. 2019 (arXiv 1904.00962), algorithm 2 with phi the identity; r is Adam's bias-corrected step with `eps`
    added to its denominator, and lambda is `weight_decay`.
    """

    def _step_group(self, group: Group, parts: PartsOfLayers) -> None:
        weights = parts.split(parts.tensors)
        buffer, updates = parts.new_updates()
        self._adam_steps(group, parts, updates)
        if weights:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["layerwise"]:
            parts.scale(buffer, self._trust_ratios(parts, weights, updates, torch.div))
        if weights:
            torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _adam_steps(self, group: Group, parts: PartsOfLayers, updates: list[torch.Tensor]) -> None:
        """Update the averages, and write r for each part into its update."""
        for tensor in parts.tensors:
            self.state[tensor]["step"] = self.state[tensor].get("step", 0) + 1
        first = parts.states(self.state, "exp_avg")
        second = parts.states(self.state, "exp_avg_sq")
        if not updates:
            return
        beta1, beta2 = group["betas"]
        gradients = parts.gradients()
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        steps = [self.state[tensor]["step"] for tensor in parts.tensor_of_part]
        # In place, so that the updates are the only temporary tensors.
        torch._foreach_copy_(updates, second)
        torch._foreach_sqrt_(updates)
        torch._foreach_div_(updates, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(updates, group["eps"])
        torch._foreach_mul_(updates, [1 - beta1**step for step in steps])
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, first)
