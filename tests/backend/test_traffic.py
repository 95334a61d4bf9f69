"""Bytes per optimizer step, counted at the collectives, are those of `estimate.traffic`, to the byte.

What strategies come to, and why, is said there. As shipped, and with other settings in DeepSpeed's
"zero_optimization": "reductions" to each owner, and models that are "large" to ZeRO-3.
"""

import json
from collections import Counter
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import tasks
from collectives import Recorder, bytes_sent_in, replay
from jobs import run_job, write_zero_config
from largebatch.estimate.model_shape import Strategy, ZeroSettings
from largebatch.estimate.traffic import traffic_of_a_step
from paths import LLAMA, PYDOC

pytestmark = pytest.mark.slow

# Sizes that neither 2 nor 4 processes divide.
MODEL = ("--model.num_layers=1", "--model.hidden_size=34", "--model.num_heads=2", "--data.block_size=17")
# Its output layer, a unit of its own, is the first of a backward pass.
UNTIED = (*MODEL, "--model.num_heads=1", "--model.num_kv_heads=1", "--model.intermediate_size=67")
MICRO_BATCH_SIZE = 2
ACCUMULATION = [1, 1, 1, 1, 3, 3]  # of each step; the first and the last are logged
COUNTED = [2, 3, 4]  # ZeRO-3 learns in which order parameters are used from the first two passes

REDUCTIONS = {"use_multi_rank_bucket_allreduce": False}
# What a model is to ZeRO-3 that is larger than its thresholds.
LARGE = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
NOT_SMALL = {"stage3_param_persistence_threshold": 0}


# Strategies as shipped, or with other settings in DeepSpeed's "zero_optimization".
ENGINES = {
    "ddp": ("ddp", None),
    "fsdp": ("fsdp", None),
    "fsdp reducing each": ("fsdp", None),
    "fsdp without clipping": ("fsdp", None),
    "fsdp with an output layer of its own": ("fsdp", None),
    "fsdp in bf16": ("fsdp", None),
    "zero1": ("zero1", None),
    "zero1 reductions": ("zero1", REDUCTIONS),
    "zero2": ("zero2", None),
    "zero2 reductions": ("zero2", REDUCTIONS),
    "zero3": ("zero3", None),
    "zero3 not small": ("zero3", NOT_SMALL),
    "zero3 large": ("zero3", LARGE),
    "fsdp recomputed": ("fsdp", None),
    "zero3 large recomputed": ("zero3", LARGE),
}
JOBS = [(name, 2) for name in ENGINES] + [(name, 4) for name in ("fsdp", "fsdp in bf16", "zero2", "zero3 large")]
# Two replicas, each of the rest of the processes.
REPLICAS = 2
ENGINES |= {"hsdp": ("hsdp", None), "hsdp reducing the last": ("hsdp", None)}
JOBS += [("hsdp", 4), ("hsdp reducing the last", 4), ("hsdp", 8)]


def steps_of_a_run(run_dir, recipe, words):
    """The model's shape, each step's collectives, bytes on the sockets, and the losses."""
    from torch import distributed
    from torch.nn.functional import cross_entropy

    from largebatch.backend.model_shape import shape_of
    from largebatch.config import load_config

    CausalLMConfig = tasks.module("causal_lm", "config").Config
    text_sources = tasks.module("causal_lm", "data").sources
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions

    run = Run(load_config(recipe, words, CausalLMConfig), RunOptions(run_dir))
    train_set, _ = run.load(text_sources)
    model = run.build(tasks.build_model(recipe))
    shape = shape_of(model, run.plan)
    model, _ = run.prepare(model, build_optimizer(model, run.plan))
    steps, losses, sent = run.steps(train_set), [], {}

    def take_step():
        step = next(steps)
        for batch in step.micro_batches():
            logits = model(input_ids=batch["input_ids"]).logits
            loss = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="sum")
            losses.append(float(loss.detach()))
            step.backward(loss)
        run.update(step)

    def collectives_of_a_step():
        with Recorder() as recorder:
            take_step()
        return recorder.started

    started = [collectives_of_a_step() for _ in ACCUMULATION[:-2]]
    sent["step"] = bytes_sent_in(lambda: started.append(collectives_of_a_step()))
    sent["the same collectives"] = bytes_sent_in(partial(replay, started[-1]))
    sent["nothing"] = bytes_sent_in(lambda: None)
    group = distributed.group.WORLD._get_backend(torch.device("cpu"))
    with Recorder() as recorder:
        group.allreduce([torch.zeros(1)]).wait()
    assert not recorder.started
    sent["one that is not seen"] = bytes_sent_in(lambda: group.allreduce([torch.zeros(1)]).wait())
    return shape, started, sent, losses


@cache
def steps_by_rank(name, world_size):
    """The result of `steps_of_a_run` in each process of a job with one of ENGINES."""
    strategy, zero_settings = ENGINES[name]
    sizes = [MICRO_BATCH_SIZE * world_size * accumulation for accumulation in ACCUMULATION]
    grows = ACCUMULATION.index(3)
    phases = [{"from": {"steps": 0}, "size": sizes[0]}, {"from": {"steps": grows}, "size": sizes[grows]}]
    recipe, model = (LLAMA, UNTIED) if name == "fsdp with an output layer of its own" else (PYDOC, MODEL)
    words = (
        *model,
        f"--batch.micro_batch_size={MICRO_BATCH_SIZE}",
        f"--batch.global_batch_size={json.dumps(phases)}",
        f"--train.stop_after_steps={len(ACCUMULATION)}",
        "--logging.every=100",
        *(["--optimizer.clip_norm=null"] if name == "fsdp without clipping" else []),
        f"--precision={'bf16' if 'bf16' in name else 'fp32'}",
        f"--compute.activation_checkpointing={json.dumps('recomputed' in name)}",
        *(["--compute.reduce_gradients=each_micro_batch"] if name == "fsdp reducing each" else []),
        *(["--compute.reduce_gradients=last_micro_batch"] if name == "hsdp reducing the last" else []),
    )
    with TemporaryDirectory() as name_of_folder:
        folder, configs = Path(name_of_folder), None
        if zero_settings is not None:
            write_zero_config(folder, int(strategy[-1]), zero_settings)
            configs = folder
        return run_job(
            steps_of_a_run,
            folder / "run",
            recipe,
            words,
            strategy=strategy,
            world_size=world_size,
            accelerate_configs=configs,
            environment={"LARGEBATCH_SHARD_SIZE": str(world_size // REPLICAS)},
        )


def beside_the_volume(name, num_parameters):
    """The small collectives of a step, by `Collective.short`."""
    # A request to stop; nothing else is ours.
    vote = ("all_reduce", 1, torch.int64)
    if name in ("ddp", "fsdp without clipping"):
        return [vote]
    if name.startswith(("fsdp", "hsdp")):
        # Clipping sums one number a parameter.
        return [vote, ("all_reduce", num_parameters, torch.float32)]
    # For clipping, DeepSpeed sums the squares of its parts: of each parameter group.
    return [vote, *[("all_reduce", 1, torch.float64 if name.startswith("zero3") else torch.float32)] * 2]


@pytest.mark.parametrize(("name", "world_size"), JOBS)
def test_a_step_sends_what_the_theory_says(name, world_size):
    """And between log points nothing else but the vote on a stop and the gradient's norm, where it is clipped."""
    launched, settings = ENGINES[name]
    zero = ZeroSettings.of({"stage": int(launched[-1]), **(settings or {})}) if launched.startswith("zero") else None
    shard_size = world_size // REPLICAS if launched == "hsdp" else None
    reduces_each = name in ("fsdp reducing each", "hsdp")
    strategy = Strategy(launched, zero, shard_size=shard_size, reduces_each=reduces_each)
    recomputes = "recomputed" in name
    for rank, (shape, started, _, _) in enumerate(steps_by_rank(name, world_size)):
        num_parameters = len(shape.parameters)
        for step in COUNTED:
            counted = traffic_of_a_step(shape, strategy, world_size, ACCUMULATION[step], recomputes)
            small = [each for each in started[step] if each.elements <= num_parameters]
            large = [each for each in started[step] if each.elements > num_parameters]
            assert Counter(each.short for each in small) == Counter(beside_the_volume(name, num_parameters)), step
            # A unit with weights in fp32 and in bf16 is gathered as bytes.
            as_bytes = {torch.uint8} if "bf16" in name else set()
            assert {each.dtype for each in large if each.kind == "all_gather"} <= {torch.float32} | as_bytes
            assert {each.dtype for each in large if each.kind != "all_gather"} == {torch.float32}
            volume = volumes((each.ranks, each.volume) for each in large)
            least, most = (
                volumes((ranks_of(each.group, rank), each.volume) for each in collectives)
                for collectives in (counted.least, counted.most)
            )
            assert least.keys() == volume.keys() == most.keys()
            assert all(least[ranks] <= volume[ranks] <= most[ranks] for ranks in volume), (step, large)
            # What is computed again uses some parameters once more.
            assert least == most or name == "zero3 large recomputed"


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


@pytest.mark.parametrize(("name", "world_size"), JOBS)
def test_no_collective_escapes_the_count(name, world_size):
    """A step's bytes on the sockets are those of the collectives that were counted in it, made again, on each process.

    A single number that is reduced by a way around what is counted would be seen.
    """
    for _, started, sent, _ in steps_by_rank(name, world_size):
        assert len(started[-1]) > 1
        assert sent["step"] == sent["the same collectives"]
        assert sent["one that is not seen"] > sent["nothing"] > 0


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_deepspeeds_ways_of_reducing_train_alike(stage):
    losses = [[result[-1] for result in steps_by_rank(name, 2)] for name in (stage, f"{stage} reductions")]
    assert losses[0] == losses[1]
    assert len(losses[0][0]) == sum(ACCUMULATION[:-1])
