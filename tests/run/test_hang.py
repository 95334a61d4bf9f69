"""A process that is stopped, or stuck, ends the job within the configured time, and the run goes on from there."""

import json
import os
import pickle
import re
import signal
import time
from pathlib import Path

import pytest

from jobs import JobFailed, run_job, train
from largebatch.tools.job.cause import first_cause
from paths import PYDOC
from resuming import TINY_GPT, assert_bit_for_bit, run_interrupted

pytestmark = pytest.mark.slow

WORDS = (*TINY_GPT, '--checkpoint.every={"steps": 2}', "--train.stop_after_steps=14")
HANG_SECONDS = 15


def train_and_hang(run_dir: Path, how: str, rank: int, words: tuple[str, ...]) -> None:
    from largebatch.run import Run
    from largebatch.run.watch import watchdog

    update, may_be_slow = Run.update, True

    def heartbeat(watched):
        # Only the step that hangs may be taken for one that does, however slow the machine is before.
        watched._last_heartbeat = time.monotonic() + (3600 if may_be_slow else 0)

    watchdog.Watchdog.heartbeat = heartbeat
    if how == "stuck":
        # All will report, and are not waited for any longer then.
        watchdog.SECONDS_FOR_REPORTS = 300

    def hang(run, step):
        nonlocal may_be_slow
        if step.index == 6:
            may_be_slow = False
            run.loop.watchdog.heartbeat()
        if step.index == 6 and run.backend.rank == rank:
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                time.sleep(3600)
        update(run, step)

    Run.update = hang
    train(PYDOC, *words, f"--faults.hang_seconds={HANG_SECONDS}", run_dir=run_dir)


# Who is missing, and in what the other process waits. DDP's gradients are on their way before the update.
SILENT = r"rank {rank} \(h1, process \d+\) wrote no stack: stopped, .*; rank {other} waited in \w+ number \d+ of group "
MISSING = (
    r"rank {rank} \(h1, process \d+\) had not entered \w+ number \d+ of group \d .* over gloo, "
    "in which rank {other} waited"
)


@pytest.mark.parametrize(
    ("how", "rank", "strategy", "message"),
    [("stopped", 1, "ddp", SILENT), ("stopped", 0, "fsdp", SILENT), ("stuck", 0, "zero2", MISSING)],
)
def test_a_hang_ends_the_job_and_the_run_goes_on(how, rank, strategy, message, tmp_path):
    run_dir, logs = tmp_path / "run", tmp_path / "logs"
    logs.mkdir()
    environment = {"LARGEBATCH_LOGS": str(logs), "LARGEBATCH_NODE": "h1"}
    with pytest.raises(JobFailed) as caught:
        run_job(train_and_hang, run_dir, how, rank, WORDS, strategy=strategy, environment=environment)
    assert "the process ended without a result" in str(caught.value)
    status = json.loads((run_dir / "status.json").read_text())
    assert status["outcome"] == "failed"
    assert "no progress for" in status["message"]
    assert re.search(message.format(rank=rank, other=1 - rank), status["message"])
    # The record of the process that waited; who is stopped leaves none.
    assert pickle.loads((logs / f"fr_{1 - rank}").read_bytes())["entries"]
    assert (logs / f"fr_{rank}").exists() == (how == "stuck")
    cause = first_cause(logs)
    assert cause.startswith("hang: no progress for")
    assert f"rank {rank} (h1" in cause
    assert status["resume"] is True
    # With DDP, step 7's gradients were reduced already, and the other process has gone on.
    assert status["step"] in (6, 7)
    stacks = {path.stem: path.read_text() for path in run_dir.glob("stacks/*/rank_*.txt")}
    # Who waits for the other tells in which collective; who is stuck, where. Who is stopped can tell nothing.
    assert "in backward" in stacks[f"rank_{1 - rank:05d}"] or "in update" in stacks[f"rank_{1 - rank:05d}"]
    if how == "stuck":
        assert "in hang" in stacks[f"rank_{rank:05d}"]
    assert run_interrupted(run_dir, WORDS, strategy=strategy) is None
    assert run_interrupted(tmp_path / "whole", WORDS, strategy=strategy) is None
    # The attempt that hung has noted no samples, and what it saved last is step 4 or 6.
    for file in tmp_path.glob("*.samples.*"):
        lines = file.read_text().splitlines()
        file.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] > 6))
    assert_bit_for_bit(run_dir, tmp_path / "whole")
