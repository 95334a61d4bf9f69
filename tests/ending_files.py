"""Endings of processes, as files that processes or their launcher leave."""

import json
from pathlib import Path
from typing import Any

from largebatch.storage.attempts import claim

# As torch 2.13 reports it.
REPORT = """
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_10:00:00
  host      : h2.example
  rank      : {rank} (local_rank: 1)
  exitcode  : -{number} (pid: 4711)
  error_file: <N/A>
  traceback : Signal {number} ({name}) received by PID 4711
============================================================
"""


def write_ending(folder: Path, kind: str, message: str = "", rank: int = 0, **about: Any) -> Path:
    """Write the ending of a rank into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{rank}.json"
    value = {"kind": kind, "message": message, "rank": rank, "node": f"h{rank}", "time": 1.0}
    path.write_text(json.dumps(value | about))
    return path


def write_report(logs: Path, node: str, rank: int, number: int, name: str) -> Path:
    """Write a node's log with the launcher's report of a signal."""
    path = logs / f"{node}.log"
    path.write_text("step 1: rank 7\n" + REPORT.format(rank=rank, number=number, name=name))
    return path


def end_run(run_dir: Path, kind: str | None, message: str = "", **about: Any) -> None:
    """Begin an attempt in a run's folder, and end it; with None, it is still running, or was killed."""
    attempt = claim(run_dir / "attempts", {})
    if kind is not None:
        write_ending(attempt.endings_dir, kind, message, **about)
