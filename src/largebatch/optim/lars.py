"""LARS: SGD with its own learning rate for each layer."""

from typing import Any

import torch

from largebatch.optim.layerwise import LayerwiseOptimizer, local_part


class Lars(LayerwiseOptimizer):
    """SGD with momentum, whose step of a layer w with gradient g is multiplied by eta |w| / (|g| + lambda |w|).

    You et al. 2017 (arXiv 1708.03888), algorithm 1; eta is `trust_coefficient`, and lambda is `weight_decay`, an L2
    penalty. The factor is 1 if w or g is zero, as is usual. The learning rate is outside the velocity, as in torch's
    SGD, so that it may change without momentum correction (Goyal et al. 2017, remark 2). Nesterov is not in the paper.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ):
        options = {"momentum": momentum, "nesterov": nesterov, "trust_coefficient": trust_coefficient}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay} | options)

    def _step_group(self, group: dict[str, Any]) -> None:
        tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
        weights = [local_part(tensor) for tensor in tensors]
        # Engines may still use the gradients.
        updates = [local_part(tensor.grad).clone() for tensor in tensors]
        decay, eta, momentum = group["weight_decay"], group["trust_coefficient"], group["momentum"]
        scaled = []
        if group["layerwise"]:
            scaled = self._trust_ratios(tensors, updates, lambda w, g: eta * w / (g + decay * w))
        for weight, update in zip(weights, updates, strict=True):
            update.add_(weight, alpha=decay)
        for view, ratio in scaled:
            view.mul_(ratio)
        for tensor, weight, update in zip(tensors, weights, updates, strict=True):
            direction = update
            if momentum != 0:
                state = self.state[tensor]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(tensor)
                velocity = local_part(state["momentum_buffer"])
                velocity.mul_(momentum).add_(update)
                direction = update.add_(velocity, alpha=momentum) if group["nesterov"] else velocity
            weight.add_(direction, alpha=-group["lr"])
