"""The first cause of a failed start, from files as processes and torch's launcher write them."""

import json

import pytest

from largebatch.tools.job.cause import first_cause

CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711"
# As torch 2.13 reports it.
REPORT = """
{script} FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : {time}
  host      : h2.example
  rank      : {rank} (local_rank: 1)
  exitcode  : -{number} (pid: 4711)
  error_file: <N/A>
  traceback : Signal {number} ({name}) received by PID 4711
============================================================
"""


@pytest.fixture
def error(tmp_path):
    """Write the error file of a rank."""

    def write(rank, time, message, kind="error", consequence=False):
        value = {"rank": rank, "node": f"h{rank}", "process": 1, "time": time, "kind": kind, "message": message}
        path = tmp_path / f"errors/rank_{rank}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value | {"consequence": consequence}))
        return path

    return write


@pytest.fixture
def report(tmp_path):
    """Write a node's log with the launcher's report of a signal."""

    def write(node, rank, number, name, time="2026-11-23_10:00:00"):
        text = "step 1: rank 7\n" + REPORT.format(script="train.py", rank=rank, number=number, name=name, time=time)
        (tmp_path / f"{node}.log").write_text(text)

    return write


def test_nothing_left_nothing_said(tmp_path):
    assert first_cause(tmp_path) == ("", {})
    assert first_cause(tmp_path / "absent") == ("", {})


def test_the_earliest_cause_wins(tmp_path, error):
    error(0, 99.0, CLOSED, consequence=True)
    # Of ten digits and of nine.
    error(1, 1000.5, "later")
    path = error(2, 999.5, "KeyError: 'label'\nof two lines")
    text = f"rank 2 on h2: KeyError: 'label' of two lines (see {path})"
    assert first_cause(tmp_path) == (text, json.loads(path.read_text()))


def test_a_killed_process_beats_what_the_others_say(tmp_path, error, report):
    error(0, 1.0, CLOSED, consequence=True)
    report("h2", 3, 9, "SIGKILL")
    assert first_cause(tmp_path)[0] == (
        "rank 3 on h2: Signal 9 (SIGKILL) received by PID 4711, which the kernel sends for lack of memory "
        f"(see {tmp_path / 'h2.log'})"
    )


def test_the_earliest_signal_wins(tmp_path, report):
    report("h1", 1, 11, "SIGSEGV", time="2026-11-23_10:00:05")
    report("h2", 3, 9, "SIGKILL", time="2026-11-23_10:00:04")
    assert first_cause(tmp_path)[0].startswith("rank 3 on h2: Signal 9")


def test_an_error_beats_a_signal_that_followed(tmp_path, error, report):
    error(0, 1.0, "ValueError: no label")
    report("h2", 3, 9, "SIGKILL")
    assert "ValueError: no label" in first_cause(tmp_path)[0]


def test_processes_that_the_launcher_ended_are_no_cause(tmp_path, error, report):
    report("h2", 3, 15, "SIGTERM")
    assert first_cause(tmp_path)[0] == ""
    error(0, 1.0, CLOSED, consequence=True)
    assert "Connection closed by peer" in first_cause(tmp_path)[0]


def test_an_abort_is_what_a_lost_peer_brings_about(tmp_path, report):
    report("h1", 1, 6, "SIGABRT")
    assert first_cause(tmp_path)[0].startswith("rank 1 on h1: Signal 6 (SIGABRT)")
    report("h2", 3, 9, "SIGKILL", time="2026-11-23_10:00:01")
    assert first_cause(tmp_path)[0].startswith("rank 3 on h2: Signal 9 (SIGKILL)")


def test_a_hang_is_not_that_of_the_rank_that_reports_it(tmp_path, error):
    message = "no progress for 9 s, more than faults.hang_seconds 8"
    path = error(0, 1.0, message, kind="hang")
    assert first_cause(tmp_path)[0] == f"hang: {message} (see {path})"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"rank": 0}', '{"rank": 0, "time": "soon"}', "\udcff\0"])
def test_damaged_files_are_passed_over(text, tmp_path, error):
    path = error(1, 2.0, "ValueError: no label")
    path.with_name("rank_0.json").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "h1.log").write_bytes(b"\xff\xfe\0 rank : \n")
    (tmp_path / "h2.log").mkdir()
    assert "ValueError" in first_cause(tmp_path)[0]
    path.unlink()
    assert first_cause(tmp_path)[0] == ""
