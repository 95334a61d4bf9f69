"""The comparison of what a prepared engine would do with what the plan says; any difference refuses the run."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from largebatch.backend.base import Backend, Observed, group_options, trainable_parameters
from largebatch.backend.launch import Launch
from largebatch.errors import BackendMismatch
from largebatch.plan import RunPlan


def expect(plan: RunPlan, launch: Launch, optimizer: Optimizer) -> Observed:
    """What the engine must do, from the plan and from the optimizer as the recipe built it, before `prepare`."""
    expected: Observed = {
        "world size": launch.world_size,
        "strategy": launch.strategy,
        "gradient accumulation inside the engine": 1,
        "mixed precision by Accelerate": "no",
        "parameters per group": [
            sum(parameter.numel() for parameter in group["params"]) for group in optimizer.param_groups
        ],
        "hyperparameters per group": group_options(optimizer),
        "master weights": {"torch.float32"},
    }
    if launch.strategy.startswith("zero"):
        expected |= {
            "micro-batch size in DeepSpeed": plan.micro_batch_size,
            "micro-batch size x world size in DeepSpeed": plan.micro_batch_size * plan.world_size,
            "gradient clipping in DeepSpeed": plan.clip_norm or 0.0,
            "learning-rate scheduler in DeepSpeed": None,
            "gradient reduction in DeepSpeed": "torch.float32",
            "autocast in DeepSpeed": plan.precision == "bf16",
        }
    return expected


def check_optimizer(model: nn.Module, optimizer: Optimizer, plan: RunPlan) -> None:
    """Before `prepare`: the optimizer has every trainable parameter once, and the weight decay that the plan says.

    Raises:
        BackendMismatch: It has not.
    """
    named = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for parameter, name in named.items() if parameter not in set(given)]
    if missing or len(given) != len(set(given)) or len(given) != sum(1 for _ in trainable_parameters(model)):
        raise BackendMismatch(
            "the optimizer does not have each trainable parameter of the model exactly once"
            + (f"; missing: {', '.join(missing[:5])}" if missing else "")
            + "; build it with largebatch.optim.build_optimizer(model, config.optimizer)"
        )
    decays = {float(group["weight_decay"]) for group in optimizer.param_groups}
    if not decays <= {plan.weight_decay, 0.0}:
        raise BackendMismatch(
            f"the optimizer's weight decays are {sorted(decays)}, the plan says {plan.weight_decay:g} (and 0 where "
            "there is none); set optimizer.weight_decay in the recipe"
        )


def check_backend(backend: Backend, expected: Observed) -> None:
    """After `prepare`: the engine does what `expect` said.

    Raises:
        BackendMismatch: It does not; each difference is named.
    """
    differences = compare(expected, backend.observe())
    if differences:
        lines = "\n".join(f"  - {difference}" for difference in differences)
        raise BackendMismatch(f"the {backend.launch.strategy} engine would not do what the plan says:\n{lines}")


def compare(expected: Mapping[str, Any], observed: Mapping[str, Any]) -> list[str]:
    """Each name on which the two differ, one line each; a name that was not observed is a difference too."""
    return [
        f"{name}: the plan says {value}, the engine has {observed.get(name, 'nothing')}"
        for name, value in expected.items()
        if name not in observed or observed[name] != value
    ]
