"""What a case is, how it is run in a child, and when it has held; `bench/fuzz.py` has the rules in words."""

import ctypes
import io
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ending_files import write_ending
from fuzzing import SOUND
from largebatch.__main__ import main as largebatch
from record import ROOT
from run_folders import HISTORY, write_run
from saving import FakeRun

CPU_SECONDS = 10.0
WALL_SECONDS = 30.0
# Of CPU time; a child that takes less of it in `WALL_SECONDS` waits for something.
WORKING_SECONDS = 0.2
MEMORY_BYTES = 2 * 2**30
HELD = "held"


def make_sound() -> None:
    """Make `SOUND`."""
    for name in ("recipes", "slurm", "ds_configs", "launch"):
        shutil.copytree(ROOT / name, SOUND / name)
    write_run(SOUND / "run", history=HISTORY)
    run = FakeRun(SOUND / "run")
    for step in (7, 9):
        run.save(step)
    write_ending(run.attempt.endings_dir, "finished")


@dataclass(frozen=True)
class Case:
    """What to run in a child, in which folder and with which variables."""

    words: Sequence[str]
    folder: Path
    work: Callable[[Sequence[str]], int | None] = largebatch
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    verdict: str
    is_accepted: bool  # whether the command ended with exit code 0
    cpu_seconds: float
    output: str


def run_case(case: Case) -> Outcome:
    """Run a case in a child and judge it."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os._exit(_in_child(case, out.fileno(), err.fileno()))
        ready = _ends(child)
        if not ready:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(2**24).decode(errors="replace"))
    cpu_seconds = usage.ru_utime + usage.ru_stime
    code = os.waitstatus_to_exitcode(status)
    verdict = judge(code, *texts) if ready else f"no end in {WALL_SECONDS:g} s"
    if ready and cpu_seconds > CPU_SECONDS:
        verdict = f"over {CPU_SECONDS:g} s"
    return Outcome(verdict, code == 0, cpu_seconds, "".join(texts))


def _ends(child: int) -> bool:
    """Whether a child ends, at most `WALL_SECONDS` after it last worked; on a busy machine, it takes longer in all."""
    descriptor = os.pidfd_open(child)
    used = -CPU_SECONDS
    while not (ready := bool(select.select([descriptor], [], [], WALL_SECONDS)[0])):
        times = psutil.Process(child).cpu_times()
        before = used
        used = times.user + times.system
        if used > CPU_SECONDS or used - before < WORKING_SECONDS:
            break
    os.close(descriptor)
    return ready


def judge(code: int, out: str, err: str) -> str:
    """The verdict on an exit code, which is negative for a signal, and what was printed."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if "Traceback (most recent call last)" in out + err:
        return "traceback"
    if "\x1b" in out + err:
        return "terminal escape"
    if "SECRET" in out + err:
        return "a linked file was printed"
    has_reason = "error: " in err or (code == 1 and out.strip())
    return HELD if code == 0 or has_reason else f"exit code {code} without a reason"


def _in_child(case: Case, out: int, err: int) -> int:
    code: Any = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        # As Python itself opens them.
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"))
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), errors="backslashreplace")
        os.environ.update(case.environment)
        os.chdir(case.folder)
        _give_up_rights()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        code = case.work(case.words) or 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


def _give_up_rights() -> None:
    """Give up root's right to read every file, if this is root."""
    version_3 = 0x20080522
    this_process = 0
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(version_3, this_process)
    none = (ctypes.c_uint32 * 6)()
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")
