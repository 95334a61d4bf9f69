"""A trace and its table have the steps that the recipe names, on every process, and a run does not depend on it."""

import gzip
import json
from pathlib import Path

import pytest

from jobs import run_job, train, train_in_job
from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.storage.layout import read_object
from paths import PYDOC
from resuming import TINY_GPT, Interruption, exact_log, run_interrupted

WORDS = (*TINY_GPT, "--train.stop_after_steps=8", "--batch.global_batch_size=48")
PROFILE = '--logging.profile={"first_step": 3, "last_step": 5}'


def trace(file: Path) -> list[dict]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def traced_steps(file: Path) -> list[int]:
    names = [event["name"] for event in trace(file) if event.get("cat") == "user_annotation"]
    return sorted(int(name.removeprefix("step ")) for name in names if name.startswith("step "))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The folder of a run of two processes."""
    run_dir = tmp_path_factory.mktemp("traced") / "run"
    train_in_job(PYDOC, run_dir, *WORDS, PROFILE)
    return run_dir


@pytest.mark.slow
def test_every_process_traces_the_steps(traced):
    (attempt,) = (traced / "profile").iterdir()
    names = [f"rank_0000{rank}" for rank in (0, 1)]
    files = [f"{name}.{kind}" for name in names for kind in ("json.gz", "txt")]
    assert sorted(file.name for file in attempt.iterdir()) == files
    for name in names:
        assert traced_steps(attempt / f"{name}.json.gz") == [3, 4, 5]
        table = (attempt / f"{name}.txt").read_text()
        rows = [line.split() for line in table.splitlines()]
        assert {row[1] for row in rows if row[:1] == ["step"]} == {"3", "4", "5"}
        calls = sum(event["name"] == "aten::embedding" for event in trace(attempt / f"{name}.json.gz"))
        assert [int(row[-1]) for row in rows if row[:1] == ["aten::embedding"]] == [calls]


@pytest.mark.slow
def test_a_step_holds_its_passes_and_its_update(traced):
    events = trace(next((traced / "profile").rglob("rank_00001.json.gz")))
    (step,) = [event for event in events if event["name"] == "step 4" and event.get("cat") == "user_annotation"]
    begin = float(step["ts"])
    end = float(step["ts"]) + float(step["dur"])
    inside = {event["name"] for event in events if "ts" in event and begin <= float(event["ts"]) <= end}
    assert {"aten::embedding", "autograd::engine::evaluate_function: EmbeddingBackward0"} <= inside
    assert any(name.startswith("Optimizer.step#AdamW") for name in inside)


@pytest.mark.slow
def test_training_does_not_depend_on_it(traced, tmp_path):
    train_in_job(PYDOC, tmp_path / "run", *WORDS)
    assert not (tmp_path / "run/profile").exists()
    assert exact_log(tmp_path / "run") == exact_log(traced)


@pytest.mark.slow
def test_a_run_that_is_stopped_and_goes_on(tmp_path):
    """Each start traces its own steps of the window, and writes over nothing."""
    run_dir = tmp_path / "run"
    profile = '--logging.profile={"first_step": 3, "last_step": 6}'
    words = (*WORDS, profile)
    assert "exit code 75" in run_interrupted(run_dir, words, Interruption("signal", 0, 3))
    assert run_interrupted(run_dir, words) is None
    first, second = sorted((run_dir / "profile").iterdir())
    steps = [traced_steps(attempt / "rank_00000.json.gz") for attempt in (first, second)]
    assert steps[0][0] == 3
    assert steps[0] + steps[1] == [3, 4, 5, 6]


@pytest.mark.slow
def test_a_disk_that_takes_no_trace(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_job(train_without_room, run_dir)
    assert read_object(run_dir / "status.json")["outcome"] == "finished"
    assert not (run_dir / "profile").is_dir()


def train_without_room(run_dir: Path) -> None:
    """Train, with a file where the folder of traces would be."""
    from largebatch.run import Run

    prepare = Run.prepare

    def prepare_and_block(run, *arguments):
        prepared = prepare(run, *arguments)
        (run_dir / "profile").touch()
        return prepared

    Run.prepare = prepare_and_block
    train(PYDOC, *WORDS, PROFILE, run_dir=run_dir)


@pytest.mark.parametrize(
    ("profile", "problem"),
    [
        ('{"first_step": 5, "last_step": 4}', "last_step 4 is before first_step; write 5 or more"),
        ('{"first_step": 1, "last_step": 9}', "9 is after the run's last step; write at most 8"),
        ('{"first_step": 0, "last_step": 9}', "logging.profile.first_step"),
    ],
)
def test_steps_that_are_none(profile, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(PYDOC, ["--train.stop_after_steps=8", f"--logging.profile={profile}"])
