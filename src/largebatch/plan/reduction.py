"""When FSDP2 and HSDP reduce gradients: with each micro-batch, or with the last one of a step."""

from dataclasses import replace

from largebatch.plan.contract import RunPlan
from largebatch.plan.model_shape import ModelShape, Strategy
from largebatch.plan.model_states import model_states, optimizer_states
from largebatch.plan.strategies import Policy, find_strategy

MOST_OF_THE_MEMORY = 0.6
"""The fraction of a GPU's memory that model states and temporary memory may take if gradients stay whole until the last
micro-batch; the rest is left for activations."""


def when_reduced(model: ModelShape, strategy: Strategy, plan: RunPlan, gpu_memory: int | None) -> Policy:
    """Decide when gradients are reduced.

    The recipe's `compute.reduce_gradients` decides. If it is "auto", hsdp reduces with each micro-batch, because it
    does so within a node. fsdp reduces with the last, which sends less, if model states and temporary memory then take
    at most `MOST_OF_THE_MEMORY` of the GPU, and otherwise with each. The other strategies have one policy each.

    Args:
        model: The shapes of the model.
        strategy: How processes share the model; its `reduces_each` is ignored.
        plan: The plan, which has the number of processes and the largest number of micro-batches in a step.
        gpu_memory: Memory of the smallest GPU in bytes; None without GPUs, where whole gradients are taken to fit.
    """
    preferred, *others = find_strategy(strategy.name).reduces
    if plan.reduce_gradients in others:
        return others[0]
    if plan.reduce_gradients == preferred or preferred == "each_micro_batch" or not others or gpu_memory is None:
        return preferred
    last = replace(strategy, reduces_each=False)
    states = model_states(model, last, plan.world_size, optimizer_states(plan), plan.gradient_accumulation_steps)
    return preferred if states.with_beside <= MOST_OF_THE_MEMORY * gpu_memory else others[0]


def in_words(policy: str) -> str:
    """Return a policy in words for messages, such as "each micro-batch"."""
    return "each micro-batch" if policy == "each_micro_batch" else "the last micro-batch of a step"
