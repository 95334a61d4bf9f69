"""A process that is stopped, or stuck, ends the job within the configured time, and the run can be resumed."""

import os
import signal
import time
from pathlib import Path

import pytest

from jobs import failure_of, train
from largebatch.storage.layout import read_object
from largebatch.system.endings import decisive, read_endings
from paths import PYDOC
from resuming import TINY_GPT, run_interrupted

pytestmark = pytest.mark.slow

WORDS = (*TINY_GPT, '--checkpoint.every={"steps": 2}', "--train.stop_after_steps=8")
HANG_SECONDS = 10


def train_and_hang(run_dir: Path, how: str, rank: int, words: tuple[str, ...]) -> None:
    from largebatch.run import Run
    from largebatch.run.watch import watchdog

    update = Run.update
    may_be_slow = True

    def heartbeat(watched):
        # Only the step that hangs may be taken for one that does, however slow the machine is before.
        watched._last_heartbeat = time.monotonic() + (3600 if may_be_slow else 0)

    watchdog.Watchdog.heartbeat = heartbeat

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


@pytest.mark.parametrize(("how", "rank", "strategy"), [("stopped", 1, "ddp"), ("stuck", 0, "fsdp")])
def test_a_hang_ends_the_job_and_the_run_goes_on(how, rank, strategy, tmp_path):
    run_dir = tmp_path / "run"
    logs = tmp_path / "logs"
    logs.mkdir()
    place = {"strategy": strategy, "environment": {"LARGEBATCH_LOGS": str(logs)}}
    assert "the process ended without a result" in failure_of(train_and_hang, run_dir, how, rank, WORDS, **place)
    status = read_object(run_dir / "status.json")
    assert (status["outcome"], status["kind"], status["resume"]) == ("failed", "hang", True)
    # With DDP, step 7's gradients were reduced already, and the other process has gone on.
    assert status["step"] in (6, 7)
    (folder,) = (run_dir / "stacks").iterdir()
    assert f"more than faults.hang_seconds {HANG_SECONDS}; " in status["message"]
    assert "the stacks of the processes (rank_*.txt)" in status["message"]
    assert status["message"].endswith(f"are in {folder}")
    assert decisive(read_endings(logs / "endings")).where_and_why.startswith("hang: no progress for")
    # Who waits for the other shows where; who is stuck, too. Who is stopped can tell nothing.
    waiting = (folder / f"rank_{1 - rank:05d}.txt").read_text()
    assert "in backward" in waiting or "in update" in waiting
    stuck = folder / f"rank_{rank:05d}.txt"
    assert ("in hang" in stuck.read_text()) if how == "stuck" else not stuck.exists()
    assert run_interrupted(run_dir, WORDS, strategy=strategy) is None
    assert read_object(run_dir / "status.json")["outcome"] == "finished"
