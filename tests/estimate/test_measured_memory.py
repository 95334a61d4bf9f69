"""The plan's memory beside the peaks that were measured on a GPU (bench/results/gpu)."""

import json
import re
from functools import cache

import pytest

from gpu.memory import CASES, GIB, TOLERANCE, overrides, planned, title_of
from paths import ROOT

READING = ROOT / "bench/results/gpu/h200-2026-11-26"


@cache
def measured():
    """Peaks in GiB, by the titles of cases."""
    figures = [
        figure["what"]
        for name in ("memory.json", "memory-second-call.json")
        for figure in json.loads((READING / name).read_text())["figures"]
    ]
    found = [re.fullmatch(r"(.*): ([\d.]+) GiB of the plan's .*", what) for what in figures]
    return {match[1]: float(match[2]) for match in found if match}


@cache
def expected(name, more):
    return planned(name, overrides(name, more, is_small=False), 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=title_of)
def test_the_plan_is_within_5_percent(case):
    """On one process, without `torch.compile`; recomputed, gathered in bf16 or in full, in buckets."""
    name, strategy, more = case
    ratio = measured()[title_of(case)] * GIB / expected(name, more)[strategy]
    assert 1 - TOLERANCE <= ratio <= 1 + TOLERANCE
