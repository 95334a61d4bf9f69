"""Recipes on several numbers of processes side by side, against numbers worked out by hand."""

import pytest

from largebatch.config import load_config
from largebatch.estimate.comparison import Workload, _best, compare_strategies
from largebatch.estimate.memory import MAX_FRACTION_OF_GPU, when_reduced
from largebatch.estimate.model_shape import ModelShape, ParameterShape, Strategy, ZeroSettings
from largebatch.estimate.step_time import Fabric, Hardware
from largebatch.estimate.table import table
from largebatch.estimate.traffic import TrafficCase, traffic_of_a_step
from largebatch.plan import resolve
from largebatch.system.hardware import GIB
from paths import CLIP_B32, PYDOC

# A block of 2^28 weights, one of as many, and the rest: 3 GiB of fp32 weights.
BLOCK = 2**28
MODEL = ModelShape(
    tuple(ParameterShape(name, (2**14, 2**14), 0, unit) for unit, name in enumerate(("block.0", "block.1", "head"))),
    gathered_units=frozenset({2}),
    buffer_bytes=0,
    element_bytes=4,
)
STRATEGIES = [
    Strategy("ddp"),
    Strategy("fsdp"),
    *(Strategy(f"zero{stage}", ZeroSettings(stage, reduce_bucket_size=BLOCK)) for stage in (1, 2, 3)),
]
BATCH = ["--batch.micro_batch_size=1", "--batch.global_batch_size=32"]
RECIPE = load_config(PYDOC, BATCH)


def comparison(world_sizes, activations=GIB, gpu_memory=80 * GIB, config=RECIPE, strategies=STRATEGIES):
    return compare_strategies("recipe", config, Workload(MODEL, activations), strategies, world_sizes, gpu_memory)


def volume(traffic):
    return sum(each.volume for each in traffic)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_single_process_sends_nothing(strategy):
    assert not traffic_of_a_step(TrafficCase(MODEL, strategy, 1, 1))


def test_zero3_gathers_a_large_model_in_each_pass_at_most():
    """2^28 x 3 weights: 2 passes are more than the 1e9 elements that DeepSpeed looks ahead."""
    traffic = traffic_of_a_step(TrafficCase(MODEL, STRATEGIES[-1], 4, 1))
    assert volume(traffic) == 3 * 3 * GIB
    recomputed = traffic_of_a_step(TrafficCase(MODEL, STRATEGIES[-1], 4, 1, recomputes=True))
    assert volume(recomputed) == 4 * 3 * GIB


@pytest.mark.parametrize(
    ("memory", "activations", "suggested"),
    [
        # 12 of states and 1 of activations, or none that are known.
        (13, 1, "ddp"),
        (12.9, 1, "zero1"),
        (12, None, "ddp"),
        # zero1: weights 3, 1/32 of 3 masters and 6 moments, gradients of 2 parameters, and a bucket of 1. The copy of
        # gradients, 3/32, is made without activations.
        (7.2813, 1, "zero1"),
        # fsdp: 12/32, and 3 gathered and 2 of gradients; zero3 would need less than that, too, and may send more.
        (7.281, 1, "fsdp"),
        (6.375, 1, "fsdp"),
        (6.374, 1, None),
    ],
)
def test_the_first_that_fits_is_suggested(memory, activations, suggested):
    given = activations and activations * GIB
    # 4 GiB are kept back.
    (column,) = comparison([32], given, round((memory + 4) * GIB))["world_sizes"]
    assert column["suggested"] == suggested, column
    assert f"{memory:.4g} of {memory + 4:.4g} GiB" in column["reason"]
    if activations is None:
        assert "not estimated" in column["reason"]


def test_what_does_not_divide_leaves_the_other_columns():
    compared = comparison([3, 4])
    three, four = compared["world_sizes"]
    assert list(four["strategies"]) == [strategy.name for strategy in STRATEGIES]
    assert three == {"world_size": 3, "problem": three["problem"]}
    assert "nearest: 30, 33" in three["problem"]
    assert "3 processes: batch: global_batch_size 32" in table(compared, RECIPE)


def test_rows_by_hand():
    lines = table(comparison([4, 32], gpu_memory=14 * GIB), RECIPE).splitlines()
    assert max(map(len, lines)) <= 110
    assert next(line for line in lines if line.startswith("4 processes")).startswith(
        "4 processes, accumulation 8: fsdp; "
    )
    rows = [line.split() for line in lines]
    assert rows.count(["states", "transient", "total", "fits", "sent", "reduced", "shards"]) == 2
    # On 4 processes gradients are accumulated, in DDP's buckets.
    assert ["ddp", "12.0", "0", "13.0", "no", "4.50", "last", "1"] in rows
    # On 4 processes fsdp reduces with each: 12/4 of states, 3 gathered, 2 of gradients, 1 of activations.
    assert [row[1:5] for row in rows if row[:1] == ["fsdp"] and len(row) == 8] == [
        ["3.00", "5.00", "9.00", "yes"],
        ["0.38", "5.00", "6.38", "yes"],
    ]


@pytest.mark.parametrize(
    ("memory", "asked", "policy"),
    [
        # 12/4 of states; 3 of whole gradients instead of 3/4, 3 gathered, 2 of gradients on their way.
        (10.25 / MAX_FRACTION_OF_GPU + 0.01, "auto", "last_micro_batch"),
        (10.25 / MAX_FRACTION_OF_GPU - 0.01, "auto", "each_micro_batch"),
        (None, "auto", "last_micro_batch"),
        (1, "last_micro_batch", "last_micro_batch"),
        (None, "each_micro_batch", "each_micro_batch"),
    ],
)
def test_when_fsdp_reduces(memory, asked, policy):
    config = load_config(PYDOC, [*BATCH, "--compute.reduce_gradients", asked])
    gpu_memory = memory and round(memory * GIB)
    assert when_reduced(MODEL, Strategy("fsdp"), resolve(config, 4), gpu_memory) == policy
    if gpu_memory is None:
        return
    (column,) = comparison([4], None, gpu_memory, config)["world_sizes"]
    assert column["strategies"]["fsdp"]["gradients_reduced"] == policy
    # Whole gradients, or those of the last micro-batch only.
    assert ("accumulated gradients" in column["strategies"]["fsdp"]["transient_bytes_estimate"]) == (policy[0] == "l")


def test_hsdp_is_counted_in_groups():
    """In units of Ψ = 3 GiB, 8 micro-batches of 4 processes: 8 x (1 + 2/3) gathered and 8 reduced in a group of 2,
    where each sends half, and 1/2 all-reduced over 2 replicas. On 1 and 3 processes there are no such groups."""
    strategies = [Strategy("hsdp", shard_size=2)]
    compared = comparison([4, 32], None, strategies=strategies)
    four, many = (column["strategies"]["hsdp"] for column in compared["world_sizes"])
    assert four["sent_bytes_per_step"] == 3 * GIB * (8 * 5 / 3 + 8 + 1) / 2
    assert (four["gradients_reduced"], four["shard_group_size"]) == ("each_micro_batch", 2)
    assert many["shard_group_size"] == 2
    odd = load_config(PYDOC, ["--batch.micro_batch_size=1", "--batch.global_batch_size=30"])
    columns = comparison([1, 2, 3], None, config=odd, strategies=strategies)["world_sizes"]
    assert [[*column["strategies"]] for column in columns] == [[], ["hsdp"], []]


def test_a_batch_that_grows_is_counted_at_its_largest():
    sizes = '[{"from": {"steps": 0}, "size": 32}, {"from": {"steps": 10}, "size": 64}]'
    grows = load_config(PYDOC, ["--batch.micro_batch_size=1", "--batch.global_batch_size", sizes])
    text = " ".join(table(comparison([4], config=grows), grows).split())
    assert "accumulation 16" in text
    assert "If the batch size changes, all numbers are of the largest." in text


def test_of_equally_fast_strategies_the_one_that_sends_least_between_nodes_is_best():
    """Before what shards less: the network between nodes may be slower than its data sheet."""

    def option(seconds, between):
        numbers = {"least": seconds, "most": seconds}
        return {"step_seconds": numbers, "sent_between_nodes_bytes_per_step": between, "sent_bytes_per_step": 9}

    assert _best({"ddp": option(1, 5), "fsdp": option(1.02, 4), "zero1": option(1.04, 3)}) == "fsdp"
    assert _best({"fsdp": option(1, 5), "ddp": option(1.02, 5)}) == "ddp"


def test_a_loss_over_the_whole_batch():
    """CLIP's batch of 32,768: 1,024 numbers a sample are gathered, and their gradient is reduced; by hand."""
    config = load_config(CLIP_B32)
    workload = Workload(MODEL, GIB, flops=(10**12, 2 * 10**12))
    hardware = Hardware(1e14, 1e14, Fabric(8, 3e11, 2.5e10))
    found = compare_strategies("clip", config, workload, [Strategy("ddp")], [64, 128], 80 * GIB, hardware)
    twice, once = (column["strategies"]["ddp"] for column in found["world_sizes"])
    features = 32768 * 1024 * 4
    # A tile has 2^22 pairs of samples; 20 numbers of each.
    assert once["transient_bytes_estimate"] == {
        "features of the global batch": 3 * features,
        "pairs of samples": 80 * 2**22,
    }
    assert once["total_bytes_estimate"] - once["model_state_bytes"]["total"] == GIB + 3 * features + 80 * 2**22
    # With several micro-batches, none is held meanwhile, so that the peak is that of a micro-batch.
    assert twice["total_bytes_estimate"] - twice["model_state_bytes"]["total"] == GIB
    gradients = 2 * 3 * GIB * 127 // 128
    assert once["sent_bytes_per_step"] == pytest.approx(gradients + 2 * features * 127 / 128, rel=1e-6)
    # Four forward passes and two backward, or one of each, on 10^14 operations per second at an MFU of 0.5.
    assert twice["step_seconds"]["least"] > (2 * 2 * 10**12 + 2 * 2 * 10**12) / 5e13
    assert once["step_seconds"]["least"] < twice["step_seconds"]["least"] / 2
