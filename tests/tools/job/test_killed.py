"""Processes that were killed, and the first cause of a failed start, from files that are as they are written."""

import pytest

from ending_files import write_ending, write_report
from largebatch.system.endings import ENDINGS, decisive, read_endings
from largebatch.tools.job.starts import killed_processes

CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711"


def first_cause(logs):
    ending = decisive([*read_endings(logs / ENDINGS), *killed_processes(logs)])
    return ending.where_and_why if ending else ""


@pytest.fixture
def failed(tmp_path):
    """Write the ending of a rank."""

    def write(rank, time, message, kind="error", is_consequence=False):
        about = {"time": time, "is_consequence": is_consequence}
        return write_ending(tmp_path / ENDINGS, kind, message, rank, **about)

    return write


@pytest.fixture
def report(tmp_path):
    return lambda *words: write_report(tmp_path, *words)


def test_nothing_left_nothing_said(tmp_path):
    assert first_cause(tmp_path) == ""
    assert first_cause(tmp_path / "absent") == ""


def test_the_earliest_cause_wins(tmp_path, failed):
    failed(0, 99.0, CLOSED, is_consequence=True)
    # Of ten digits and of nine.
    failed(1, 1000.5, "later")
    path = failed(2, 999.5, "KeyError: 'label'\nof two lines")
    assert first_cause(tmp_path) == f"rank 2 on h2: KeyError: 'label' of two lines (see {path})"


def test_a_killed_process_beats_what_the_others_say(tmp_path, failed, report):
    failed(0, 1.0, CLOSED, is_consequence=True)
    report("h2", 3, 9, "SIGKILL")
    assert first_cause(tmp_path) == (
        "h2: Signal 9 (SIGKILL) received by PID 4711, which the kernel sends for lack of memory "
        f"(see {tmp_path / 'h2.log'})"
    )


def test_an_error_beats_a_signal_that_followed(tmp_path, failed, report):
    failed(0, 1.0, "ValueError: no label")
    report("h2", 3, 9, "SIGKILL")
    assert "ValueError: no label" in first_cause(tmp_path)


def test_processes_that_the_launcher_ended_are_no_cause(tmp_path, failed, report):
    report("h2", 3, 15, "SIGTERM")
    assert first_cause(tmp_path) == ""
    failed(0, 1.0, CLOSED, is_consequence=True)
    assert "Connection closed by peer" in first_cause(tmp_path)


def test_an_abort_is_what_a_lost_peer_brings_about(tmp_path, report):
    report("h1", 1, 6, "SIGABRT")
    assert first_cause(tmp_path).startswith("h1: Signal 6 (SIGABRT)")
    report("h2", 3, 9, "SIGKILL")
    assert first_cause(tmp_path).startswith("h2: Signal 9 (SIGKILL)")


def test_a_hang_is_not_that_of_the_rank_that_reports_it(tmp_path, failed):
    message = "no progress for 9 s, more than faults.hang_seconds 8"
    path = failed(0, 1.0, message, kind="hang")
    assert first_cause(tmp_path) == f"hang: {message} (see {path})"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"rank": 0}', '{"kind": "error", "time": "soon"}', "\udcff\0"]
)
def test_damaged_files_are_passed_over(text, tmp_path, failed):
    path = failed(1, 2.0, "ValueError: no label")
    path.with_name("rank_0.json").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "h1.log").write_bytes(b"\xff\xfe\0 rank : \n")
    (tmp_path / "h2.log").mkdir()
    assert "ValueError" in first_cause(tmp_path)
    path.unlink()
    assert first_cause(tmp_path) == ""
