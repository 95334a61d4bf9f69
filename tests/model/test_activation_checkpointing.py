"""Activation checkpointing changes not a bit of the training, on every strategy.

`tests/estimate/test_activations.py` has the memory that it spares.
"""

from functools import partial

import pytest

from jobs import JobFailed, run_job, train
from largebatch.storage.layout import rank_file
from paths import DIGITS, LLAMA, PYDOC, SIMCLR
from test_strategies import SMALL_GPT, SMALL_LLAMA, differences, recorded

SHORT = (
    "--train.stop_after_steps=4",
    "--batch.micro_batch_size=8",
    "--evaluation.max_samples=20",
    '--checkpoint.every={"steps": 3}',
)
FULL = "--compute.activation_checkpointing=full"
SELECTIVE = "--compute.activation_checkpointing=selective"
SIZES = '"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]'
RESNET = f'--model={{"architecture": "resnet", "layer_type": "bottleneck", {SIZES}}}'
# Dropout; a model without weights at first; BatchNorm over all processes; a loss in two passes.
CASES = {
    "dropout": (PYDOC, (*SMALL_GPT, "--model.dropout=0.2"), "ddp", (FULL, SELECTIVE)),
    "bf16": (LLAMA, (*SMALL_LLAMA, "--precision=bf16"), "fsdp", (SELECTIVE,)),
    "synchronized": (DIGITS, ("--model.sync_batch_norm=true",), "zero1", (FULL,)),
    "two passes": (SIMCLR, (RESNET, "--batch.global_batch_size=32"), "zero3", (FULL,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_not_a_bit_changes(name, tmp_path):
    recipe, overrides, strategy, kinds = CASES[name]
    words = (*overrides, *SHORT)
    plain = run_job(recorded, recipe, tmp_path / "plain", *words, strategy=strategy)[0]
    assert len(plain["metrics"]) == 4
    for word in kinds:
        checkpointed = run_job(recorded, recipe, tmp_path / word, *words, word, strategy=strategy)[0]
        # BatchNorm's counters of passes are set where its statistics are used or saved.
        assert {name.rpartition(".")[2] for name in differences(checkpointed, plain)} <= {"num_batches_tracked"}
        saved, expected = (tmp_path / name / "checkpoints/step_00000003" / rank_file(0) for name in (word, "plain"))
        assert saved.read_bytes() == expected.read_bytes()


@pytest.mark.slow
def test_models_without_such_blocks_are_refused(run_dir):
    with pytest.raises(JobFailed, match=r'Encoder has no blocks that can be recomputed.*write "none"'):
        run_job(partial(train, run_dir=run_dir), SIMCLR, SELECTIVE)
    assert not run_dir.exists()
