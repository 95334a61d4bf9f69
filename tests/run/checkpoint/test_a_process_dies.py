"""A checkpoint that several processes write is complete when all have written, and not before."""

import json
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
    looks = 0
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
    # Each look is kept at once: this process may be killed when the other one has died.
    with (path / "looks.jsonl").open("a", buffering=1) as file:
        while run.writer.last_step != NEW:
            if part.exists() and part.stat().st_size == whole.stat().st_size:
                file.write(json.dumps(usable(run.checkpoints)) + "\n")
                looks += 1
            if looks == 10:
                looked.touch()
            run.writer.poll()
            time.sleep(0.01)


def test_a_process_that_dies_while_it_writes_its_part_keeps_the_checkpoint_from_being_complete(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    attempt = claim(path / "attempts", {})
    with pytest.raises(JobFailed) as failed:
        run_job(save_while_the_other_process_dies, path, attempt)
    assert (1, "the process ended without a result") in [report[:2] for report in failed.value.reports]
    looks = [json.loads(line) for line in (path / "looks.jsonl").read_text().splitlines()]
    assert len(looks) >= 10
    assert looks == [[OLD]] * len(looks)
    (temporary,) = temporary_folders(path / "checkpoints")
    parts = [path / "checkpoints" / temporary / f"rank_{rank:05d}.safetensors" for rank in range(2)]
    whole = [path / "checkpoints" / f"step_{OLD:08d}" / part.name for part in parts]
    assert [part.stat().st_size == other.stat().st_size for part, other in zip(parts, whole, strict=True)] == [
        True,
        False,
    ]
    assert_training_goes_on(path)
