"""Real launches that are ended by signals."""

import os
import signal
import subprocess
import time

import pytest

from largebatch.storage.files import read_json_lines
from largebatch.storage.run_folder import RunFolder
from paths import MAPS, ROOT
from resuming import TINY_MAPS
from test_launched import launch_command

pytestmark = pytest.mark.slow

WORDS = (*TINY_MAPS, '--train.duration={"steps": 100000}')


@pytest.mark.parametrize(
    ("number", "to_everybody", "num_workers"), [(signal.SIGTERM, False, 0), (signal.SIGINT, True, 1)]
)
def test_a_signal_to_the_launcher_stops_the_run_behind_a_checkpoint(number, to_everybody, num_workers, run_dir):
    """A signal to the launcher is passed on; Slurm and Ctrl-C signal all processes, loaders too, and it is passed on as
    well."""
    words = (*WORDS, f"--data.num_workers={num_workers}")
    job = subprocess.Popen(
        launch_command(MAPS, run_dir, *words, strategy="ddp"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 600
    while len(read_json_lines(run_dir / "metrics.jsonl")) < 12 and time.monotonic() < deadline:
        time.sleep(0.1)
    (os.killpg if to_everybody else os.kill)(job.pid, number)
    output, _ = job.communicate(timeout=600)
    assert job.returncode != 0
    assert "forcefully" not in output
    run = RunFolder(run_dir)
    end = run.history()[-1]
    assert end["event"] == "stopped", (end, output)
    assert f"by {number.name}" in end["message"]
    assert 12 <= end["step"] == run.checkpoint_step() < 100000
