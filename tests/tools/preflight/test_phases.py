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
    """Small tensors, no start of Python, and frequent looks."""
    monkeypatch.setattr(all_reduce, "run_job", run_forked)
    monkeypatch.setattr(phases, "run_job", run_forked)
    monkeypatch.setattr(all_reduce, "MEBIBYTES_ON_CPUS", 1)
    monkeypatch.setattr(reports, "SECONDS_BETWEEN_LOOKS", 0.05)


@pytest.fixture
def meet(tmp_path):
    """Run a node for each exit code, with which it must end; bad nodes must be noted. What each prints."""

    def meet(*exit_codes, words=(), bad_nodes="", **settings):
        ended = run_nodes(tmp_path, len(exit_codes), *words, **settings)
        assert tuple(each.exit_code for each in ended) == exit_codes, ended
        file = shared(tmp_path) / "bad_nodes"
        assert (file.read_text() if file.exists() else "") == bad_nodes
        return [each.out for each in ended]

    return meet


def test_good_nodes(tmp_path, meet):
    first, *others = meet(0, 0, 0)
    title, finding = first.splitlines()
    assert title == "Pre-flight on 3 nodes:"
    assert finding.startswith("  n1: all-reduce of 1 MiB over 3 nodes by gloo, 1 process per node: ")
    assert others == ["", ""]
    # Whoever can list the folder must not learn the token.
    assert not list(shared(tmp_path).glob(f"*{TOKEN}*"))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_nodes_meet_over_ipv6(meet):
    meet(0, 0, host="[::1]")


def test_one_node(meet):
    meet(0)


def test_a_first_node_that_clears_the_folder_when_it_starts(tmp_path, meet):
    wait = begins_after(tmp_path, 0, "presence_1")

    def before(rank):
        wait(rank)
        if rank == 0:
            shutil.rmtree(shared(tmp_path))
            shared(tmp_path).mkdir()

    meet(0, 0, before=before)


def test_files_of_another_start_are_ignored(tmp_path, meet):
    """Whoever it was, it found a bad node, and this start's first node is late."""
    shared(tmp_path).mkdir(parents=True)
    for name in ("presence_0", "presence_1", "presence_decision", "checks_decision"):
        (shared(tmp_path) / f"{name}.0123456789abcdef").write_text("3")
    meet(0, 0, before=late(0, 2))


def test_a_node_that_is_too_late_is_not_bad(tmp_path, meet):
    first, *_ = meet(2, 2, 2, before=begins_after(tmp_path, 2, "presence_decision"), seconds=8)
    assert f"error on n3: late: not present in {shared(tmp_path)} after 8 seconds" in first
    assert "raise LARGEBATCH_PREFLIGHT_SECONDS" in first


def test_a_first_node_that_is_too_late(meet):
    """The others have left without a trace when it comes."""
    first, second, _ = meet(2, 2, 2, before=late(0, 12), seconds=6)
    assert "error on n1: late: not present in " in second
    assert "error on n2, n3: late: not present in " in first


@pytest.mark.parametrize(
    ("function", "phase", "limits"),
    [
        ("_check", "checks", {(phases, "SECONDS_TO_CHECK"): 15.0, (phases, "SECONDS_TO_TELL"): 5.0}),
        # The others wait in their all-reduce.
        ("measure", "all_reduce", {(all_reduce, "SECONDS"): 4.0, (phases, "SECONDS_TO_TELL"): 12.0}),
    ],
)
def test_a_node_that_dies(function, phase, limits, monkeypatch, meet):
    """It is waited for until a limit, within which the others have to answer however slow the machine is."""
    for (owner, limit), seconds in limits.items():
        monkeypatch.setattr(owner, limit, seconds)
    first, *_ = meet(
        3, 9, 3, bad_nodes="n2\n", before=lambda rank: rank == 1 and monkeypatch.setattr(phases, function, die)
    )
    assert f"bad node n2: it stopped answering in {phase}" in first


def test_the_first_node_dies(tmp_path, monkeypatch, meet):
    monkeypatch.setattr(reports, "SECONDS_IN_ALL", 3.0)
    before = begins_after(tmp_path, 0, "presence_1")

    def die_early(rank):
        before(rank)
        if rank == 0:
            monkeypatch.setattr(phases, "_check", die)

    _, second, _ = meet(9, 3, 3, bad_nodes="n1\n", before=die_early, seconds=10)
    assert "bad node n1: it stopped answering in checks" in second


@pytest.mark.parametrize(
    ("check", "reason"), [(die, "exit code 9"), (lambda *_: multiprocessing.Event().wait(), "no result within 4 s")]
)
def test_a_driver_that_crashes_or_hangs(check, reason, monkeypatch, meet):
    """Its node can still say so."""

    def before(rank):
        if rank == 1:
            monkeypatch.setattr(phases, "check_node", check)
            monkeypatch.setattr(phases, "SECONDS_TO_CHECK", 4.0)

    first, *_ = meet(3, 3, 3, bad_nodes="n2\n", before=before)
    assert f"bad node n2: its own checks failed: rank 0: {reason}" in first


def test_a_port_in_use_is_no_nodes_fault(meet):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        first, _ = meet(2, 2, port=port)
    assert f"error on n1: cannot listen at localhost:{port} (" in first
    assert "Address already in use" in first
    assert "start the job again" in first


@pytest.mark.parametrize("text", ['{"node": "n7", "versions": 7}', "[" * 100_000])
def test_a_report_of_another_version(text, monkeypatch, meet):
    other = SimpleNamespace(dumps=lambda _: text)
    first, _ = meet(3, 3, bad_nodes="n2\n", before=lambda rank: rank and monkeypatch.setattr(reports, "json", other))
    assert "bad node n2: its report in presence cannot be read" in first


def _no_connection(monkeypatch, is_cut_off):
    def refuse(*_):
        raise ConnectionRefusedError(111, "Connection refused")

    if is_cut_off:
        monkeypatch.setattr(socket, "create_connection", refuse)


def test_a_node_that_cannot_reach_the_first(monkeypatch, meet):
    first, _ = meet(3, 3, bad_nodes="n2\n", before=lambda rank: _no_connection(monkeypatch, is_cut_off=rank == 1))
    assert "bad node n2: cannot connect to the first node at localhost:" in first
    assert "Connection refused" in first


def test_if_no_node_can_reach_the_first_none_of_them_is_bad(monkeypatch, meet):
    first, *_ = meet(2, 2, 2, before=lambda rank: _no_connection(monkeypatch, is_cut_off=rank > 0))
    assert "error on n2, n3: cannot connect to the first node at localhost:" in first


def test_a_folder_that_cannot_be_written(tmp_path):
    """As on a node where it is mounted read-only."""
    shared(tmp_path).mkdir(parents=True)
    file = tmp_path / "file"
    file.touch()

    def before(rank):
        if rank == 1:
            os.environ["LARGEBATCH_LOGS"] = str(file)

    first, second = run_nodes(tmp_path, 2, before=before, seconds=5)
    assert (first.exit_code, second.exit_code) == (2, 2)
    assert f"error: {file}/preflight/presence_1." in second.err
    assert "cannot be written" in second.err


def test_bandwidth_below_the_minimum(meet):
    first, _ = meet(2, 2, words=["--min-busbw=1e6"])
    assert "GB/s (bus bandwidth, median of 5), less than LARGEBATCH_MIN_BUSBW=1e+06" in first


def test_an_all_reduce_that_fails_on_a_node(monkeypatch, meet):
    monkeypatch.setattr(all_reduce, "SECONDS", 4.0)
    first, *_ = meet(2, 2, 2, before=lambda rank: rank == 1 and monkeypatch.setattr(all_reduce, "_bandwidth", die))
    # The others have waited for it.
    finding = first.splitlines()[1]
    assert finding.startswith("  error on n2: all-reduce of 1 MiB over 3 nodes by gloo")
    assert finding.endswith("rank 0: exit code 9")
