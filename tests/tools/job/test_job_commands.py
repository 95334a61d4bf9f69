"""What the batch script asks before and after a start, and what it is told."""

import json
import os
from functools import partial

import pytest

from ending_files import write_ending
from largebatch.storage.attempts import claim
from saving import make_checkpoint


@pytest.fixture(autouse=True)
def _job(monkeypatch):
    monkeypatch.setenv("LARGEBATCH_JOB_ID", "5")
    monkeypatch.delenv("LARGEBATCH_BEGAN", raising=False)


@pytest.fixture
def ask(tmp_path, output_of):
    def ask(command, *words, start=0, max_restarts=3):
        shared = ["--run-dir", tmp_path, "--start", start, "--max-restarts", max_restarts]
        (line,) = output_of(command, *shared, *words).splitlines()
        return line

    return ask


def fail(folder, start=0, kind="error", message="m", **about):
    """Write the ending of the first process of a start."""
    return write_ending(folder / f"jobs/5/start_{start}/endings", kind, message, **about)


def begin(folder, job="5", restart=0):
    """Begin an attempt, as a start of a job, and return where its endings are."""
    return claim(folder / "attempts", {"job_id": job, "restart": restart}).endings_dir


def test_a_start_begins_and_ends(ask, tmp_path):
    assert ask("job-begins") == "go"
    path = fail(tmp_path, kind="communication", message="gone\naway", exception="DistError", step=7)
    message = f"failed: rank 0 on h0: gone away (see {path})"
    assert ask("job-ended", "--exit-code=1") == f"requeue {message}; resumes from step 0"
    ending = json.loads((tmp_path / "jobs/5/start_0/ending.json").read_text())
    expected = {"code": None, "message": message, "kind": "communication", "exception": "DistError"}
    assert ending.items() >= (expected | {"step": 7, "trained": False, "micro_batch_size": None}).items()


@pytest.mark.parametrize(("job", "restart"), [("4", 0), ("55", 0), ("5", 11), (None, 0)])
def test_what_others_have_left_is_not_about_this_start(job, restart, ask, tmp_path):
    write_ending(begin(tmp_path, job, restart), "finished")
    fail(tmp_path, start=0)
    answer = ask("job-ended", "--exit-code=1", start=1)
    assert answer == "requeue ended before the run began (exit code 1); resumes from step 0"


def test_a_run_that_was_killed_had_begun(ask, tmp_path):
    begin(tmp_path, restart=1)
    make_checkpoint(tmp_path / "checkpoints/step_00000040")
    assert ask("job-ended", "--exit-code=1", start=1) == "requeue killed at step 40; resumes from step 40"


def test_an_ending_that_only_the_run_folder_took_is_read(ask, tmp_path):
    """A person has stopped the run, and the folder of the job's start was full."""
    write_ending(begin(tmp_path), "stopped", "by the stop file", reason="the stop file")
    assert ask("job-ended", "--exit-code=75").startswith("leave 75 stopped by the stop file")


def test_each_piece_of_evidence_is_read(ask, tmp_path):
    logs = tmp_path / "jobs/5/start_0"
    ask("job-begins")
    (logs / "n1.log").write_text("x Signal 15 (SIGTERM) received by PID 4\nx Signal 9 (SIGKILL) received by PID 5 y")
    killed = f"n1: Signal 9 (SIGKILL) received by PID 5, which the kernel sends for lack of memory (see {logs}/n1.log)"
    assert ask("job-ended", "--exit-code=1").startswith(f"requeue {killed}; ended before")
    assert ask("job-ended", "--exit-code=1", "--asked-to-stop=SIGTERM").startswith("requeue asked to stop by SIGTERM")
    path = fail(tmp_path, kind="import", message="no\nx", exception="ImportError", node="n1")
    assert ask("job-ended", "--exit-code=1") == (
        f"leave 1 failed: rank 0 on n1: no x (see {path}); the same start would fail again: not requeued"
    )
    fail(tmp_path, kind="refused", message="seed: no", rank=1)
    assert ask("job-ended", "--exit-code=1") == "leave 2 refused: seed: no"


def test_an_ending_is_compared_with_the_latest_one_that_is_known(ask, tmp_path):
    for start, code in ((0, "requeue"), (12, "leave 1")):
        ask("job-begins", start=start)
        fail(tmp_path, start, exception="KeyError")
        assert ask("job-ended", "--exit-code=1", start=start).startswith(code)


def test_a_stop_file_counts_unless_it_is_older_than_the_start(ask, tmp_path, monkeypatch):
    (tmp_path / "stop").touch()
    os.utime(tmp_path / "stop", (1000, 1000))
    monkeypatch.setenv("LARGEBATCH_BEGAN", "1001")
    assert ask("job-ended", "--exit-code=1").startswith("requeue ")
    monkeypatch.setenv("LARGEBATCH_BEGAN", "999")
    assert ask("job-ended", "--exit-code=1").startswith("leave 75 stopped by the stop file; before that, ended before")


def test_starts_without_progress_are_counted_over_those_that_have_not_ended(ask, tmp_path):
    """The scheduler restarts a job whose first node is gone; the start before has not come to its end."""
    ask = partial(ask, max_restarts=2)
    assert [ask("job-begins", start=start) for start in range(3)] == ["go"] * 3
    given_up = (
        f"giving up after 3 starts without progress past step 0 (LARGEBATCH_MAX_RESTARTS 2); see {tmp_path}/jobs/5"
    )
    assert ask("job-ended", "--exit-code=1", start=1) == (
        f"leave 1 error: ended before the run began (exit code 1); {given_up}"
    )
    assert ask("job-begins", start=3) == f"leave 1 error: {given_up}"
    # A newer checkpoint is progress; one that is not complete is none, nor is what others put beside.
    make_checkpoint(tmp_path / "checkpoints/step_00000040")
    marker = (tmp_path / "checkpoints/step_00000040/complete.json").read_bytes()
    (tmp_path / "checkpoints/step_00000040/complete.json").unlink()
    make_checkpoint(tmp_path / "checkpoints/step_00000050.keep")
    assert ask("job-begins", start=4).startswith("leave 1")
    (tmp_path / "checkpoints/step_00000040/complete.json").write_bytes(marker)
    assert ask("job-begins", start=5) == "go"
    assert ask("job-ended", "--exit-code=1", start=5).endswith("; resumes from step 40")


def test_pipes_that_others_put_there_are_not_waited_for(ask, tmp_path, run_command):
    (tmp_path / "jobs/5/start_0/endings").mkdir(parents=True)
    for name in ("starts", "start_0/endings/rank_0.json"):
        os.mkfifo(tmp_path / "jobs/5" / name)
    assert ask("job-ended", "--exit-code=1").startswith("requeue ended before the run began")
    code, _, error = run_command("job-begins", "--run-dir", tmp_path, "--start=0", "--max-restarts=3")
    assert code != 0
    assert "starts" in error


@pytest.mark.parametrize("command", [["job-begins"], ["job-ended", "--exit-code=1"]])
def test_outside_of_a_job(command, tmp_path, monkeypatch, refusal_of):
    monkeypatch.delenv("LARGEBATCH_JOB_ID")
    error = refusal_of(*command, "--run-dir", tmp_path, "--start=0", "--max-restarts=3")
    assert error.startswith("error: LARGEBATCH_JOB_ID is not set")
