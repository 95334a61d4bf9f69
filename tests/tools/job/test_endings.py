"""What follows after each way in which a start can end."""

import pytest

from largebatch.tools.job.endings import Evidence, decide

OOM = {"kind": "out_of_memory", "exception": "OutOfMemoryError", "step": 7, "micro_batch_size": 4, "trained": True}
BUG = {"kind": "error", "exception": "KeyError", "step": 0, "micro_batch_size": 4, "trained": False}
KILLED = "n1: Signal 9 (SIGKILL) received by PID 5"


def failed(message="reset by peer", resume=True, **about):
    return {"outcome": "failed", "message": message, "resume": resume, "kind": "communication", "trained": True} | about


def stopped(message):
    return {"outcome": "stopped", "message": message, "resume": True}


def decided(reason_to_give_up=None, exit_code=1, **evidence):
    ending = decide(Evidence(exit_code, **evidence), reason_to_give_up)
    return ending.code, ending.message


@pytest.mark.parametrize(
    ("evidence", "code", "message"),
    [
        ({"exit_code": 0}, 0, "finished"),
        ({"exit_code": 0, "asked_to_stop": "SIGTERM", "status": {"outcome": "finished"}}, 0, "finished"),
        # The interpreter, or a full disk under the log, has failed afterward.
        ({"status": {"outcome": "finished"}, "exit_code": 9}, 0, "finished; the launcher exited with 9 afterward"),
        ({"refusal": "batch: 3 is odd", "status": {"outcome": "finished"}}, 2, "refused: batch: 3 is odd"),
        # A wrapper of the launcher exits with 0 whatever happened.
        ({"refusal": "batch: 3 is odd", "exit_code": 0}, 2, "refused: batch: 3 is odd"),
        (
            {"status": failed("the loss is nan", resume=False), "exit_code": 0},
            1,
            "failed: the loss is nan; the same start would fail again: not requeued",
        ),
        (
            {"status": stopped("by the stop file, after step 7"), "asked_to_stop": "SIGUSR1"},
            75,
            "stopped by the stop file, after step 7; submit again, with the same overrides, to resume",
        ),
        (
            {"status": failed("the loss is nan", resume=False)},
            1,
            "failed: the loss is nan; the same start would fail again: not requeued",
        ),
    ],
)
def test_the_job_ends(evidence, code, message):
    assert decided(**evidence) == (code, message)


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        ({"status": failed()}, "failed: reset by peer"),
        ({"status": failed(), "cause": KILLED}, f"failed: {KILLED}; reset by peer"),
        ({"status": stopped("by SIGTERM, after step 7")}, "stopped by SIGTERM, after step 7"),
        (
            {"status": stopped("by the batch script of job 5, after step 7")},
            "stopped by the batch script of job 5, after step 7",
        ),
        ({"status": stopped("by SIGTERM, after step 7"), "exit_code": 0}, "stopped by SIGTERM, after step 7"),
        # No time to say anything.
        ({"status": {"outcome": "running", "step": 7}}, "killed at step 7"),
        ({"status": {"outcome": "running", "step": 7}, "cause": KILLED}, f"{KILLED}; at step 7"),
        ({}, "ended before the run began (exit code 1)"),
        ({"cause": KILLED}, f"{KILLED}; ended before the run began (exit code 1)"),
        # While it was loading.
        ({"asked_to_stop": "SIGUSR1"}, "asked to stop by SIGUSR1 before the run began"),
        ({"asked_to_stop": "SIGUSR1", "exit_code": 0}, "asked to stop by SIGUSR1 before the run began"),
        ({"asked_to_stop": "SIGUSR1", "failure": BUG}, "asked to stop by SIGUSR1 before the run began"),
        *[
            ({"exit_code": code}, "asked to stop by a signal to the nodes before the run began")
            for code in (143, 138, 130)
        ],
    ],
)
def test_the_job_is_started_again(evidence, message):
    assert decided(**evidence) == (None, message)
    # Unless that makes no progress.
    assert decided("giving up after 4 starts", **evidence) == (1, f"error: {message}; giving up after 4 starts")


@pytest.mark.parametrize("kind", ["import", "configuration", "model"])
def test_before_the_run_has_begun_too_what_cannot_succeed_is_not_tried_again(kind):
    code, message = decided(failure={"message": "ImportError: no module x", "kind": kind, "exception": "ImportError"})
    assert (code, message) == (1, "failed: ImportError: no module x; the same start would fail again: not requeued")


@pytest.mark.parametrize(
    ("now", "earlier", "is_requeued"),
    [
        (BUG, {}, True),
        (BUG, BUG, False),
        (BUG, BUG | {"exception": "ValueError"}, True),
        (BUG, BUG | {"trained": True}, True),
        (BUG | {"trained": True}, BUG, True),
        (BUG | {"kind": "files"}, BUG | {"kind": "files"}, True),
        (BUG | {"kind": "communication"}, BUG | {"kind": "communication"}, True),
        (OOM, {}, True),
        (OOM, OOM, False),
        (OOM, OOM | {"step": 6}, True),
        (OOM, OOM | {"micro_batch_size": 8}, True),
        (OOM, BUG, True),
    ],
)
def test_a_failure_that_comes_twice(now, earlier, is_requeued):
    code, _ = decided(status=failed(**now), earlier=earlier)
    assert (code is None) is is_requeued


def test_a_failure_that_comes_twice_before_the_run_has_begun():
    first = decide(Evidence(1, failure={"message": "KeyError: 1", "kind": "error", "exception": "KeyError"}), None)
    assert first.code is None
    second = Evidence(
        1, failure={"message": "KeyError: 1", "kind": "error", "exception": "KeyError"}, earlier=first.about
    )
    assert decide(second, None).code == 1


def test_what_was_not_published_counts_before_that_the_run_was_running():
    """As when the disk is full."""
    evidence = {"status": {"outcome": "running", "step": 7, "trained": True}}
    assert decided(**evidence, failure=BUG | {"message": "KeyError: 1"}) == (None, "failed: KeyError: 1")


def test_out_of_memory_has_a_remedy():
    _, message = decided(status=failed("OutOfMemoryError: CUDA out of memory", **OOM))
    assert "batch.micro_batch_size" in message
    assert "compute.activation_checkpointing" in message
    assert "strategy" in message


def test_a_persons_request_that_the_run_has_not_seen_ends_the_job():
    code, message = decided(has_stop_file=True, status=failed())
    assert (code, message) == (
        75,
        "stopped by the stop file; before that, failed: reset by peer; submit again to resume",
    )
    assert decided(has_stop_file=True, exit_code=0)[0] == 0


def test_the_message_is_one_line():
    _, message = decided(status=failed("two\nlines " + "long " * 500))
    assert message.startswith("failed: two lines long")
    assert len(message) <= 500
