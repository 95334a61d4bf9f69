"""Random starting weights are a function of seed and name: the same bits on every strategy and number of processes."""

import os
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tasks
from evaluate_saved import evaluate_saved
from jobs import JobFailed, run_job, train
from largebatch.config import load_config
from largebatch.model.building import SeededWeights
from largebatch.storage.files import read_json_lines
from largebatch.storage.run_folder import RunFolder
from paths import LLAMA
from reference import draw_by_name
from resuming import Interruption, assert_bit_for_bit, stop_and_resume
from starting import TINY_LLAMA, prepared

pytestmark = pytest.mark.slow


@cache
def expected(*words, seed=0):
    """By hand: ones for norms, and for everything else a normal distribution of a seed of its own.

    Of parameters that are larger than a block, `test_building.py` reads parts.
    """
    model = tasks.build_model(LLAMA)(load_config(LLAMA, [*TINY_LLAMA, *words]))
    draw_by_name(model, seed, std=0.02)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}
    with torch.no_grad():
        weights["logits"] = model(input_ids=torch.arange(32).view(2, 16)).logits
    return {name: tensor.numpy() for name, tensor in weights.items()}


def assert_starts_from(found, weights):
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        if name == "logits":
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)
        else:
            assert found[name].tobytes() == values.tobytes(), name


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("fsdp", 3), ("zero3", 3)],
)
def test_the_same_bits_everywhere(strategy, world_size, run_dir):
    words = ("--batch.micro_batch_size=2", "--seed=7")
    results = run_job(prepared, run_dir, *words, strategy=strategy, world_size=world_size)
    assert_starts_from(results[0], expected(*words, seed=7))


# --- processes that would differ ----------------------------------------------------------------------------------


def prepared_with_another_seed_on_rank_1(run_dir):
    read = SeededWeights.read

    def read_otherwise(weights, name, start, stop):
        if os.environ["RANK"] == "1" and name == "model.layers.1.mlp.up_proj.weight":
            weights._seed = 1
        return read(weights, name, start, stop)

    SeededWeights.read = read_otherwise
    prepared(run_dir)


def test_processes_that_draw_other_weights_are_refused(run_dir):
    with pytest.raises(JobFailed) as failure:
        run_job(prepared_with_another_seed_on_rank_1, run_dir, strategy="fsdp")
    assert "rank 1 starts with a different model.layers.1.mlp.up_proj.weight than rank 0" in str(failure.value)
    assert not run_dir.exists()


# --- going on, and the end ----------------------------------------------------------------------------------------


def test_resumed_bit_for_bit(run_dir, tmp_path):
    """And what is left at the end, which no process has put together, is what `transformers` reads."""
    words = (*TINY_LLAMA, "--logging.every=1", "--data.num_eval_samples=32")
    stop_and_resume(tmp_path, words, Interruption("signal", 0, 5), strategy="zero3", recipe=LLAMA)
    assert_bit_for_bit(run_dir, tmp_path / "whole")
    (evaluation,) = read_json_lines(tmp_path / "run/evaluations.jsonl")
    assert evaluation["loss"] == pytest.approx(evaluate_saved(run_dir)["loss"], rel=1e-5)
    model, about = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", output_loading_info=True)
    assert not any(about.values())
    # Which training does not keep.
    assert model.config.use_cache
    assert model.generation_config.use_cache in (True, None)


def train_llama(run_dir, disk_is_full):
    """Or rather, it takes everything but checkpoints."""
    from largebatch.run.checkpoint.save import CheckpointWriter

    def refuse(*_):
        raise OSError(28, "No space left on device")

    if disk_is_full:
        CheckpointWriter._write_own = refuse
    train(LLAMA, *TINY_LLAMA, "--data.num_eval_samples=8", run_dir=run_dir)


def test_a_run_whose_last_checkpoint_cannot_be_written_has_no_weights_until_it_is_run_again(run_dir):
    with pytest.raises(JobFailed) as failure:
        run_job(train_llama, run_dir, True, strategy="single")
    assert "the latest complete one: none yet" in str(failure.value)
    assert RunFolder(run_dir).history()[-1]["kind"] == "files"
    assert not (run_dir / "model").exists()
    run_job(train_llama, run_dir, False, strategy="single")
    assert (run_dir / "model").exists()
