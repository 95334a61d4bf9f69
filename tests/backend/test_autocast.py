"""bf16 autocast under all strategies: the same rounding, and no copies of weights that outlive their use."""

import pytest

from jobs import run_job, train_in_job
from largebatch.storage.run_folder import RunFolder
from paths import BERT, LLAMA

pytestmark = pytest.mark.slow

MODEL = ("--model.num_layers=3", "--model.hidden_size=32", "--model.num_heads=2", "--model.num_kv_heads=2")
WIDTH = 96  # of the matrices that are looked for; no activation has it


def copies_after_the_blocks(folder, *words):
    """How many copies of blocks' matrices in bf16 a forward pass makes, and how many live when it is through them."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    from stepping import prepared

    copies = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            is_copy = function is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
            if is_copy and sorted(result.shape) == [32, WIDTH]:
                copies.append(StorageWeakRef(result.untyped_storage()))
            return result

    words = (*MODEL, f"--model.intermediate_size={WIDTH}", "--precision=bf16", *words)
    run, _, model, train_set = prepared(LLAMA, folder, *words)
    alive = []
    run.backend.unwrapped_model.lm_head.register_forward_pre_hook(
        lambda *_: alive.append(sum(not copy.expired() for copy in copies))
    )
    batch = next(next(run.steps(train_set)).micro_batches())
    with Watch():
        model(input_ids=batch["input_ids"], targets=batch["labels"])
    return len(copies), alive[0]


def test_recomputed_blocks_keep_no_copies(run_dir):
    words = ("--compute.activation_checkpointing=full", "--data.block_size=24")
    for made, alive in run_job(copies_after_the_blocks, run_dir, *words, strategy="zero3"):
        assert (made, alive) == (3 * 3, 0)


def test_zero3_rounds_linear_layers_as_ddp_does(tmp_path):
    """DeepSpeed's own linear layer adds a bias to a product that it has rounded already: 8e-4 of the norm.

    Biases are 0 in the first step.
    """
    norms = []
    for strategy in ("ddp", "zero3"):
        words = ("--precision=bf16", "--learning_rate.warmup=null", "--train.stop_after_steps=2", "--logging.every=1")
        train_in_job(BERT, tmp_path / strategy, *words, "--data.block_size=32", strategy=strategy)
        norms.append(RunFolder(tmp_path / strategy).metrics()[1]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
