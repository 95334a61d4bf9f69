"""LARS and LAMB as their papers have them, for one process."""

import torch


class PlainLars(torch.optim.Optimizer):
    """Algorithm 1 of arXiv 1708.03888, layer by layer; vectors are stepped by SGD without weight decay.

    A gradient of zero, which the layers in front of a normalization that starts at zero have, leaves a ratio of 1.
    """

    def __init__(self, parameters, weight_decay, eta, momentum, nesterov):
        super().__init__(parameters, {"lr": 0.0})
        self.options = weight_decay, eta, momentum, nesterov

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            decay, eta, momentum, nesterov = self.options
            update = weight.grad
            if weight.ndim > 1:
                ratio = eta * weight.norm() / (update.norm() + decay * weight.norm()) if update.any() else 1.0
                update = ratio * (update + decay * weight)
            velocity = momentum * self.state[weight].get("velocity", 0.0) + update
            self.state[weight]["velocity"] = velocity
            weight -= self.param_groups[0]["lr"] * (update + momentum * velocity if nesterov else velocity)


class PlainLamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962, layer by layer; a layer without weight decay is not adapted."""

    def __init__(self, groups, betas, eps):
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2) = group["betas"]
            decay = group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                count, m, v = self.state[weight].get("all", (0, 0.0, 0.0))
                count = count + 1
                m = beta1 * m + (1 - beta1) * weight.grad
                v = beta2 * v + (1 - beta2) * weight.grad**2
                self.state[weight]["all"] = count, m, v
                r = m / (1 - beta1**count) / (torch.sqrt(v / (1 - beta2**count)) + group["eps"])
                update = r + decay * weight
                ratio = weight.norm() / update.norm() if decay and weight.any() and update.any() else 1.0
                weight -= group["lr"] * ratio * update
