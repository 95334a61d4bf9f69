"""Computes the optimizer that config.py declares, on tensors, and on the parts of them that FSDP2 and ZeRO hold."""

import torch
from torch.distributed.tensor import DTensor


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Softsign(torch.optim.Optimizer):
    def __init__(self, params, lr, beta, softness, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "softness": softness, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                beta = group["beta"]
                state["step"] = state.get("step", 0) + 1
                direction = local(parameter.grad).clone()
                if beta:
                    if "average" not in state:
                        state["average"] = torch.zeros_like(parameter)
                    average = local(state["average"]).lerp_(direction, 1 - beta)
                    direction = average / (1 - beta ** state["step"])
                weight = local(parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * direction / (direction.abs() + group["softness"]))
