"""bench/two_process.py: the loops by hand do what ours does."""

import json

import pytest

import two_process
from largebatch.backend.deepspeed_config import fill_from_plan
from largebatch.config import load_config
from largebatch.plan import resolve
from paths import ROOT
from peers.gpt import job
from peers.gpt.zero import engine_config


def test_the_job_is_the_one_that_is_told_of():
    parameters = sum(parameter.numel() for parameter in job.build_model().parameters())
    # 12 width² a block and its vectors, both embeddings, and the last norm.
    width = 256
    assert parameters == 4 * (12 * width**2 + 13 * width) + (256 + 128) * width + 2 * width
    assert 3e6 < parameters < 3.5e6


def test_both_have_the_same_batch_and_optimizer():
    plan = resolve(load_config(two_process.RECIPE, two_process.overrides(2)), two_process.WORLD_SIZE)
    assert plan.micro_steps_at(0) == job.ACCUMULATION == 4
    assert plan.micro_batch_size == job.MICRO_BATCH
    optimizer = job.build_optimizer(job.build_model())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [plan.weight_decay, 0.0]
    assert optimizer.defaults["betas"] == tuple(plan.optimizer_options["betas"])
    assert optimizer.defaults["eps"] == plan.optimizer_options["eps"]
    assert plan.clip_norm == job.CLIP_NORM


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_engine_is_set_as_ours_but_for_accumulation(stage):
    plan = resolve(load_config(two_process.RECIPE, two_process.overrides(2)), two_process.WORLD_SIZE)
    mine = fill_from_plan(json.loads((ROOT / f"ds_configs/zero{stage}.json").read_text()), plan)
    # How models are saved has no part in a step.
    mine["zero_optimization"].pop("stage3_gather_16bit_weights_on_model_save", None)
    accumulated = {"gradient_accumulation_steps": 4, "train_batch_size": 4 * mine["train_batch_size"]}
    assert engine_config(stage, two_process.WORLD_SIZE) == mine | accumulated


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_pair_of_turns(strategy):
    comparison = two_process.compare(strategy, rounds=1, steps=1)
    assert comparison.case == strategy
    (measured,) = comparison.rounds
    assert measured.keys() == {"by_hand", "ours"}
    assert min(measured.values()) > 0


def test_every_process_reads_its_own_samples():
    (first, labels), (second, _) = (next(job.micro_batches(rank, 2)) for rank in (0, 1))
    assert first.shape == labels.shape == (job.MICRO_BATCH, job.BLOCK)
    assert (first[:, 1:] == labels[:, :-1]).all()
    assert not (first == second).all(dim=1).any()
