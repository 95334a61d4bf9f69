"""What the first checkpoint needs is reserved in the first step; and what exists before training is not collected."""

import gc

import pytest

from jobs import run_job, train
from largebatch.backend.base import Backend
from largebatch.run.checkpoint.save import CheckpointWriter
from paths import LLAMA
from starting import TINY_LLAMA


def sizes_before_and_in_the_first_save(run_dir):
    """Dtype and number of elements of each vector that this process writes, and whether the model is frozen."""
    noted = []
    engine_state = Backend.engine_state
    reserve_memory = CheckpointWriter.reserve

    def note(backend):
        state = engine_state(backend)
        own = {piece.vector: (str(piece.tensor.dtype), piece.owned[1] - piece.owned[0]) for piece in state.pieces}
        is_frozen = not any(each is backend.model for each in gc.get_objects())
        noted.append(({vector: about for vector, about in own.items() if about[1]}, is_frozen))
        return state

    def reserve(writer):
        Backend.engine_state = note
        reserve_memory(writer)

    CheckpointWriter.reserve = reserve
    train(LLAMA, *TINY_LLAMA, "--batch.micro_batch_size=2", "--train.stop_after_steps=1", run_dir=run_dir)
    return noted[:2]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp", 3), ("zero3", 2)])
def test_the_first_checkpoint_has_the_sizes_that_were_reserved(strategy, world_size, run_dir):
    for (reserved, _), (saved, is_frozen) in run_job(
        sizes_before_and_in_the_first_save, run_dir, strategy=strategy, world_size=world_size
    ):
        assert len(saved) > 3
        assert reserved == saved
        assert is_frozen
