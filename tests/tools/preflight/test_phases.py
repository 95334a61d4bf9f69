"""Nodes that meet, as processes of this machine: who is named when something is wrong, and all get one exit code."""

import multiprocessing
import os
import shutil
import socket
from types import SimpleNamespace

import pytest

from largebatch.tools.local_jobs.jobs import JobFailed
from largebatch.tools.preflight import all_reduce, phases, reports
from largebatch.tools.preflight.node_checks import check_node
from preflight_nodes import TOKEN, a_node, begins_after, die, late, run_nodes, shared

pytestmark = pytest.mark.slow


def run_forked(function, *arguments, timeout, environment=None, **_):
    """What `run_job` does for one process, without a server that would import torch for every node."""
    os.environ.update({**(environment or {}), "LOCAL_RANK": "0"})
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(function(*arguments)))
    process.start()
    theirs.close()
    reason = f"no result within {timeout:.0f} s"
    try:
        if mine.poll(timeout):
            result = mine.recv()
            # It has inherited this node's listener, on whose port the next one may have to listen.
            process.join()
            return [result]
        process.kill()
    except EOFError:
        process.join()
        reason = f"exit code {process.exitcode}"
    raise JobFailed([(0, reason, "")])


@pytest.fixture(autouse=True, scope="module")
def _imports(tmp_path_factory):
    """What every node would import is there when it is forked."""
    check_node(a_node(tmp_path_factory.mktemp("logs")))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Small tensors, and no start of Python."""
    monkeypatch.setattr(all_reduce, "run_job", run_forked)
    monkeypatch.setattr(phases, "run_job", run_forked)
    monkeypatch.setattr(all_reduce, "MEBIBYTES_ON_CPUS", 1)


def codes(ended):
    return [each.exit_code for each in ended]


def bad_nodes(folder):
    file = shared(folder) / "bad_nodes"
    return file.read_text() if file.exists() else None


def test_good_nodes(tmp_path):
    ended = run_nodes(tmp_path, 4)
    assert codes(ended) == [0, 0, 0, 0], repr(ended)
    lines = ended[0].out.splitlines()
    assert lines[0] == "Pre-flight on 4 nodes:"
    assert lines[1].startswith("  n1: all-reduce of 1 MiB over 4 nodes by gloo, 1 process per node: ")
    assert len(lines) == 2
    assert [each.out for each in ended[1:]] == ["", "", ""]
    assert bad_nodes(tmp_path) is None
    # Whoever can list the folder must not learn the token.
    assert not list(shared(tmp_path).glob(f"*{TOKEN}*"))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_nodes_meet_over_ipv6(tmp_path):
    ended = run_nodes(tmp_path, 2, host="[::1]")
    assert codes(ended) == [0, 0], repr(ended)


def test_one_node(tmp_path):
    ended = run_nodes(tmp_path, 1)
    assert codes(ended) == [0], repr(ended)


def test_a_first_node_that_clears_the_folder_when_it_starts(tmp_path):
    wait = begins_after(tmp_path, 0, "presence_1")

    def before(rank):
        wait(rank)
        if rank == 0:
            shutil.rmtree(shared(tmp_path))
            shared(tmp_path).mkdir()

    assert codes(run_nodes(tmp_path, 2, before=before)) == [0, 0]


def test_files_of_another_start_are_ignored(tmp_path):
    """Whoever it was, it found a bad node, and this start's first node is late."""
    shared(tmp_path).mkdir(parents=True)
    for name in ("presence_0", "presence_1", "presence_decision", "checks_decision"):
        (shared(tmp_path) / f"{name}.0123456789abcdef").write_text("3")
    assert codes(run_nodes(tmp_path, 2, before=late(0, 2))) == [0, 0]


def test_a_node_that_is_too_late_is_not_bad(tmp_path):
    ended = run_nodes(tmp_path, 4, before=begins_after(tmp_path, 2, "presence_decision"), seconds=8)
    assert codes(ended) == [2, 2, 2, 2], repr(ended)
    assert f"error on n3: late: not present in {shared(tmp_path)} after 8 seconds" in ended[0].out
    assert "raise LARGEBATCH_PREFLIGHT_SECONDS" in ended[0].out
    assert bad_nodes(tmp_path) is None


def test_a_first_node_that_is_too_late(tmp_path):
    """The others have left without a trace when it comes."""
    ended = run_nodes(tmp_path, 3, before=late(0, 12), seconds=6)
    assert codes(ended) == [2, 2, 2], repr(ended)
    assert "error on n1: late: not present in " in ended[1].out
    assert "error on n2, n3: late: not present in " in ended[0].out
    assert bad_nodes(tmp_path) is None


@pytest.mark.parametrize(
    ("function", "phase", "limits"),
    [
        ("_check", "checks", {(phases, "SECONDS_TO_CHECK"): 15.0, (phases, "SECONDS_TO_TELL"): 5.0}),
        # The others wait in their all-reduce.
        ("measure", "all_reduce", {(all_reduce, "SECONDS"): 4.0, (phases, "SECONDS_TO_TELL"): 12.0}),
    ],
)
def test_a_node_that_dies(function, phase, limits, tmp_path, monkeypatch):
    """It is waited for until a limit, within which the others have to answer however slow the machine is."""
    for (owner, limit), seconds in limits.items():
        monkeypatch.setattr(owner, limit, seconds)
    ended = run_nodes(tmp_path, 4, before=lambda rank: rank == 1 and monkeypatch.setattr(phases, function, die))
    assert codes(ended) == [3, 9, 3, 3], repr(ended)
    assert f"bad node n2: it stopped answering in {phase}" in ended[0].out
    assert bad_nodes(tmp_path) == "n2\n"


def test_the_first_node_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "SECONDS_IN_ALL", 3.0)
    before = begins_after(tmp_path, 0, "presence_1")

    def die_early(rank):
        before(rank)
        if rank == 0:
            monkeypatch.setattr(phases, "_check", die)

    ended = run_nodes(tmp_path, 3, before=die_early, seconds=10)
    assert codes(ended) == [9, 3, 3], repr(ended)
    assert "bad node n1: it stopped answering in checks" in ended[1].out
    assert bad_nodes(tmp_path) == "n1\n"


@pytest.mark.parametrize(
    ("check", "reason"), [(die, "exit code 9"), (lambda *_: multiprocessing.Event().wait(), "no result within 4 s")]
)
def test_a_driver_that_crashes_or_hangs(check, reason, tmp_path, monkeypatch):
    """Its node can still say so."""

    def before(rank):
        if rank == 1:
            monkeypatch.setattr(phases, "check_node", check)
            monkeypatch.setattr(phases, "SECONDS_TO_CHECK", 4.0)

    ended = run_nodes(tmp_path, 3, before=before)
    assert codes(ended) == [3, 3, 3], repr(ended)
    assert f"bad node n2: its own checks failed: rank 0: {reason}" in ended[0].out
    assert bad_nodes(tmp_path) == "n2\n"


def test_a_port_in_use_is_no_nodes_fault(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        ended = run_nodes(tmp_path, 2, port=port)
    assert codes(ended) == [2, 2], repr(ended)
    assert f"error on n1: cannot listen at localhost:{port} (" in ended[0].out
    assert "Address already in use" in ended[0].out
    assert "start the job again" in ended[0].out
    assert bad_nodes(tmp_path) is None


@pytest.mark.parametrize("text", ["x", '{"node": "n7", "versions": 7}', "[" * 100_000])
def test_a_report_of_another_version(text, tmp_path, monkeypatch):
    other = SimpleNamespace(dumps=lambda _: text)
    ended = run_nodes(tmp_path, 2, before=lambda rank: rank and monkeypatch.setattr(reports, "json", other))
    assert codes(ended) == [3, 3], repr(ended)
    assert "bad node n2: its report in presence cannot be read" in ended[0].out
    assert "Traceback" not in ended[0].err


def _no_connection(monkeypatch, is_cut_off):
    def refuse(*_):
        raise ConnectionRefusedError(111, "Connection refused")

    if is_cut_off:
        monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.mark.parametrize("count", [2, 4])
def test_a_node_that_cannot_reach_the_first(count, tmp_path, monkeypatch):
    ended = run_nodes(tmp_path, count, before=lambda rank: _no_connection(monkeypatch, rank == 1))
    assert codes(ended) == [3] * count, repr(ended)
    assert "bad node n2: cannot connect to the first node at localhost:" in ended[0].out
    assert "Connection refused" in ended[0].out
    assert bad_nodes(tmp_path) == "n2\n"


def test_if_no_node_can_reach_the_first_none_of_them_is_bad(tmp_path, monkeypatch):
    ended = run_nodes(tmp_path, 3, before=lambda rank: _no_connection(monkeypatch, rank > 0))
    assert codes(ended) == [2, 2, 2], repr(ended)
    assert "error on n2, n3: cannot connect to the first node at localhost:" in ended[0].out
    assert bad_nodes(tmp_path) is None


def test_a_folder_that_cannot_be_written(tmp_path):
    """As on a node where it is mounted read-only."""
    shared(tmp_path).mkdir(parents=True)
    file = tmp_path / "file"
    file.touch()

    def before(rank):
        if rank == 1:
            os.environ["LARGEBATCH_LOGS"] = str(file)

    ended = run_nodes(tmp_path, 2, before=before, seconds=5)
    assert codes(ended) == [2, 2], repr(ended)
    assert f"error: {file}/preflight/presence_1." in ended[1].err
    assert "cannot be written" in ended[1].err


def test_bandwidth_below_the_minimum(tmp_path):
    ended = run_nodes(tmp_path, 2, "--min-busbw=1e6")
    assert codes(ended) == [2, 2], repr(ended)
    assert "GB/s (bus bandwidth, median of 5), less than LARGEBATCH_MIN_BUSBW=1e+06" in ended[0].out
    assert bad_nodes(tmp_path) is None


def test_an_all_reduce_that_fails_on_a_node(tmp_path, monkeypatch):
    monkeypatch.setattr(all_reduce, "SECONDS", 4.0)
    ended = run_nodes(tmp_path, 4, before=lambda rank: rank == 1 and monkeypatch.setattr(all_reduce, "_bandwidth", die))
    assert codes(ended) == [2, 2, 2, 2], repr(ended)
    # The others have waited for it.
    first = ended[0].out.splitlines()[1]
    assert first.startswith("  error on n2: all-reduce of 1 MiB over 4 nodes by gloo")
    assert first.endswith("rank 0: exit code 9")
    assert bad_nodes(tmp_path) is None
