"""GPUs and networks by name, the operations of a micro-batch, and what `--gpu` and `--network` print."""

import argparse
import json

import pytest
from test_comparison import MODEL, RECIPE

from largebatch.config import load_config
from largebatch.plan.model_shape import Strategy
from largebatch.plan.step_time import Fabric, Hardware
from largebatch.tools.command_line import main
from largebatch.tools.plan.comparison import compare
from largebatch.tools.plan.gpu_memory import GIB
from largebatch.tools.plan.hardware import GPUS, NETWORKS, gpu, network
from largebatch.tools.plan.recipe_model import activation_bytes, micro_batch_flops, recipe_model
from largebatch.tools.plan.table import table
from paths import DIGITS, LLAMA, PYDOC, ROOT

# The products of MODEL's weights with one sample of 2^12 tokens, and twice as many to go back.
BOTH = [Strategy("ddp"), Strategy("fsdp")]
FLOPS = (2 * MODEL.elements * 2**12, 4 * MODEL.elements * 2**12)


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("400G/gpu", 50),
        ("3200G/node", 50),
        (" 3200g/NODE ", 50),
        ("ib-ndr", 50),
        ("efa-p4d", 6.25),
        ("12.5G/gpu", 1.5625),
    ],
)
def test_the_share_of_a_gpu(text, gigabytes):
    assert network(text).of_a_gpu(8) == gigabytes * 1e9


@pytest.mark.parametrize("text", ["400", "400G", "400Gb/s", "0G/gpu", "-4G/gpu", "400G/rack", "infiniband"])
def test_a_speed_without_its_owner_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="such as 400G/gpu or 3200G/node, or one of ib-hdr, "):
        network(text)


def test_short_names_of_gpus():
    assert gpu("H100") == gpu("h100-80gb") == GPUS["h100-80gb"]
    assert gpu("a100").memory_gib > 79
    assert all(network(name).bandwidth > 0 for name in NETWORKS)


def counted(recipe, *words):
    config = load_config(recipe, words)
    model, example_batch = recipe_model(config, recipe)
    activation_bytes(model, config, example_batch)
    return config, model, micro_batch_flops(model, config, example_batch)


def test_operations_of_a_transformer_by_hand():
    """6 for each weight of a product and token; attention's scores and sums, 12 x width x tokens a layer and token."""
    config, model, (forward, backward) = counted(LLAMA)
    products = sum(each.numel() for name, each in model.named_parameters() if each.ndim == 2 and "embed" not in name)
    if config.model.tie_embeddings:
        products += config.model.vocab_size * config.model.hidden_size
    tokens = config.batch.micro_batch_size * config.data.block_size
    attention = 12 * config.model.num_layers * config.model.hidden_size * config.data.block_size
    assert forward + backward == pytest.approx(tokens * (6 * products + attention), rel=0.01)


def test_operations_that_are_done_again():
    _, _, (forward, backward) = counted(PYDOC)
    _, _, (forward_again, backward_again) = counted(PYDOC, "--compute.activation_checkpointing=true")
    assert forward_again == forward
    # The blocks' forward pass, which is most of the whole, and not the output layer's.
    assert 0.3 * forward < backward_again - backward < forward


def test_operations_of_convolutions():
    """The first layer needs no gradient of the images, so that the backward pass has nearly twice the forward's."""
    _, _, (forward, backward) = counted(DIGITS)
    assert 1.5 * forward < backward < 2 * forward


def compared(gpu_memory=80 * GIB, net=50e9, flops=FLOPS, strategies=BOTH):
    hardware = Hardware(989e12, Fabric(8, 450e9, net))
    return compare("recipe", RECIPE, MODEL, strategies, [32], GIB, gpu_memory, {}, hardware, flops)


def test_the_fastest_that_fits_is_suggested():
    # Computing takes nearly all of the time, so both are about as fast; ddp sends less.
    (column,) = compared(flops=(2**60, 2**61))["world_sizes"]
    assert column["suggested"] == "ddp"
    assert "fsdp is faster, but by no more than the estimate's error, and sends more between nodes" in column["reason"]
    # Of 13 GiB for ddp, 12 are free; of what fits, the fastest even though it sends more.
    hsdp, fsdp = Strategy("fsdp", shard_size=8), Strategy("fsdp")
    (alone,) = compared(16 * GIB, net=1e9, strategies=[Strategy("ddp"), fsdp])["world_sizes"]
    assert (alone["suggested"], alone["strategies"]["ddp"]["fits"]) == ("fsdp", False)
    assert "s per step, the fastest of those that fit; ddp needs about 13" in alone["reason"]
    (grouped,) = compared(16 * GIB, net=1e9, strategies=[Strategy("ddp"), hsdp])["world_sizes"]
    assert sum(grouped["strategies"]["fsdp"]["step_seconds"].values()) < sum(
        alone["strategies"]["fsdp"]["step_seconds"].values()
    )


def test_bytes_within_and_between_nodes_by_hand():
    """3 GiB of gradients all-reduced by 32 GPUs: 2 x 31/32, of which each node of 8 sends as much as one GPU does."""
    (column,) = compared()["world_sizes"]
    ddp = column["strategies"]["ddp"]
    sent = 2 * 3 * GIB * 31 // 32
    assert ddp["sent_bytes_per_step"] == {"least": sent, "most": sent}
    assert ddp["sent_between_nodes_bytes_per_step"] == {"least": sent // 8, "most": sent // 8}
    lines = [" ".join(line.split()) for line in table(compared(), RECIPE).splitlines()]
    within, between = (
        next(index for index, line in enumerate(lines) if f"sent {where}" in line) for where in ("within", "between")
    )
    assert lines[within + 1] == "ddp 5.09"
    assert lines[between + 1] == "ddp 0.73"
    low, high = ddp["efficiency"].values()
    assert f"ddp {low:.2f} to {high:.2f}" in lines


def test_every_assumption_is_printed():
    text = " ".join(table(compared(), RECIPE).split())
    assert "0.3 to 0.5 of the data sheet's 989 TFLOP/s (MFU), 450 GB/s within nodes of 8 and 50 GB/s per GPU" in text
    assert "0.4 to 1 of the shorter of computation and communication not hidden" in text
    assert max(map(len, table(compared(), RECIPE).splitlines())) <= 110


def test_without_operations_the_choice_is_as_without_a_network():
    (column,) = compared(flops=None)["world_sizes"]
    assert column["suggested"] == "ddp"
    assert "it sends the least of those that fit" in column["reason"]
    assert "The time of a step is not estimated" in table(compared(flops=None), RECIPE)


@pytest.mark.slow
def test_the_command_prints_the_same_as_json(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = ["plan", "gpt_pydoc", "--world-sizes=2,4", "--gpu=h100", "--network=ib-ndr", "--gpus-per-node=2"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "sent between nodes per step" in text
    assert max(map(len, text.splitlines())) <= 110
    assert main([*words, "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["gpu_memory_bytes"] == round(79.1 * GIB)
    assert comparison["hardware"]["fabric"]["gpus_per_node"] == 2
    assert comparison["hardware"]["fabric"]["net_bandwidth"] == 50e9
    assert comparison["world_sizes"][1]["strategies"]["hsdp"]["processes_of_a_copy"] == 2
    two, four = (column["strategies"]["ddp"] for column in comparison["world_sizes"])
    assert two["sent_between_nodes_bytes_per_step"]["most"] == 0
    assert four["sent_between_nodes_bytes_per_step"]["most"] == four["sent_bytes_per_step"]["most"] // 2
    assert 0 < four["efficiency"]["least"] < four["efficiency"]["most"] < 1
