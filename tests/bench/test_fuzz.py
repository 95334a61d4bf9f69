"""A small case of each target of bench/fuzz.py, and that its verdicts are not all the same."""

import sys
import time

import pytest

from fuzz import TARGETS, fuzz
from fuzzing import cases
from fuzzing.cases import HELD, Case, Sound, run_case


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return Sound.make(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_few_cases_hold(target, sound):
    outcomes = fuzz(target, range(12), 7, sound)
    assert [(number, outcome.output) for number, _, outcome in outcomes if outcome.verdict != HELD] == []


def colored(_):
    print("\x1b[31mred")


@pytest.mark.parametrize(
    ("work", "verdict"),
    [
        (lambda _: 1 // 0, "traceback"),
        (lambda _: bytearray(2**33) and 0, "traceback"),
        (lambda _: sys.exit(2), "exit code 2 without a reason"),
        (colored, "terminal escape"),
        (lambda _: 0, HELD),
    ],
)
def test_verdicts(work, verdict, tmp_path):
    assert run_case(Case([], tmp_path, work)).verdict == verdict


def test_a_case_without_an_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "WALL_SECONDS", 0.2)
    assert run_case(Case([], tmp_path, lambda _: time.sleep(60))).verdict == "no end in 0.2 s"
