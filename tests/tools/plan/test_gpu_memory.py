"""The memory of GPUs, and what a plan leaves free of it."""

import pytest

from largebatch.tools.plan.gpu_memory import GIB, gpu_memory, kept_back
from largebatch.tools.plan.hardware import GPUS


@pytest.mark.parametrize(
    ("text", "gib"), [("80", 80), ("80 GiB", 80), ("h100-80gb", 79.1), (" H200 ", 139.7), ("a100-40gb", 39.4)]
)
def test_gib_and_names(text, gib):
    assert gpu_memory(text) == round(gib * 2**30)


def test_a_known_gpu_has_less_than_its_name_says_in_gib():
    for name, gpu in GPUS.items():
        digits = "".join(letter for letter in name.partition("-")[2] if letter.isdigit())
        assert not digits or 0.97 * int(digits) < gpu.memory_gib < int(digits)


@pytest.mark.parametrize(("memory", "kept"), [(16, 4), (40, 4), (50, 4), (80, 6.4), (200, 16)])
def test_8_percent_and_at_least_4_gib_are_kept_back(memory, kept):
    assert kept_back(memory * GIB) == int(kept * 2**30)
