"""bench/paired.py: contenders take turns."""

import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

import paired
from largebatch.tools.verify.jobs import JobFailed
from paired import TurnClock, contender, in_own_process, interleave, start_job, take_turns


def test_every_round_begins_with_another_one():
    asked: list[str] = []
    rounds = interleave("abc", 4, lambda name: asked.append(name) or len(asked))
    assert "".join(asked) == "abc" + "bca" + "cab" + "abc"
    assert rounds[1] == {"b": 4, "c": 5, "a": 6}


def sleeper(seconds: float, log: list[str], name: str, now: list[float]):
    """A contender of one process, as a thread, that notes its steps and moves the clock on by each."""

    def start(connections) -> None:
        clock = TurnClock(connections[0], steps=2, warmup=3)
        while True:
            log.append(name)
            # Long enough for one that does not wait for its turn to be seen.
            time.sleep(0.01)
            now[0] += seconds
            try:
                clock.step()
            except SystemExit:
                return

    return start


def test_only_one_goes_on_at_a_time(monkeypatch):
    log: list[str] = []
    now = [0.0]
    monkeypatch.setattr(paired, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with ExitStack() as stack:
        contenders = {
            name: stack.enter_context(contender(sleeper(seconds, log, name, now), 1))
            for name, seconds in (("a", 1.0), ("b", 3.0))
        }
        rounds = take_turns(contenders, 3)
    # Steps before the first turn, then turns of two.
    assert "".join(log) == "aaa" + "bbb" + "aabb" + "bbaa" + "aabb"
    # Seconds a step, not of the turn.
    assert rounds == [{"a": 1.0, "b": 3.0}] * 3


def fails(connections, rank_that_fails: int) -> None:  # noqa: ARG001 - as of every contender
    raise ValueError(f"as rank {rank_that_fails} wished")


def test_a_contender_that_fails_is_not_waited_for(tmp_path):
    start = start_job(fails, 0, world_size=1, environment={}, folder=tmp_path, timeout=600)
    with pytest.raises(JobFailed, match="as rank 0 wished"), contender(start, 1):
        pass


def test_one_that_ends_early_is_an_error():
    with pytest.raises(RuntimeError, match="ended before its turns were over"), contender(lambda _: None, 1):
        pass


def test_a_process_of_its_own_that_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys; print(3.5 if sys.argv[2] == 'a' else sys.exit('no such loop'))")
    assert in_own_process(program, "a") == 3.5
    with pytest.raises(SystemExit, match=r"b failed:\nno such loop"):
        in_own_process(program, "b")
