"""What batches of other frameworks are, by their documentation and by hand."""

import pytest

from largebatch.batch.scaling import scaling_factor
from largebatch.errors import ConfigError, UserError
from largebatch.tools.effective_batch.other_frameworks import FRAMEWORKS, OtherBatch, recipe_batch


def test_64_shared_by_2_nodes_of_4_gpus_is_8_per_process():
    there = OtherBatch("ddp", 64, devices=4, nodes=2, split_batches=True)
    assert (there.per_process, there.global_batch_size) == (8, 64)


@pytest.mark.parametrize("framework", ["ddp", "ddp_spawn", "ddp_sharded", "fsdp", "lightning", "horovod"])
def test_7_on_8_devices_is_56_and_on_10_nodes_560(framework):
    assert OtherBatch(framework, 7, devices=8).global_batch_size == 56
    assert OtherBatch(framework, 7, devices=8, nodes=10).global_batch_size == 560


def test_7_on_8_devices_under_data_parallel_is_7():
    there = OtherBatch("dp", 7, devices=8)
    assert there.global_batch_size == 7
    assert there.per_device == [1, 1, 1, 1, 1, 1, 1, 0]


def test_256_on_two_nodes_is_512_and_twice_or_root_two_times_the_learning_rate_at_1024():
    there = OtherBatch("ddp", 256, nodes=2)
    assert there.global_batch_size == 512
    assert scaling_factor("linear", 1024, there.global_batch_size) == 2
    assert scaling_factor("sqrt", 1024, there.global_batch_size) == pytest.approx(1.41421356)


def test_accumulation_multiplies():
    assert OtherBatch("hf-trainer", 4, devices=8, nodes=2, accumulation=3).global_batch_size == 192
    assert OtherBatch("ddp", 64, devices=8, accumulation=3, split_batches=True).global_batch_size == 192


def test_parameter_server():
    """Asynchronous workers do not make one larger batch; synchronous ones do (Chen et al. 2016, section 3)."""
    assert OtherBatch("parameter-server", 32, devices=8).global_batch_size == 32
    assert OtherBatch("parameter-server", 32, devices=8, gradients="average").global_batch_size == 256


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradient_factor_is_what_sums_over_samples_give(framework, loss, accumulation):
    """All samples have the gradient 1, so that of the mean over the global batch is 1 too."""
    processes, batch_size = (1 if framework == "dp" else 4), 6
    for gradients in FRAMEWORKS[framework].gradients:
        there = OtherBatch(framework, batch_size, 4, 1, accumulation, loss=loss, gradients=gradients)
        backward = {"mean": 1.0, "sum": float(batch_size)}[loss] / accumulation
        of_a_process = sum(backward for _ in range(accumulation))
        combined = {"separate": 1, "average": 1, "sum": processes}[gradients] * of_a_process
        assert there.gradient_factor == pytest.approx(combined)


def test_the_recipe_has_the_same_batch_on_as_many_devices():
    here = recipe_batch(OtherBatch("ddp", 32, devices=8, accumulation=2))
    assert (here.global_batch_size, here.micro_batch_size, here.world_size, here.accumulation) == (512, 32, 8, 2)
    here = recipe_batch(OtherBatch("dp", 64, devices=8))
    assert (here.global_batch_size, here.micro_batch_size, here.world_size, here.accumulation) == (64, 8, 8, 1)
    here = recipe_batch(OtherBatch("parameter-server", 32, devices=8))
    assert (here.global_batch_size, here.micro_batch_size, here.world_size, here.accumulation) == (32, 32, 1, 1)


def test_shares_of_several_sizes_become_one_process():
    here = recipe_batch(OtherBatch("dp", 10, devices=4))
    assert (here.global_batch_size, here.micro_batch_size, here.world_size, here.accumulation) == (10, 10, 1, 1)


def test_another_recipe_batch():
    here = recipe_batch(OtherBatch("ddp", 32, devices=8), 1024, 16, 4)
    assert (here.global_batch_size, here.micro_batch_size, here.world_size, here.accumulation) == (1024, 16, 4, 16)


def test_another_batch_that_does_not_divide_is_refused():
    with pytest.raises(
        ConfigError, match=r"1000 is not a multiple .* 32 x 8 = 256; nearest: 768, 1024; .* to 25 or 125"
    ):
        recipe_batch(OtherBatch("ddp", 32, devices=8), 1000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"framework": "ddp", "batch_size": 30, "devices": 8, "split_batches": True}, "nearest: 24, 32"),
        ({"framework": "ddp", "batch_size": 3, "devices": 8, "split_batches": True}, "nearest: 8; or"),
        ({"framework": "dp", "batch_size": 8, "nodes": 2}, "use --from ddp, or --nodes 1"),
        ({"framework": "dp", "batch_size": 8, "split_batches": True}, "always splits its batch; remove it"),
        ({"framework": "ddp", "batch_size": 8, "gradients": "sum"}, "write --gradients average, or remove it"),
    ],
)
def test_refused_with_what_to_write(arguments, words):
    with pytest.raises(UserError, match=words):
        OtherBatch(**arguments)
