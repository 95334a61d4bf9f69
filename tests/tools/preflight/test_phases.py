"""Nodes that meet, as processes of this machine: who is named when something is wrong, and all get one exit code."""

import multiprocessing
import os
import socket
from types import SimpleNamespace

import pytest

from largebatch.config import load_config
from largebatch.tools.local_jobs.jobs import JobFailed
from largebatch.tools.preflight import all_reduce, meeting, phases, run_folder
from largebatch.tools.preflight.node import checkpoint_bytes
from paths import PYDOC
from preflight_nodes import TOKEN, die, late, run_nodes, shared, too_late

pytestmark = pytest.mark.slow


def run_forked(function, *arguments, **_):
    """What `run_job` does for one process, without a server that would import torch for every node."""
    os.environ["LOCAL_RANK"] = "0"
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(function(*arguments)))
    process.start()
    theirs.close()
    try:
        return [mine.recv()]
    except EOFError:
        process.join()
        raise JobFailed([(0, f"exit code {process.exitcode}", "")]) from None


@pytest.fixture(autouse=True, scope="module")
def _imports():
    """What every node would import is there when it is forked."""
    checkpoint_bytes(load_config(PYDOC))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Small tensors, no start of Python, and deadlines for processes that begin at once."""
    monkeypatch.setattr(all_reduce, "run_job", run_forked)
    monkeypatch.setattr(all_reduce, "MEBIBYTES_ON_CPUS", 1)
    monkeypatch.setattr(meeting, "SECONDS_UNREACHABLE", 3.0)
    monkeypatch.setattr(run_folder, "SECONDS_UNTIL_VISIBLE", 3.0)


def codes(ended):
    return [each.exit_code for each in ended]


def bad_nodes(folder):
    file = shared(folder) / "bad_nodes"
    return file.read_text() if file.exists() else None


def test_good_nodes(tmp_path):
    ended = run_nodes(tmp_path, 4)
    assert codes(ended) == [0, 0, 0, 0], ended
    lines = ended[0].out.splitlines()
    assert lines[0] == "Pre-flight on 4 nodes:"
    assert "GB are free in the run folder" in lines[1]
    assert lines[2].startswith("  all-reduce of 1 MiB over 4 nodes by gloo, 1 process per node: ")
    assert [each.out for each in ended[1:]] == ["", "", ""]
    assert bad_nodes(tmp_path) is None


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_nodes_meet_over_ipv6(tmp_path):
    ended = run_nodes(tmp_path, 2, host="[::1]")
    assert codes(ended) == [0, 0], ended


def test_one_node(tmp_path):
    ended = run_nodes(tmp_path, 1)
    assert codes(ended) == [0], ended


def test_a_node_that_is_late_within_the_deadline(tmp_path):
    assert codes(run_nodes(tmp_path, 2, before=late(0, 3), seconds=60)) == [0, 0]


def test_a_node_that_is_too_late_is_not_bad(tmp_path):
    ended = run_nodes(tmp_path, 4, before=too_late(tmp_path, 2), seconds=12)
    assert codes(ended) == [2, 2, 2, 2], ended
    assert "late: n3: not present after 12 seconds" in ended[0].out
    assert "raise LARGEBATCH_PREFLIGHT_SECONDS" in ended[0].out
    assert "n3: the pre-flight ended before this node was present" in ended[2].err
    # Whoever can list the folder must not learn the token.
    assert not list(shared(tmp_path).glob(f"*{TOKEN}*"))
    assert bad_nodes(tmp_path) is None


@pytest.mark.parametrize(
    ("module", "name", "phase", "limits"),
    [
        (phases, "check_node", "its own checks", {(phases, "SECONDS_TO_CHECK"): 20.0}),
        # The others wait in their all-reduce.
        (phases, "measure", "the all-reduce", {(all_reduce, "SECONDS"): 4.0, (phases, "SECONDS_TO_TELL"): 12.0}),
    ],
)
def test_a_node_that_dies(module, name, phase, limits, tmp_path, monkeypatch):
    """It is waited for until a limit, within which the others have to answer however slow the machine is."""
    for (owner, limit), seconds in limits.items():
        monkeypatch.setattr(owner, limit, seconds)
    ended = run_nodes(tmp_path, 4, before=lambda rank: monkeypatch.setattr(module, name, _die) if rank == 1 else None)
    assert codes(ended) == [3, 9, 3, 3], ended
    assert f"bad node n2: it stopped answering in {phase}" in ended[0].out
    assert bad_nodes(tmp_path) == "n2\n"


def _die(*_):
    die()


def test_the_first_node_dies(tmp_path, monkeypatch):
    ended = run_nodes(tmp_path, 2, before=lambda rank: rank or monkeypatch.setattr(phases, "check_node", _die))
    assert codes(ended) == [9, 3], ended
    assert "n2: the first node, localhost, stopped answering in " in ended[1].err


def test_a_port_in_use_is_no_nodes_fault(tmp_path):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        ended = run_nodes(tmp_path, 2, port=port, before=too_late(tmp_path, 1))
    assert codes(ended) == [2, 2], ended
    assert f"n1 cannot open a store at localhost:{port} (" in ended[0].out
    assert "EADDRINUSE" in ended[0].out
    assert "start the job again" in ended[0].out
    assert bad_nodes(tmp_path) is None


def test_a_store_that_does_not_answer_is_no_nodes_fault(tmp_path, monkeypatch):
    """As torch's does while strangers hold 800 connections to it."""

    def time_out(*_, **__):
        raise RuntimeError("timed out")

    ended = run_nodes(tmp_path, 2, before=lambda rank: rank and monkeypatch.setattr(meeting, "_store", time_out))
    assert codes(ended) == [2, 2], ended
    assert "accepts connections but does not answer (timed out (RuntimeError))" in ended[1].err
    assert bad_nodes(tmp_path) is None


def test_what_is_no_report_counts_against_its_sender(tmp_path, monkeypatch):
    messages = ["", "x", "[]", '{"node": 1}', '{"node": "n7", "versions": 7}', "[" * 100_000]

    def be_a_stranger(rank):
        if rank:
            monkeypatch.setattr(meeting, "json", SimpleNamespace(dumps=lambda _: messages[rank - 1]))

    ended = run_nodes(tmp_path, 1 + len(messages), before=be_a_stranger)
    assert ended[0].exit_code == 2, ended
    assert "late: n2, n3, n4, n5, n6, n7:" in ended[0].out
    assert "Traceback" not in ended[0].err


def _no_connection(rank, monkeypatch):
    def refuse(*_):
        raise ConnectionRefusedError(111, "Connection refused")

    if rank == 1:
        monkeypatch.setattr(socket, "create_connection", refuse)


# Of four nodes, two others have reached the first one.
@pytest.mark.parametrize(("count", "bad"), [(2, "n1"), (4, "n2")])
def test_a_node_that_cannot_reach_the_first(count, bad, tmp_path, monkeypatch):
    ended = run_nodes(tmp_path, count, before=lambda rank: _no_connection(rank, monkeypatch))
    assert codes(ended) == [3] * count, ended
    assert "n2: cannot connect to the first node at localhost:" in ended[1].err
    assert "Connection refused" in ended[1].err
    assert f"bad node {bad}: n2 cannot connect to the first node at localhost:" in ended[0].out


def test_an_unshared_folder(tmp_path, monkeypatch):
    def before(rank):
        if rank == 1:
            (tmp_path / "own").mkdir()
            os.chdir(tmp_path / "own")
            read_text = run_folder.Path.read_text

            def of_another_folder(path, **options):
                return "41" if path.name == "token" else read_text(path, **options)

            monkeypatch.setattr(run_folder.Path, "read_text", of_another_folder)

    ended = run_nodes(tmp_path, 2, before=before)
    assert codes(ended) == [3, 3], ended
    assert "bad node n2: " in ended[0].out
    assert "is not the folder that the batch script wrote to" in ended[0].out


def test_a_refusal_by_the_recipe(tmp_path):
    ended = run_nodes(tmp_path, 2, "--seed=-1")
    assert codes(ended) == [2, 2], ended
    assert "the recipe's model cannot be built: 1 problem in " in ended[0].out
    assert bad_nodes(tmp_path) is None


def test_bandwidth_below_the_minimum(tmp_path):
    ended = run_nodes(tmp_path, 2, "--min-busbw=1e6")
    assert codes(ended) == [2, 2], ended
    assert "GB/s (bus bandwidth, median of 5), less than LARGEBATCH_MIN_BUSBW=1e+06" in ended[0].out
    assert bad_nodes(tmp_path) is None


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (lambda: os.kill(os.getpid(), 9), "exit code -9"),
        (lambda: 1 / 0, "exit code 1"),
    ],
)
def test_an_all_reduce_that_fails_on_a_node(failure, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(all_reduce, "SECONDS", 4.0)

    def before(rank):
        if rank == 1:
            monkeypatch.setattr(all_reduce, "_bandwidth", lambda *_: failure())

    ended = run_nodes(tmp_path, 4, before=before)
    assert codes(ended) == [2, 2, 2, 2], ended
    assert f"1 process per node: failure 1, on n2: rank 0: {reason}" in ended[0].out
    assert bad_nodes(tmp_path) is None
