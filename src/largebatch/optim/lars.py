"""LARS: SGD with its own learning rate for each layer."""

import torch

from largebatch.optim.layerwise import Group, LayerwiseOptimizer, PartsOfLayers


class Lars(LayerwiseOptimizer):
    """SGD with momentum, whose step of a layer w with gradient g is multiplied by eta |w| / (|g| + lambda |w|).

    You et al. 2017 (arXiv 1708.03888), algorithm 1; eta is `trust_coefficient`, and lambda is `weight_decay`, an L2
    penalty. The factor is 1 if w or g is zero, as is usual. The learning rate is outside the velocity, as in torch's
    SGD, so that it may change without momentum correction (Goyal et al. 2017, remark 2); the paper and MLPerf's code
    multiply it in. Nesterov is not in the paper.
    """

    def _step_group(self, group: Group, parts: PartsOfLayers) -> None:
        decay = group["weight_decay"]
        eta = group["trust_coefficient"]
        momentum = group["momentum"]
        weights = parts.split(parts.tensors)
        gradients = parts.gradients()
        velocities = parts.states(self.state, "momentum_buffer") if momentum else []
        ratios = None
        if group["layerwise"]:
            ratios = self._trust_ratios(parts, weights, gradients, lambda w, g: eta * w / (g + decay * w))
        if not weights:
            return
        buffer, updates = parts.new_updates()
        torch._foreach_copy_(updates, gradients)
        torch._foreach_add_(updates, weights, alpha=decay)
        if ratios is not None:
            parts.scale(buffer, ratios)
        directions = updates
        if momentum:
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, updates)
            if group["nesterov"]:
                torch._foreach_add_(updates, velocities, alpha=momentum)
            else:
                directions = velocities
        torch._foreach_add_(weights, directions, alpha=-group["lr"])
