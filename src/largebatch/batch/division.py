"""How a global batch divides: global = micro x accumulation x world exactly, or an error that names what would fit."""

from itertools import islice

from largebatch.errors import ConfigError


def gradient_accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches that each process works through per optimizer step.

    Args:
        global_batch_size: Samples per optimizer step over all processes.
        micro_batch_size: Samples per process per forward pass.
        world_size: Data-parallel processes.

    Raises:
        ConfigError: The global batch does not divide evenly; nothing is ever rounded.
    """
    per_micro_step = micro_batch_size * world_size
    if global_batch_size % per_micro_step == 0:
        return global_batch_size // per_micro_step
    remedy = nearest_multiples(global_batch_size, per_micro_step)
    micro_batch_sizes = valid_micro_batch_sizes(global_batch_size, micro_batch_size, world_size)
    if micro_batch_sizes:
        remedy += f"; or keep it and set batch.micro_batch_size to {' or '.join(map(str, micro_batch_sizes))}"
    raise ConfigError(
        f"batch: global_batch_size {global_batch_size} is not a multiple of micro_batch_size x world_size = "
        f"{micro_batch_size} x {world_size} = {per_micro_step}; {remedy}"
    )


def nearest_multiples(size: int, unit: int) -> str:
    """ "nearest: 24, 48", for messages: the positive multiples of `unit` below and above a size."""
    below = size // unit * unit
    return "nearest: " + ", ".join(str(multiple) for multiple in (below, below + unit) if multiple > 0)


def micro_steps(num_samples: int, micro_batch_size: int, world_size: int) -> int:
    """Micro-batches that each process works through for this many samples; the last may be short or empty."""
    return -(-num_samples // (micro_batch_size * world_size))


def valid_micro_batch_sizes(global_batch_size: int, micro_batch_size: int, world_size: int) -> list[int]:
    """The nearest micro-batch sizes below and above the given one with which the global batch divides."""
    if global_batch_size % world_size:
        return []
    per_process = global_batch_size // world_size
    below = range(min(micro_batch_size - 1, per_process), 0, -1)
    # Up to ten times the given one: nobody wants a larger one, and the search would take long.
    above = range(micro_batch_size + 1, min(10 * micro_batch_size, per_process) + 1)
    found: list[int] = []
    for candidates in (below, above):
        found += islice((size for size in candidates if per_process % size == 0), 1)
    return found
