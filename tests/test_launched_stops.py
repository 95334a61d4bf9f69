"""Real launches that are ended by signals, and resume under another strategy."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from largebatch.storage.files import read_json_lines
from largebatch.storage.layout import read_object
from paths import MAPS, ROOT
from resuming import TINY_MAPS, run_interrupted
from test_launched import launch_command

pytestmark = pytest.mark.slow

WORDS = (*TINY_MAPS, '--train.duration={"steps": 100000}')


@pytest.mark.parametrize(
    ("number", "to_everybody", "num_workers", "resumed"),
    [(signal.SIGTERM, False, 0, True), (signal.SIGINT, True, 1, False)],
)
def test_a_signal_to_the_launcher_stops_the_run_behind_a_checkpoint(
    number, to_everybody, num_workers, resumed, tmp_path
):
    """A signal to the launcher is passed on; Slurm and Ctrl-C signal all processes, loaders too, and it is passed on as
    well."""
    run_dir = tmp_path / "run"
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
    status = read_object(run_dir / "status.json")
    assert (status["outcome"], status["resume"]) == ("stopped", True), (status, output)
    assert f"by {number.name}" in status["message"]
    assert 12 <= status["step"] == status["checkpoint_step"] < 100000

    if not resumed:
        return
    last = f"--train.stop_after_steps={status['step'] + 4}"
    assert run_interrupted(run_dir, (*WORDS, last), strategy="zero2", recipe=MAPS) is None
    starts = [line["step"] for line in read_json_lines(run_dir / "history.jsonl") if line["event"] == "started"]
    assert starts == [0, status["step"]]
    assert run_interrupted(tmp_path / "whole", (*WORDS, last), strategy="fsdp", recipe=MAPS) is None
    mine, theirs = (load_file(path / "model/model.safetensors") for path in (run_dir, tmp_path / "whole"))
    for name in theirs:
        difference = np.linalg.norm(mine[name] - theirs[name]) / max(np.linalg.norm(theirs[name]), 1e-8)
        assert difference <= 1e-5, (name, difference)
