"""Nodes that meet, as processes of this machine: who is named when something is wrong, and all get one exit code."""

import os
import socket
import time

import pytest

import tasks
from largebatch.config import load_config
from largebatch.tools.preflight import all_reduce, bandwidth, meeting, node, phases, run_folder
from largebatch.tools.preflight.all_reduce import take_part
from largebatch.tools.preflight.node import checkpoint_bytes
from paths import PYDOC
from preflight_nodes import die, late, run_nodes, shared, too_late

pytestmark = pytest.mark.slow


class Forked:
    """What bandwidth.measure needs of a process, without a start of Python."""

    def __init__(self, it):
        self.returncode = None
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                take_part(it)
                code = 0
            finally:
                os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, 9)

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)


@pytest.fixture(autouse=True, scope="module")
def _imports():
    """What every node would import is there when it is forked."""
    checkpoint_bytes(PYDOC, load_config(PYDOC))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Small tensors, no start of Python, and deadlines for processes that begin at once."""
    monkeypatch.setattr(bandwidth, "start", lambda _, it: Forked(it))
    monkeypatch.setattr(bandwidth, "MEBIBYTES_ON_CPUS", 1)
    monkeypatch.setattr(meeting, "SECONDS_UNREACHABLE", 3.0)
    for module in (run_folder, phases):
        monkeypatch.setattr(module, "SECONDS_UNTIL_VISIBLE", 3.0)


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


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_port_is_free_for_training_afterward(host, tmp_path):
    if not socket.has_dualstack_ipv6():
        host = "127.0.0.1"
    ended = run_nodes(tmp_path, 2, host=host)
    assert codes(ended) == [0, 0], ended


def test_one_node(tmp_path):
    ended = run_nodes(tmp_path, 1)
    assert codes(ended) == [0], ended


def test_a_node_that_is_late_within_the_deadline(tmp_path):
    assert codes(run_nodes(tmp_path, 2, before=late(0, 3), LARGEBATCH_PREFLIGHT_SECONDS=60)) == [0, 0]


def test_a_node_that_is_too_late_is_not_bad(tmp_path):
    ended = run_nodes(tmp_path, 4, before=too_late(tmp_path, 2), LARGEBATCH_PREFLIGHT_SECONDS=12)
    assert codes(ended) == [2, 2, 2, 2], ended
    assert "late: n3: not present after 12 seconds" in ended[0].out
    assert "raise LARGEBATCH_PREFLIGHT_SECONDS" in ended[0].out
    assert "n3: the pre-flight ended before this node was present" in ended[2].err
    assert bad_nodes(tmp_path) is None


@pytest.mark.parametrize(
    ("module", "name", "phase", "limits"),
    [
        (phases, "check_node", "its own checks", {(phases, "SECONDS_TO_CHECK"): 20.0}),
        (phases, "_reach_next_node", "connections", {(phases, "SECONDS_TO_TELL"): 12.0}),
        # The others wait in their all-reduce.
        (bandwidth, "measure", "all-reduce 1", {(bandwidth, "SECONDS"): 4.0, (phases, "SECONDS_TO_TELL"): 12.0}),
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
    with meeting.listen_at(0) as server:
        port = server.getsockname()[1]
        ended = run_nodes(tmp_path, 2, port=port)
    assert codes(ended) == [2, 2], ended
    assert f"port {port} on localhost cannot be used (Address already in use): start the job again" in ended[0].out
    assert bad_nodes(tmp_path) is None


def _no_connection(rank, monkeypatch):
    def refuse(*_):
        raise ConnectionRefusedError(111, "Connection refused")

    if rank == 1:
        monkeypatch.setattr(socket, "create_connection", refuse)


# Of four nodes, two others have reached the first one.
@pytest.mark.parametrize(
    ("count", "bad"), [(2, "n1: n2 cannot connect to n1 at"), (4, "n2: it cannot connect to n1 at")]
)
def test_a_node_that_cannot_reach_the_first(count, bad, tmp_path, monkeypatch):
    ended = run_nodes(tmp_path, count, before=lambda rank: _no_connection(rank, monkeypatch))
    assert codes(ended) == [3] * count, ended
    assert "n2: cannot connect to the first node at localhost:" in ended[1].err
    assert "Connection refused" in ended[1].err
    assert f"bad node {bad} localhost:" in ended[0].out


def test_a_circle_of_connections(tmp_path, monkeypatch):
    def before(rank):
        if rank == 1:
            # It connects to the store first, and then to the next node.
            reach = phases._reach_next_node
            monkeypatch.setattr(phases, "_reach_next_node", lambda it: _no_connection(1, monkeypatch) or reach(it))

    ended = run_nodes(tmp_path, 4, before=before)
    assert codes(ended) == [3, 3, 3, 3], ended
    assert "bad node n3: n2 cannot connect to n3 at " in ended[0].out


def test_other_versions(tmp_path, monkeypatch):
    def before(rank):
        if rank == 1:
            monkeypatch.setattr(node, "installed_versions", lambda: {"torch": "2.12"})
        else:
            monkeypatch.setattr(node, "installed_versions", lambda: {"torch": "2.13"})

    ended = run_nodes(tmp_path, 4, before=before)
    assert codes(ended) == [3, 3, 3, 3], ended
    assert "bad node n2: torch is 2.12, but 2.13 on 3 nodes" in ended[0].out
    assert bad_nodes(tmp_path) == "n2\n"


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
    ended = run_nodes(tmp_path, 2, "--batch.micro_batch_size=7")
    assert codes(ended) == [2, 2], ended
    assert ended[0].out.count("is not a multiple of batch.micro_batch_size 7") == 1
    assert bad_nodes(tmp_path) is None


def test_a_model_that_cannot_be_imported(tmp_path):
    recipe = tasks.copy("causal_lm", tmp_path) / PYDOC.name
    recipe.with_name("model.py").write_text("import not_there\n")
    ended = run_nodes(tmp_path, 2, recipe=recipe)
    assert codes(ended) == [2, 2], ended
    assert "the recipe's model cannot be built: " in ended[0].out
    assert "No module named 'not_there'" in ended[0].out


def test_bandwidth_below_the_minimum(tmp_path):
    ended = run_nodes(tmp_path, 2, LARGEBATCH_MIN_BUSBW=1e6)
    assert codes(ended) == [2, 2], ended
    assert "GB/s (bus bandwidth, median of 5), less than LARGEBATCH_MIN_BUSBW=1e+06" in ended[0].out
    assert bad_nodes(tmp_path) is None


def test_warn(tmp_path):
    ended = run_nodes(tmp_path, 2, LARGEBATCH_MIN_BUSBW=1e6, LARGEBATCH_PREFLIGHT="warn")
    assert codes(ended) == [0, 0], ended
    assert "less than LARGEBATCH_MIN_BUSBW" in ended[0].out
    assert "the job starts anyway (LARGEBATCH_PREFLIGHT=warn)" in ended[0].out


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (lambda: os.kill(os.getpid(), 9), "rank 1 on n2: ended by SIGKILL"),
        (lambda: 1 / 0, "rank 1 on n2: division by zero (ZeroDivisionError)"),
    ],
)
def test_an_all_reduce_that_fails_on_a_node(failure, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(bandwidth, "SECONDS_AFTER_A_FAILURE", 2.0)
    speed = all_reduce._speed

    def before(rank):
        if rank == 1:
            monkeypatch.setattr(all_reduce, "_speed", lambda *given: failure() or speed(*given))

    ended = run_nodes(tmp_path, 4, before=before)
    assert codes(ended) == [3, 3, 3, 3], ended
    assert f"failed: {reason}" in ended[0].out
    assert "bad node n2: all-reduces with this node are slow or fail" in ended[0].out
    assert bad_nodes(tmp_path) == "n2\n"
