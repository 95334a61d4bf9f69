"""What follows after each way in which a start can end."""

from dataclasses import replace

import pytest

from largebatch.system.endings import Ending, StopReason
from largebatch.system.failures import Kind
from largebatch.tools.job.decision import Evidence, next_start

OOM = Ending(Kind.OUT_OF_MEMORY, exception="OutOfMemoryError", step=7, micro_batch_size=4, trained=True)
BUG = Ending(Kind.ERROR, "KeyError: 1", exception="KeyError", micro_batch_size=4)
LOST_PEER = Ending(Kind.COMMUNICATION, "reset by peer", is_consequence=True, trained=True)
KILLED = Ending(Kind.KILLED, "n1: SIGKILL")
REFUSED = Ending(Kind.REFUSED, "batch: 3 is odd")
NOT_FINITE = Ending(Kind.TRAINING, "the loss is nan")
FULL_DISK = Ending(Kind.FILES, "No space left on device; the same command tries again")
HANG = Ending(Kind.HANG, "no progress for 1800 s")
FINISHED = Ending(Kind.FINISHED)


def stopped(reason, message=""):
    return Ending(Kind.STOPPED, message, reason)


def decided(*endings, exit_code=1, **evidence):
    found = next_start(Evidence(exit_code, endings, **evidence))
    return found.code, found.message


TERMINATED = stopped(StopReason.SIGTERM, "by SIGTERM, after step 7")
STOP_FILE = stopped(StopReason.STOP_FILE, "by the stop file, after step 7")
ASKED = {"asked_to_stop": "SIGUSR1"}
BEGUN = {"begun_at": 7}
# Every ending, and what the job does next: the exit code of a job that is over, or None for another start.
# Of some, what it says.
TABLE = [
    ("trained to the end", [FINISHED], {"exit_code": 0}, 0, "finished"),
    ("finished before", [], {"exit_code": 0}, 0, "finished"),
    (
        "finished, and the interpreter failed afterward",
        [FINISHED],
        {"exit_code": 9},
        0,
        "finished; the launcher exited with 9 afterward",
    ),
    ("a signal", [TERMINATED], {}, None, "stopped by SIGTERM, after step 7"),
    ("a signal, and a wrapper that exits with 0", [TERMINATED], {"exit_code": 0}, None),
    ("a signal to the batch script", [stopped(StopReason.BATCH_SCRIPT)], ASKED, None),
    ("a signal while it was loading", [], ASKED, None, "asked to stop by SIGUSR1 before the run began"),
    ("the same, and a wrapper that exits with 0", [], ASKED | {"exit_code": 0}, None),
    *(
        (
            "a signal to the nodes",
            [],
            {"exit_code": code},
            None,
            "asked to stop by a signal to the nodes before the run began",
        )
        for code in (130, 138, 143)
    ),
    ("a signal, of which a process failed", [BUG], ASKED, None),
    (
        "the stop file",
        [STOP_FILE],
        ASKED,
        75,
        "stopped by the stop file, after step 7; submit again, with the same overrides, to resume",
    ),
    (
        "the stop file, which the run has not seen",
        [LOST_PEER],
        {"has_stop_file": True},
        75,
        "stopped by the stop file; before that, failed: reset by peer; submit again to resume",
    ),
    ("the job's end", [stopped(StopReason.TIME_LIMIT)], {}, None),
    ("a hang", [HANG, LOST_PEER], BEGUN, None),
    ("out of memory", [OOM], BEGUN, None),
    ("out of memory again", [OOM], BEGUN | {"earlier": OOM}, 1),
    ("not finite", [NOT_FINITE], BEGUN, 1, "failed: the loss is nan; the same start would fail again: not requeued"),
    ("not finite, and a wrapper that exits with 0", [NOT_FINITE], BEGUN | {"exit_code": 0}, 1),
    ("a refusal", [REFUSED], {}, 2, "refused: batch: 3 is odd"),
    ("a refusal, and a wrapper that exits with 0", [REFUSED], {"exit_code": 0}, 2),
    ("a refusal on one node", [FINISHED, REFUSED], {}, 2),
    ("a full disk", [FULL_DISK], BEGUN, None),
    ("a full disk again", [FULL_DISK], BEGUN | {"earlier": FULL_DISK}, None),
    ("a killed rank", [KILLED], BEGUN, None, "n1: SIGKILL; at step 7"),
    ("a killed rank, and a lost peer", [LOST_PEER, KILLED], BEGUN, None, "failed: n1: SIGKILL; reset by peer"),
    (
        "a killed rank before the run began",
        [KILLED],
        {},
        None,
        "n1: SIGKILL; ended before the run began (exit code 1)",
    ),
    ("a lost host", [LOST_PEER], BEGUN, None, "failed: reset by peer"),
    # As on a disk so full that nothing could be written.
    ("a lost host, and nobody could say anything", [], BEGUN, None, "killed at step 7"),
    ("a lost host before the run began", [], {}, None, "ended before the run began (exit code 1)"),
    ("an import", [Ending(Kind.IMPORT)], {}, 1),
    ("a model that cannot be built", [Ending(Kind.MODEL)], {}, 1),
    ("an error", [BUG], {}, None),
    ("an error again, before the first step", [BUG], {"earlier": BUG}, 1),
]
NOISE = (
    "finished; by the stop file; it cannot be read now; refused: note: raised while the recipe was building its model"
)


@pytest.mark.parametrize("noise", [None, "", NOISE], ids=["as it is", "empty", "noise"])
@pytest.mark.parametrize(("endings", "evidence", "code"), [row[1:4] for row in TABLE], ids=[row[0] for row in TABLE])
def test_what_the_job_does_next_whatever_the_messages_say(endings, evidence, code, noise):
    if noise is not None:
        endings = [replace(ending, message=noise) for ending in endings]
    assert decided(*endings, **evidence)[0] == code


@pytest.mark.parametrize(("endings", "evidence", "code", "message"), [row[1:] for row in TABLE if len(row) == 5])
def test_what_the_job_says(endings, evidence, code, message):
    assert decided(*endings, **evidence) == (code, message)
    if code is None:
        # Unless that makes no progress.
        given_up = "giving up after 4 starts"
        assert decided(*endings, **evidence, reason_to_give_up=given_up) == (1, f"error: {message}; {given_up}")


def test_the_table_has_every_kind_and_every_reason():
    endings = [ending for _, row, *_ in TABLE for ending in row]
    assert {ending.kind for ending in endings} == set(Kind)
    assert {ending.reason for ending in endings} >= set(StopReason) - {StopReason.SIGUSR1, StopReason.SIGINT}


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


def test_out_of_memory_has_a_remedy():
    _, message = decided(OOM)
    assert "batch.micro_batch_size" in message
    assert "compute.activation_checkpointing" in message
    assert "strategy" in message


def test_the_message_is_one_line():
    _, message = decided(replace(LOST_PEER, message="two\nlines " + "long " * 500))
    assert message.startswith("failed: two lines long")
    assert len(message) <= 500
