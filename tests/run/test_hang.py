"""A process that is stopped, or stuck, ends the job within the configured time, and the run can be resumed."""

import os
import signal
import time

import pytest

from jobs import failure_of, run_job, train
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import decisive, read_endings
from paths import PYDOC
from resuming import TINY_GPT, run_interrupted

pytestmark = pytest.mark.slow

WORDS = (*TINY_GPT, '--checkpoint.every={"steps": 2}', "--train.stop_after_steps=8")
HANG_SECONDS = 10


def patient_watchdogs():
    """Take nothing for a hang, however slow the machine is, until the function that this returns is called."""
    from largebatch.run.watch.watchdog import Watchdog

    heartbeat = Watchdog.heartbeat

    def patient(watched):
        watched._last_heartbeat = time.monotonic() + 3600

    def end():
        Watchdog.heartbeat = heartbeat

    Watchdog.heartbeat = patient
    return end


def train_and_hang(run_dir, how, rank, words):
    from largebatch.run import Run

    update = Run.update
    end_of_patience = patient_watchdogs()

    def hang(run, step):
        if step.index == 6:
            end_of_patience()
            run.loop.watchdog.heartbeat()
            if run.backend.rank == rank:
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(3600)
        update(run, step)

    Run.update = hang
    train(PYDOC, *words, f"--faults.hang_seconds={HANG_SECONDS}", run_dir=run_dir)


@pytest.mark.parametrize(("how", "rank", "strategy"), [("stopped", 1, "ddp"), ("stuck", 0, "fsdp")])
def test_a_hang_ends_the_job_and_the_run_goes_on(how, rank, strategy, run_dir, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    place = {"strategy": strategy, "environment": {"LARGEBATCH_LOGS": str(logs)}}
    assert "the process ended without a result" in failure_of(train_and_hang, run_dir, how, rank, WORDS, **place)
    end = RunFolder(run_dir).history()[-1]
    assert (end["event"], end["kind"]) == ("failed", "hang")
    # With DDP, step 7's gradients were reduced already, and the other process has gone on.
    assert end["step"] in (6, 7)
    (folder,) = (run_dir / "stacks").iterdir()
    assert f"more than faults.hang_seconds {HANG_SECONDS}; " in end["message"]
    assert end["message"].endswith(f"are in {folder}")
    assert decisive(read_endings(logs / "endings")).where_and_why.startswith("hang: no progress for")
    # Who waits for the other shows where; who is stuck, too. Who is stopped can tell nothing.
    waiting = (folder / f"rank_{1 - rank:05d}.txt").read_text()
    assert "in backward" in waiting or "in update" in waiting
    stuck = folder / f"rank_{rank:05d}.txt"
    assert ("in hang" in stuck.read_text()) if how == "stuck" else not stuck.exists()
    assert run_interrupted(run_dir, WORDS, strategy=strategy) is None
    assert RunFolder(run_dir).history()[-1]["event"] == "finished"


def train_and_export(run_dir, seconds_per_parameter):
    """Write the final weights slowly; both processes may be taken for hanging from then on."""
    from largebatch.run.checkpoint import export
    from largebatch.run.record import recorder

    whole_weight = export.whole_weight
    finished = recorder.Recorder.finished
    end_of_patience = patient_watchdogs()

    def slowly(*arguments):
        time.sleep(seconds_per_parameter)
        return whole_weight(*arguments)

    def impatient(of_run, checkpoint, bad_steps, patient):
        end_of_patience()
        watchdog = patient.__self__
        watchdog.heartbeat()
        finished(of_run, checkpoint, bad_steps, watchdog.heartbeat)

    export.whole_weight = slowly
    recorder.Recorder.finished = impatient
    train(PYDOC, *WORDS, "--faults.hang_seconds=4", run_dir=run_dir)


def test_a_slow_export_is_no_hang(run_dir):
    run_job(train_and_export, run_dir, 0.5)
    assert RunFolder(run_dir).history()[-1]["event"] == "finished"
