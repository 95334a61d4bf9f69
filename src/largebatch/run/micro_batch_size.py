"""The micro-batch size "auto": each start of a run tries one, and how its processes end tells the next start.

The attempts in the run folder have the sizes and the endings, so whichever command makes the next start continues.
Nothing is tried again in processes that have been out of memory.
"""

import math

import torch

from largebatch.backend.base import Backend
from largebatch.backend.launch import Launch
from largebatch.config import RecipeConfig
from largebatch.model.parts import differentiable
from largebatch.storage.run_folder import RunFolder
from largebatch.task_folders import import_from

MIN_FREE_FRACTION = 0.08
"""The fraction of a GPU's memory that the first steps must leave, for fragmentation and other libraries."""


def largest_to_try(folder: RunFolder, config: RecipeConfig, launch: Launch) -> tuple[int | None, list[str]]:
    """The largest size that may fit as far as earlier starts tell, None for any; and a note if the latest one did not.

    Starts on another number of processes or under another strategy tell nothing about memory. With dropout, whose masks
    depend on the size, their size is kept all the same.
    """
    situation = {"strategy": launch.strategy, "world_size": launch.world_size}
    attempts = folder.attempts() if config.batch.finds_micro_batch_size else []
    for attempt in reversed(attempts):
        is_alike = situation.items() <= attempt.items()
        if is_alike or config.model.uses_dropout:
            size = attempt["micro_batch_size"]
            failure = folder.out_of_memory(attempt)
            if not (failure and is_alike):
                return size, []
            half = max(1, size // 2)
            tried = f"micro_batch_size {size} did not fit (rank {failure.rank} was out of memory)"
            return half, [f"{tried}; trying {f'at most {half}' if half < size else 'it again'}"]
    return None, []


def rehearse_longest(config: RecipeConfig, backend: Backend) -> None:
    """Go through a step of the task's example batch, which has the longest samples, without an update.

    To be called by all processes once the optimizer has its states.

    Raises:
        OutOfMemoryError: It does not fit into a GPU, or leaves too little of it.
    """
    example_batch = getattr(import_from(config.task_folder(), "model"), "example_batch", None)
    if example_batch:
        batch = {name: tensor.to(backend.device) for name, tensor in example_batch(config).items()}
        buffers = {name: buffer.clone() for name, buffer in backend.model.named_buffers()}
        # The second micro-batch adds to the gradients of the first.
        passes = min(2, backend.plan.max_gradient_accumulation_steps)
        for number in range(passes):
            backend.begin_micro_step(number, passes)
            sums = [each.sum() for each in differentiable(backend.model(**batch))]
            backend.backward(torch.stack(sums).sum(), math.nan)
        # No strategy takes a step whose gradient is not finite.
        backend.clip_and_step(measure_norm=True, max_norm=math.inf)
        # Some count forward passes.
        for name, buffer in backend.model.named_buffers():
            buffer.copy_(buffers[name])
    if backend.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        if free < MIN_FREE_FRACTION * total:
            raise torch.OutOfMemoryError("a step leaves too little of the GPU's memory free")
