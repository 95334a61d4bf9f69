"""A checkpoint that several processes write is complete when all have written, and not before."""

import os
import time

import pytest

from jobs import JobFailed, run_job
from largebatch.storage.attempts import claim
from saving import FakeBackend, FakeRun, assert_training_goes_on, temporary_folders, usable

pytestmark = pytest.mark.slow

OLD = 4
NEW = 8


def save_while_the_other_process_dies(path, attempt):
    """Both save one checkpoint; of the next, the second process writes half of its part, after the first's is whole."""
    import torch

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    run = FakeRun(path, asynchronous=True, backend=FakeBackend(rank, 2), attempt=attempt)
    run.save(OLD)
    looked = path / "looked"
    if rank == 1:
        write = os.write

        def write_half(descriptor, data):
            while not looked.exists():
                time.sleep(0.01)
            write(descriptor, data[: len(data) // 2])
            os._exit(9)

        os.write = write_half
        run.save(NEW)
    whole = run.checkpoints / f"step_{OLD:08d}/rank_00000.safetensors"
    part = run.checkpoints / f".step_{NEW:08d}.attempt_{attempt.name}.tmp" / whole.name
    run.begin_to_save(NEW)
    while not part.exists() or part.stat().st_size < whole.stat().st_size:
        time.sleep(0.01)
    for _ in range(10):
        run.writer.poll()
        assert usable(run.checkpoints) == [OLD]
        time.sleep(0.01)
    looked.touch()
    run.writer.wait()


def test_a_process_that_dies_while_it_writes_its_part_keeps_the_checkpoint_from_being_complete(run_dir):
    run_dir.mkdir()
    attempt = claim(run_dir / "attempts", {})
    with pytest.raises(JobFailed, match="rank 1: the process ended without a result"):
        run_job(save_while_the_other_process_dies, run_dir, attempt)
    assert (run_dir / "looked").exists()
    (temporary,) = temporary_folders(run_dir / "checkpoints")
    sizes, whole = (
        [file.stat().st_size for file in sorted((run_dir / "checkpoints" / folder).glob("rank_*"))]
        for folder in (temporary, f"step_{OLD:08d}")
    )
    assert sizes[0] == whole[0]
    assert sizes[1] < whole[1]
    assert_training_goes_on(run_dir)
