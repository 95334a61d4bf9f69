"""GPUs and networks by name, the operations of a micro-batch, and what `--gpu` and `--network` print."""

import json
import re
from argparse import ArgumentTypeError

import pytest

from estimate.test_comparison import MODEL, RECIPE
from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.estimate.comparison import Workload, compare_strategies
from largebatch.estimate.model_shape import Strategy
from largebatch.estimate.recipe_model import activation_bytes, micro_batch_flops, recipe_model
from largebatch.estimate.step_time import Fabric, Hardware, step_time
from largebatch.estimate.table import table
from largebatch.model.parts import convolves
from largebatch.plan import resolve
from largebatch.system.hardware import GIB, find_gpu
from largebatch.tools.plan import GPU_OF_NAME, network
from paths import DIGITS, LLAMA, PYDOC, ROOT, VIT_DIGITS

# The products of MODEL's weights with one sample of 2^12 tokens, and twice as many to go back.
BOTH = [Strategy("ddp"), Strategy("fsdp")]
FLOPS = (2 * MODEL.elements * 2**12, 4 * MODEL.elements * 2**12)


def test_the_bandwidth_of_each_gpu():
    assert network("12.5G/gpu") == 1.5625e9
    for text in ("400", "400G", "400Gb/s", "0G/gpu", "-4G/gpu", "3200G/node", "infiniband"):
        with pytest.raises(ArgumentTypeError, match="write 400G/gpu"):
            network(text)


@pytest.mark.parametrize(
    ("name", "device", "precision", "peak"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("h100", "NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("h100-nvl", "NVIDIA H100 NVL", "bf16", 835.0),
        ("h200-nvl", "NVIDIA H200 NVL", "fp32", 60.0),
        ("l40s", "NVIDIA L40S", "fp64", None),
    ],
)
def test_a_gpu_by_the_name_of_its_data_sheet_and_by_torchs(name, device, precision, peak):
    assert find_gpu(device) == GPU_OF_NAME[name]
    assert find_gpu(device).peak_tflops(precision) == peak


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "the CPU",
        "Tesla V100-SXM2-32GB",
    ],
)
def test_a_gpu_without_a_data_sheet(device):
    assert find_gpu(device) is None


def counted(recipe, *words):
    """The config of a recipe and its model, the bytes that are kept for the backward pass, and its operations."""
    config = load_config(recipe, words)
    model = recipe_model(config)
    return config, model, activation_bytes(model, config), micro_batch_flops(model, config)


def test_operations_of_a_transformer_by_hand():
    """6 for each weight of a product and token; attention's scores and sums, 12 x width x tokens a layer and token."""
    config, model, _, operations = counted(LLAMA)
    products = sum(each.numel() for name, each in model.named_parameters() if each.ndim == 2 and "embed" not in name)
    tokens = config.batch.micro_batch_size * config.data.block_size
    attention = 12 * config.model.num_layers * config.model.hidden_size * config.data.block_size
    assert sum(operations) == pytest.approx(tokens * (6 * products + attention), rel=0.01)


def test_operations_that_are_done_again():
    *_, (forward, backward) = counted(PYDOC)
    *_, (forward_again, backward_again) = counted(PYDOC, "--compute.activation_checkpointing=full")
    assert forward_again == forward
    # The blocks' forward pass, which is most of the whole, and not the output layer's.
    assert 0.3 * forward < backward_again - backward < forward


def test_published_throughputs_of_convolutions():
    """Images per second in mixed precision of NVIDIA's PyTorch example (DeepLearningExamples, resnet50v1.5)."""
    config, _, kept, flops = counted(ROOT / "recipes/image_classification/resnet50_imagenet_32k.json")
    for memory_bandwidth, peak, published in (
        # Of a V100.
        (900e9, 125e12, 1200),
        (GPU_OF_NAME["a100"].memory_gb_per_s * 1e9, 312e12, 2470),
    ):
        hardware = Hardware(peak, peak, Fabric(8, 1, 1), memory_bandwidth)
        seconds = step_time([], flops, 1, hardware, kept)
        low, high = (config.batch.micro_batch_size / seconds[end] for end in ("most", "least"))
        assert 0.99 * low < published < 1.01 * high < 1.15 * low


@pytest.mark.parametrize(("recipe", "expected"), [(DIGITS, True), (PYDOC, False), (VIT_DIGITS, False)])
def test_networks_of_convolutions(recipe, expected):
    """GPT-2's layers are called Conv1D, and a ViT has one convolution."""
    model = recipe_model(load_config(recipe))
    assert convolves(model) == expected


def compared(gpu_memory=80 * GIB, net=50e9, flops=FLOPS, strategies=BOTH):
    hardware = Hardware(989e12, 989e12, Fabric(8, 450e9, net))
    return compare_strategies("recipe", RECIPE, Workload(MODEL, GIB, flops), strategies, [32], gpu_memory, hardware)


def test_the_fastest_that_fits_is_suggested():
    """Of 13 GiB for ddp, 12 are free; groups of 8 exchange less between nodes than all 32."""
    strategies = [Strategy("ddp"), Strategy("fsdp"), Strategy("hsdp", shard_size=8)]
    (column,) = compared(16 * GIB, net=1e9, strategies=strategies)["world_sizes"]
    assert column["suggested"] == "hsdp"
    assert not column["strategies"]["ddp"]["fits"]


def test_bytes_within_and_between_nodes_by_hand():
    """3 GiB of gradients all-reduced by 32 GPUs: 2 x 31/32, of which each node of 8 sends as much as one GPU does."""
    (column,) = compared()["world_sizes"]
    ddp = column["strategies"]["ddp"]
    sent = 2 * 3 * GIB * 31 // 32
    assert (ddp["sent_bytes_per_step"], ddp["sent_between_nodes_bytes_per_step"]) == (sent, sent // 8)
    (row,) = (" ".join(line.split()) for line in table(compared(), RECIPE).splitlines() if line.startswith("  ddp"))
    assert "yes 5.09 0.73 " in row


def test_the_whole_run_by_hand():
    """Samples of the run over those of a step, times its seconds."""
    comparison = compared()
    (column,) = comparison["world_sizes"]
    samples = resolve(RECIPE, 32).total_samples
    seconds = column["strategies"][column["suggested"]]["step_seconds"]
    hours = [samples / 32 * seconds[end] / 3600 for end in ("least", "most")]
    rates = [samples * RECIPE.tokens_processed_per_sample / (3600 * each) for each in reversed(hours)]
    (line,) = [line for line in table(comparison, RECIPE).splitlines() if "The whole run" in line]
    numbers = [float(each.replace(",", "")) for each in re.findall(r"[\d,]*\d\.?\d*", line)]
    assert numbers == pytest.approx([*hours, *(32 * each for each in hours), *rates], rel=0.05)


def test_without_operations_the_choice_is_as_without_a_network():
    (column,) = compared(flops=None)["world_sizes"]
    assert column["suggested"] == "ddp"
    assert "The time of a step is not estimated" in table(compared(flops=None), RECIPE)


@pytest.mark.slow
def test_the_command_takes_gpus_and_networks_by_name(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = ["plan", "gpt_pydoc", "--world-sizes=2,4", "--gpu=h100", "--network=400G/gpu", "--gpus-per-node=2"]
    assert main([*words, "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["gpu_memory_bytes"] == round(79.1 * GIB)
    assert comparison["hardware"]["fabric"]["gpus_per_node"] == 2
    assert comparison["hardware"]["fabric"]["net_bandwidth"] == 50e9
    assert comparison["world_sizes"][1]["strategies"]["hsdp"]["shard_group_size"] == 2
    two, four = (column["strategies"]["ddp"] for column in comparison["world_sizes"])
    assert two["sent_between_nodes_bytes_per_step"] == 0
    assert four["sent_between_nodes_bytes_per_step"] == four["sent_bytes_per_step"] // 2
