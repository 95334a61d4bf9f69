"""What follows after each way in which a start can end."""

from dataclasses import replace

import pytest

from largebatch.system.endings import Ending, StopReason
from largebatch.system.failures import Kind
from largebatch.tools.job.decision import Evidence, next_start

OOM = Ending(Kind.OUT_OF_MEMORY, exception="OutOfMemoryError", step=7, micro_batch_size=4, trained=True)
BUG = Ending(Kind.ERROR, "KeyError: 1", exception="KeyError", micro_batch_size=4)
LOST_PEER = Ending(Kind.COMMUNICATION, "reset by peer", is_consequence=True, trained=True)
KILLED = Ending(Kind.KILLED, "n1: Signal 9 (SIGKILL) received by PID 5")
REFUSED = Ending(Kind.REFUSED, "batch: 3 is odd")
NOT_FINITE = Ending(Kind.TRAINING, "the loss is nan")
FULL_DISK = Ending(Kind.FILES, "No space left on device; the same command tries again")
HANG = Ending(Kind.HANG, "no progress for 1800 s")
FINISHED = Ending(Kind.FINISHED)
NEVER_AGAIN = "; the same start would fail again: not requeued"


def stopped(reason, message=""):
    return Ending(Kind.STOPPED, message, reason)


def decided(*endings, exit_code=1, **evidence):
    found = next_start(Evidence(exit_code, endings, **evidence))
    return found.code, found.message


# Every ending, and what the job does next: the exit code of a job that is over, or None for another start.
TABLE = [
    ("trained to the end", [FINISHED], {"exit_code": 0}, 0),
    ("finished before", [], {"exit_code": 0}, 0),
    ("finished, and the interpreter failed afterward", [FINISHED], {"exit_code": 9}, 0),
    ("a signal", [stopped(StopReason.SIGTERM)], {}, None),
    ("a signal, and a wrapper that exits with 0", [stopped(StopReason.SIGTERM)], {"exit_code": 0}, None),
    ("a signal to the batch script", [stopped(StopReason.BATCH_SCRIPT)], {"asked_to_stop": "SIGUSR1"}, None),
    ("a signal while it was loading", [], {"asked_to_stop": "SIGUSR1"}, None),
    ("a signal to the nodes", [], {"exit_code": 143}, None),
    ("a signal, of which a process failed", [BUG], {"asked_to_stop": "SIGUSR1"}, None),
    ("the stop file", [stopped(StopReason.STOP_FILE)], {"asked_to_stop": "SIGUSR1"}, 75),
    ("the stop file, which the run has not seen", [LOST_PEER], {"has_stop_file": True}, 75),
    ("the job's end", [stopped(StopReason.TIME_LIMIT)], {}, None),
    ("a hang", [HANG, LOST_PEER], {"begun_at": 7}, None),
    ("out of memory", [OOM], {"begun_at": 7}, None),
    ("out of memory again", [OOM], {"begun_at": 7, "earlier": OOM}, 1),
    ("not finite", [NOT_FINITE], {"begun_at": 7}, 1),
    ("not finite, and a wrapper that exits with 0", [NOT_FINITE], {"begun_at": 7, "exit_code": 0}, 1),
    ("a refusal", [REFUSED], {}, 2),
    ("a refusal, and a wrapper that exits with 0", [REFUSED], {"exit_code": 0}, 2),
    ("a refusal on one node", [FINISHED, REFUSED], {}, 2),
    ("a full disk", [FULL_DISK], {"begun_at": 7}, None),
    ("a full disk again", [FULL_DISK], {"begun_at": 7, "earlier": FULL_DISK}, None),
    ("a disk so full that nothing could be written", [], {"begun_at": 7}, None),
    ("a killed rank", [LOST_PEER, KILLED], {"begun_at": 7}, None),
    ("a killed rank before the run began", [KILLED], {}, None),
    ("a lost host", [LOST_PEER], {"begun_at": 7}, None),
    ("a lost host, and nobody could say anything", [], {"begun_at": 7}, None),
    ("an import", [Ending(Kind.IMPORT)], {}, 1),
    ("a model that cannot be built", [Ending(Kind.MODEL)], {}, 1),
    ("an error", [BUG], {}, None),
    ("an error again, before the first step", [BUG], {"earlier": BUG}, 1),
    ("no progress", [LOST_PEER], {"reason_to_give_up": "giving up"}, 1),
]
NOISE = (
    "finished; by the stop file; it cannot be read now; refused: note: raised while the recipe was building its model"
)


@pytest.mark.parametrize("noise", [None, "", NOISE], ids=["as it is", "empty", "noise"])
@pytest.mark.parametrize(("endings", "evidence", "code"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_what_the_job_does_next_whatever_the_messages_say(endings, evidence, code, noise):
    if noise is not None:
        endings = [replace(ending, message=noise) for ending in endings]
    assert decided(*endings, **evidence)[0] == code


def test_the_table_has_every_kind_and_every_reason():
    endings = [ending for _, row, _, _ in TABLE for ending in row]
    assert {ending.kind for ending in endings} == set(Kind)
    assert {ending.reason for ending in endings} >= set(StopReason) - {StopReason.SIGUSR1, StopReason.SIGINT}


@pytest.mark.parametrize(
    ("endings", "evidence", "message"),
    [
        ([], {"exit_code": 0}, "finished"),
        ([FINISHED], {"exit_code": 9}, "finished; the launcher exited with 9 afterward"),
        ([REFUSED], {}, "refused: batch: 3 is odd"),
        ([NOT_FINITE], {}, f"failed: the loss is nan{NEVER_AGAIN}"),
        (
            [stopped(StopReason.STOP_FILE, "by the stop file, after step 7")],
            {},
            "stopped by the stop file, after step 7; submit again, with the same overrides, to resume",
        ),
        (
            [LOST_PEER],
            {"has_stop_file": True},
            "stopped by the stop file; before that, failed: reset by peer; submit again to resume",
        ),
    ],
)
def test_the_message_of_a_job_that_is_over(endings, evidence, message):
    assert decided(*endings, **evidence)[1] == message


@pytest.mark.parametrize(
    ("endings", "evidence", "message"),
    [
        ([LOST_PEER], {}, "failed: reset by peer"),
        ([LOST_PEER, KILLED], {}, f"failed: {KILLED.message}; reset by peer"),
        ([stopped(StopReason.SIGTERM, "by SIGTERM, after step 7")], {}, "stopped by SIGTERM, after step 7"),
        # No time to say anything.
        ([], {"begun_at": 7}, "killed at step 7"),
        ([KILLED], {"begun_at": 7}, f"{KILLED.message}; at step 7"),
        ([], {}, "ended before the run began (exit code 1)"),
        ([KILLED], {}, f"{KILLED.message}; ended before the run began (exit code 1)"),
        # While it was loading.
        ([], {"asked_to_stop": "SIGUSR1", "exit_code": 0}, "asked to stop by SIGUSR1 before the run began"),
        ([], {"exit_code": 130}, "asked to stop by a signal to the nodes before the run began"),
        ([], {"exit_code": 138}, "asked to stop by a signal to the nodes before the run began"),
    ],
)
def test_the_message_of_a_job_that_is_started_again(endings, evidence, message):
    assert decided(*endings, **evidence) == (None, message)
    # Unless that makes no progress.
    given_up = "giving up after 4 starts"
    assert decided(*endings, **evidence, reason_to_give_up=given_up) == (1, f"error: {message}; {given_up}")


@pytest.mark.parametrize(
    ("now", "earlier"),
    [
        (BUG, replace(BUG, exception="ValueError")),
        (BUG, replace(BUG, trained=True)),
        (replace(BUG, trained=True), BUG),
        (replace(BUG, kind=Kind.COMMUNICATION), replace(BUG, kind=Kind.COMMUNICATION)),
        (OOM, replace(OOM, step=6)),
        (OOM, replace(OOM, micro_batch_size=8)),
        (OOM, BUG),
    ],
)
def test_failures_that_are_not_the_same_twice(now, earlier):
    assert decided(now, begun_at=0, earlier=earlier)[0] is None


def test_a_failure_that_comes_twice_before_the_run_has_begun():
    first = next_start(Evidence(1, [BUG]))
    assert first.code is None
    assert decided(BUG, earlier=first.failure)[0] == 1


def test_out_of_memory_has_a_remedy():
    _, message = decided(OOM)
    assert "batch.micro_batch_size" in message
    assert "compute.activation_checkpointing" in message
    assert "strategy" in message


def test_the_message_is_one_line():
    _, message = decided(replace(LOST_PEER, message="two\nlines " + "long " * 500))
    assert message.startswith("failed: two lines long")
    assert len(message) <= 500
