"""A file system that fails once, or from a moment on; bench/file_faults.py fails every call."""

import pytest

from failing_files import scenarios
from jobs import run_job

pytestmark = pytest.mark.slow

FAULTS = [
    # Transient errors at a restart, on the lock and on the only intact checkpoint.
    ("resumed", "flock", "lock", "EIO", False, 74),
    ("resumed", "io.open", "checkpoints/step_#/rank_#.safetensors", "ESTALE", False, 74),
    # An error that lasts is the user's.
    ("resumed", "io.open", "lock", "EACCES", True, 2),
    # No checkpoint could be written, and then no weights.
    ("new", "mkdir", "checkpoints/.step_#.attempt_#_#.tmp", "ENOSPC", True, 74),
    ("new", "mkdir", ".model.tmp", "EACCES", True, 74),
    # The look for a stop file and one line of a log cost nothing.
    ("new", "write", "metrics.jsonl", "EIO", False, 0),
]


def fail(folder):
    """What is wrong, and the exit code, for each of the faults."""
    found = {}
    for scenario in scenarios(folder):
        moments = scenario.expect()
        for number, (name, call, file, code, for_ever, _) in enumerate(FAULTS):
            if name == scenario.name:
                moment = next(each for each in moments if (each.call, each.file) == (call, file))
                found[number] = scenario.verdict(moment, code, for_ever, number)
    return [found[number] for number in range(len(FAULTS))]


def test_a_fault_costs_at_most_a_start(tmp_path):
    assert run_job(fail, tmp_path, strategy="single")[0] == [("", exit_code) for *_, exit_code in FAULTS]
