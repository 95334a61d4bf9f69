"""What the GPU itself can do: with these, a step's time tells how far it is from its limit."""

from functools import partial

import torch

from gpu.rows import Result
from gpu.turns import device, timed
from record import Figure

SAMPLES = 3
CALLS = 10


def ceilings(is_small: bool) -> list[Result]:
    """The speed of a copy in the GPU's memory, and of a bf16 matrix product; by jobs of their own."""
    num_bytes, side = (2**20, 256) if is_small else (2**30, 8192)
    source = torch.ones(num_bytes // 4, device=device())
    copy = partial(torch.empty_like(source).copy_, source)
    matrix = torch.randn(side, side, device=device(), dtype=torch.bfloat16)
    product = partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))
    return [
        Figure(
            "copy in the GPU's memory, read and written", "GB/s", [2 * num_bytes / 1e9 * each for each in _rates(copy)]
        ),
        Figure(f"bf16 matrix product of {side:,}", "TFLOP/s", [2 * side**3 / 1e12 * each for each in _rates(product)]),
    ]


def _rates(step: partial[torch.Tensor]) -> list[float]:
    """Calls per second."""
    timed(step, CALLS)
    return [1 / timed(step, CALLS)[0] for _ in range(SAMPLES)]
