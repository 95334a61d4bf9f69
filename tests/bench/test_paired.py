"""bench/paired.py: contenders take turns."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

import paired
from largebatch.tools.local_jobs.jobs import JobFailed
from paired import TurnClock, contender, start_job, take_turns


def stepper(seconds: float, log: list[str], name: str, now: list[float]):
    """A contender of one process, as a thread, that notes its steps and advances the clock by each."""

    def start(connections) -> None:
        clock = TurnClock(connections[0], steps=2, warmup=3)
        while True:
            log.append(name)
            now[0] += seconds
            try:
                clock.step()
            except SystemExit:
                return

    return start


def test_contenders_take_turns(monkeypatch):
    log: list[str] = []
    now = [0.0]
    monkeypatch.setattr(paired, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with ExitStack() as stack:
        contenders = {
            name: stack.enter_context(contender(stepper(seconds, log, name, now), 1))
            for name, seconds in (("a", 1.0), ("b", 3.0))
        }
        rounds = take_turns(contenders, 3)
    # Steps before the first turn, then turns of two, and each round begins with the other one.
    assert "".join(log) == "aaa" + "bbb" + "aabb" + "bbaa" + "aabb"
    # Seconds per step, not per turn.
    assert rounds == [{"a": 1.0, "b": 3.0}] * 3


def fails(connections, rank_that_fails: int) -> None:  # noqa: ARG001 - as of every contender
    raise ValueError(f"as rank {rank_that_fails} wished")


def test_a_contender_that_fails_is_not_waited_for(tmp_path):
    start = start_job(fails, 0, world_size=1, environment={}, folder=tmp_path, timeout=600)
    with pytest.raises(JobFailed, match="as rank 0 wished"), contender(start, 1):
        pass
