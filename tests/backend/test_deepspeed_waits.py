"""DeepSpeed asks its accelerator to wait for the device nowhere in a step, as far as a CPU's accelerator shows."""

import pytest

from jobs import run_job
from paths import PYDOC
from tasks import TINY

pytestmark = pytest.mark.slow

NUM_STEPS = 4
WATCHED_FROM = 2


def waits_of_a_run(run_dir):
    """How often each of the last steps, of four micro-batches each, waits for the device."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from jobs import train
    from largebatch.run import Run

    waits = []
    update = Run.update
    counts = []
    CPU_Accelerator.synchronize = lambda *_: waits.append(1)

    def update_and_count(run, step):
        update(run, step)
        counts.append(len(waits))

    Run.update = update_and_count
    words = ("--batch.global_batch_size=32", "--logging.every=100", f"--train.stop_after_steps={NUM_STEPS}")
    train(PYDOC, *TINY, *words, run_dir=run_dir)
    return [after - before for before, after in zip(counts[WATCHED_FROM - 1 :], counts[WATCHED_FROM:], strict=False)]


def test_no_step_waits_for_the_device(tmp_path):
    for waits in run_job(waits_of_a_run, tmp_path / "run", strategy="zero3"):
        assert waits == [0] * (NUM_STEPS - WATCHED_FROM)
