"""Forked jobs end as jobs should: together, in time, and not before or after their owner."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from jobs import JobFailed, run_job
from paths import ROOT
from processes import is_running


def rank_and_folder():
    return os.environ["RANK"], str(Path.cwd())


def fail_on_rank_1():
    if os.environ["RANK"] == "1":
        print("about to fail")
        raise ValueError("no")
    time.sleep(3600)
    return "too late"


def answer_in_turn():
    """Each process answers within 3 s of the one before."""
    time.sleep(2 + 2.5 * int(os.environ["RANK"]))


def write_pid_and_wait(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(3600)


@pytest.mark.slow
def test_results_by_rank():
    assert run_job(rank_and_folder, world_size=3) == [(str(rank), str(ROOT)) for rank in range(3)]


def where_it_listens():
    """The addresses at which this process and the job's store listen."""
    dist.init_process_group("gloo")
    dist.barrier()
    port = int(os.environ["MASTER_PORT"])
    listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    found = {tuple(each.laddr) for each in listening if each.pid == os.getpid() or each.laddr.port == port}
    # The other process still listens.
    dist.barrier()
    return found


@pytest.mark.slow
def test_a_job_listens_on_the_loopback_interface_only():
    for found in run_job(where_it_listens):
        assert len(found) >= 2
        assert {address for address, _ in found} == {"127.0.0.1"}


@pytest.mark.slow
def test_the_failure_of_one_ends_all():
    started = time.monotonic()
    with pytest.raises(JobFailed, match="ValueError: no\n\nabout to fail"):
        run_job(fail_on_rank_1)
    assert time.monotonic() - started < 300


@pytest.mark.slow
def test_an_error_that_is_kept_keeps_no_store():
    """Its thread, collected in a forked process, would abort that."""
    run_job(os.getpid, world_size=1)
    threads = set(Path("/proc/self/task").iterdir())
    with pytest.raises(JobFailed, match="--- rank 0: exit code 3") as kept:
        run_job(sys.exit, 3, world_size=1)
    # Others may have ended meanwhile.
    assert set(Path("/proc/self/task").iterdir()) <= threads
    assert kept.value.exit_code == 3


@pytest.mark.slow
def test_results_do_not_extend_the_time_of_a_job():
    with pytest.raises(JobFailed, match="--- rank 1: no result within 3 s"):
        run_job(answer_in_turn, timeout=3)


@pytest.mark.slow
def test_a_job_that_does_not_end_is_ended(tmp_path):
    with pytest.raises(JobFailed, match="no result within 20 s"):
        run_job(write_pid_and_wait, tmp_path, timeout=20)
    assert all_gone(tmp_path, 2)


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path):
    program = f"""
import os, time
from pathlib import Path
from largebatch.tools.local_jobs import jobs

def write_pid_and_wait(folder):
    (folder / str(os.getpid())).touch()
    time.sleep(3600)

if __name__ == "__main__":
    # Without the engines that others need.
    jobs.preload_only(jobs.__name__)
    folder = Path({str(tmp_path)!r})
    jobs.run_job(write_pid_and_wait, folder, world_size=2, environment={{}}, folder=folder, timeout=600)
"""
    script = tmp_path / "owner.py"
    script.write_text(program)
    owner = subprocess.Popen([sys.executable, script], cwd=ROOT)
    deadline = time.monotonic() + 300
    while len(pids(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    owner.kill()
    owner.wait()
    assert all_gone(tmp_path, 2)


def pids(folder):
    return [int(file.name) for file in folder.iterdir() if file.name.isdigit()]


def all_gone(folder, number):
    """Whether so many processes have been there and are no more, at the latest in five minutes."""
    found = pids(folder)
    deadline = time.monotonic() + 300
    while any(is_running(pid) for pid in found) and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(found) == number and not any(is_running(pid) for pid in found)


def test_a_failure_in_one_line():
    reports = [(0, "exit code 1", "launching\nwarning\n"), (1, "exit code 2", "x\nerror: write 3\n  - that\nbye\n")]
    assert JobFailed(reports).in_one_line() == "write 3 - that"
    assert JobFailed([(1, "", "[rank 1] error: sample 17 is corrupt\n")]).in_one_line() == "sample 17 is corrupt"
    assert JobFailed(reports[:1]).in_one_line() == "rank 0: exit code 1"
    traceback = (
        'Traceback (most recent call last):\n  File "/a/task/data.py", line 7, in fetch\n    return self[index]\n'
        '  File "/lib/torch.py", line 9\nValueError: no reduction\n\nTry the following:\n  (1) that'
    )
    failed = JobFailed([(1, traceback, "")])
    said = "rank 1: ValueError: no reduction Try the following: (1) that (/a/task/data.py:7)"
    assert failed.in_one_line(Path("/a/task")) == said
