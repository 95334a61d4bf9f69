"""Bytes per optimizer step, counted at the collectives, are those of `estimate.traffic`, to the byte."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from collectives import Recorder
from jobs import run_job, write_zero_config
from largebatch.estimate.model_shape import Strategy, ZeroSettings
from largebatch.estimate.traffic import TrafficCase, traffic_of_a_step
from paths import LLAMA, PYDOC

pytestmark = pytest.mark.slow

# Sizes that neither 2 nor 4 processes divide.
MODEL = ("--model.num_layers=1", "--model.hidden_size=34", "--model.num_heads=2", "--data.block_size=17")
# Its output layer, a unit of its own, is the first of a backward pass.
UNTIED = (*MODEL, "--model.num_heads=1", "--model.num_kv_heads=1", "--model.intermediate_size=67")
MICRO_BATCH_SIZE = 2
ACCUMULATION = [1, 1, 1, 1, 3, 3]  # of each step; the first and the last are logged
COUNTED = [2, 3, 4]  # ZeRO-3 learns in which order parameters are used from the first two passes
REPLICAS = 2
# What a model is to ZeRO-3 that is larger than its thresholds.
LARGE = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
LAST = "--compute.reduce_gradients=last_micro_batch"
RECOMPUTE = "--compute.activation_checkpointing=full"


class Case(NamedTuple):
    """A strategy with overrides of the recipe, and settings in DeepSpeed's "zero_optimization"."""

    strategy: str
    world_size: int
    words: tuple[str, ...] = ()
    zero: dict | None = None
    recipe: Path = PYDOC


CASES = [
    Case("ddp", 2),
    Case("fsdp", 2, (*UNTIED, "--precision=bf16"), recipe=LLAMA),
    Case("fsdp", 2, ("--optimizer.clip_norm=null", RECOMPUTE)),
    Case("hsdp", 4),
    Case("hsdp", 4, (LAST,)),
    Case("zero1", 2),
    # Each part is reduced to its owner.
    Case("zero2", 2, zero={"use_multi_rank_bucket_allreduce": False}),
    Case("zero3", 2, (RECOMPUTE,), LARGE),
    Case("zero3", 3),
]


def steps_of_a_run(run_dir, recipe, words):
    """The model's shape, and each step's collectives."""
    from stepping import prepared, take

    run, shape, model, train_set = prepared(recipe, run_dir, *words)
    steps = run.steps(train_set)
    started = []
    for _ in ACCUMULATION[:-1]:
        with Recorder() as recorder:
            take(next(steps), run, model)
        started.append(recorder.started)
    return shape, started


def steps_by_rank(case, folder):
    """The result of `steps_of_a_run` in each process of a job."""
    sizes = [MICRO_BATCH_SIZE * case.world_size * accumulation for accumulation in ACCUMULATION]
    grows = ACCUMULATION.index(3)
    phases = [{"from": {"steps": 0}, "size": sizes[0]}, {"from": {"steps": grows}, "size": sizes[grows]}]
    words = (
        *MODEL,
        f"--batch.micro_batch_size={MICRO_BATCH_SIZE}",
        f"--batch.global_batch_size={json.dumps(phases)}",
        f"--train.stop_after_steps={len(ACCUMULATION)}",
        "--logging.every=100",
        *case.words,
    )
    if case.zero is not None:
        write_zero_config(folder, int(case.strategy[-1]), case.zero)
    return run_job(
        steps_of_a_run,
        folder / "run",
        case.recipe,
        words,
        strategy=case.strategy,
        world_size=case.world_size,
        accelerate_configs=None if case.zero is None else folder,
        environment={"LARGEBATCH_SHARD_SIZE": str(case.world_size // REPLICAS)},
    )


def small_collectives(case, num_parameters):
    """The collectives of a step besides those of weights and gradients, by `Collective.short`."""
    # A request to stop; nothing else is ours.
    vote = ("all_reduce", 1, torch.int64)
    if case.strategy == "ddp" or "--optimizer.clip_norm=null" in case.words:
        return [vote]
    if case.strategy in ("fsdp", "hsdp"):
        # Clipping sums one number a parameter.
        return [vote, ("all_reduce", num_parameters, torch.float32)]
    # For clipping, DeepSpeed sums the squares of its parts: of each parameter group.
    return [vote, *[("all_reduce", 1, torch.float64 if case.strategy == "zero3" else torch.float32)] * 2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.strategy}-{case.world_size}")
def test_a_step_sends_what_the_theory_says(case, tmp_path):
    """And between log points nothing else but the vote on a stop and the gradient's norm, where it is clipped."""
    stage = case.strategy[-1]
    zero = ZeroSettings.of({"stage": int(stage), **(case.zero or {})}) if stage.isdecimal() else None
    shard_size = case.world_size // REPLICAS if case.strategy == "hsdp" else None
    reduces_each = case.strategy == "hsdp" and LAST not in case.words
    strategy = Strategy(case.strategy, zero, shard_size=shard_size, reduces_each=reduces_each)
    for rank, (shape, started) in enumerate(steps_by_rank(case, tmp_path)):
        num_parameters = len(shape.parameters)
        for step in COUNTED:
            recomputes = RECOMPUTE in case.words
            counted = traffic_of_a_step(TrafficCase(shape, strategy, case.world_size, ACCUMULATION[step], recomputes))
            small = [each for each in started[step] if each.elements <= num_parameters]
            large = [each for each in started[step] if each.elements > num_parameters]
            assert Counter(each.short for each in small) == Counter(small_collectives(case, num_parameters)), step
            # A unit with weights in fp32 and in bf16 is gathered as bytes.
            as_bytes = {torch.uint8} if "--precision=bf16" in case.words else set()
            assert {each.dtype for each in large if each.kind == "all_gather"} <= {torch.float32} | as_bytes
            assert {each.dtype for each in large if each.kind != "all_gather"} == {torch.float32}
            volume = volumes((each.ranks, each.volume) for each in large)
            expected = volumes((ranks_of(each.group, rank), each.volume) for each in counted)
            if case.strategy == "zero3" and RECOMPUTE in case.words:
                # What is computed again uses some parameters once more, and others are still gathered.
                assert volume.keys() == expected.keys()
                assert all(volume[ranks] <= expected[ranks] for ranks in volume)
            else:
                assert volume == expected, (step, large)


def ranks_of(group, rank):
    """The processes of a group with which this one communicates."""
    span = group.size * group.stride
    first = rank // span * span + rank % group.stride
    return tuple(range(first, first + span, group.stride))


def volumes(collectives):
    """The bytes of each group of processes."""
    total = Counter()
    for ranks, volume in collectives:
        total[ranks] += volume
    return total
