"""Synchronized BatchNorm against torch's own, in one process, on the micro-batches of all processes together."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import batch_norm_kernels
import tasks
from collectives import Recorder
from host_reads import HostReads
from jobs import JobFailed, run_job
from largebatch.backend.batch_norm import RunningStatistics
from largebatch.backend.sync_batch_norm import CpuSyncBatchNorm, CudaSyncBatchNorm, is_synchronized, synchronize
from paths import DIGITS, PYDOC
from reference import reference_digits
from test_strategies import assert_same, recorded

SYNC = "--model.sync_batch_norm=true"
# After some ten steps on micro-batches of 8, rounding errors decide on which side of zero single inputs of ReLU are: a
# plain loop in fp32 then differs from itself in fp64, too.
STEPS = 5
SHORT = f"--train.stop_after_steps={STEPS}"

# --- the layer --------------------------------------------------------------------------------------------------------

LAYERS = {
    "2d": lambda: nn.BatchNorm2d(3, dtype=torch.float64),
    "channels last": lambda: nn.BatchNorm2d(3, dtype=torch.float64),
    "1d": lambda: nn.BatchNorm1d(3, dtype=torch.float64, momentum=0.3, eps=1e-3),
    "no scale": lambda: nn.BatchNorm1d(3, affine=False, dtype=torch.float64),
    "no statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False, dtype=torch.float64),
}
# Where tensors are, which device layers are made for, and whether without waits.
CPU = ("cpu", "cpu", False)
TORCHS_ON_CPU, CUDA_ON_CPU = ("cpu", "cuda", False), ("cpu", "cuda", True)
GPU = [("cuda", "cuda", False), ("cuda", "cuda", True)] if torch.cuda.is_available() else []


def synchronize_for(place: tuple[str, str, bool], layer: nn.Module) -> nn.Module:
    """Make the layer one over all processes, which gloo lets share one GPU."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    device, made_for, without_waits = place
    if device != made_for:
        batch_norm_kernels.register()
    synchronize(layer, torch.device(made_for), without_waits)
    return layer.to(device)


def layer_and_parts(kind: str, world_size: int) -> tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]:
    """A layer, and for each process its inputs and what their outputs are weighted with in the loss."""
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    shape = (3, 4, 5) if isinstance(layer, nn.BatchNorm2d) else (3,)
    # Of different sizes, means and scales.
    parts = [torch.randn(2 + rank, *shape, dtype=torch.float64) * (1 + rank) + rank for rank in range(world_size)]
    weights = [torch.randn_like(part) for part in parts]
    if kind == "channels last":
        # Gradients are not laid out like this, because the loss's weights are not.
        parts = [part.contiguous(memory_format=torch.channels_last) for part in parts]
    return layer, parts, weights


def forward_and_backward(layer, inputs: torch.Tensor, weights: torch.Tensor) -> dict[str, np.ndarray]:
    """Two steps in training, so that running statistics move twice, and a look in evaluation mode."""
    results = {}
    for step in range(2):
        leaf = (inputs + step).requires_grad_()
        outputs = layer(leaf)
        ((outputs.contiguous() + 1).square() * weights).sum().backward()
        results |= {f"outputs {step}": outputs, f"gradient {step}": leaf.grad}
    results |= {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}
    results |= {f"buffer {name}": buffer for name, buffer in layer.named_buffers()}
    results["evaluated"] = layer.eval()(inputs)
    return {name: tensor.numpy(force=True) for name, tensor in results.items()}


@cache
def processes_parts(place: tuple[str, str, bool], world_size: int) -> list[dict[str, dict[str, np.ndarray]]]:
    return run_job(own_parts, place, world_size, world_size=world_size)


def own_parts(place: tuple[str, str, bool], world_size: int) -> dict[str, dict[str, np.ndarray]]:
    return {kind: own_part(kind, place, world_size) for kind in LAYERS}


def own_part(kind: str, place: tuple[str, str, bool], world_size: int) -> dict[str, np.ndarray]:
    layer, parts, weights = layer_and_parts(kind, world_size)
    layer, device = synchronize_for(place, layer), place[0]
    rank = torch.distributed.get_rank()
    if rank == 1:
        # In evaluation mode, nothing waits for another process.
        layer.eval()(parts[rank].to(device))
        layer.train()
    return forward_and_backward(layer, parts[rank].to(device), weights[rank].to(device))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "world_size"), [(CPU, 3), (CUDA_ON_CPU, 2), (CUDA_ON_CPU, 3), *((place, 2) for place in GPU)]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_layer_is_batch_norm_of_all_inputs_together(kind, place, world_size):
    layer, parts, weights = layer_and_parts(kind, world_size)
    expected = forward_and_backward(layer, torch.cat(parts), torch.cat(weights))
    results = [result[kind] for result in processes_parts(place, world_size)]
    for name, values in expected.items():
        mine = [result[name] for result in results]
        if name.startswith("gradient of"):
            np.testing.assert_allclose(sum(mine), values, rtol=1e-12, err_msg=name)
        elif name.startswith("buffer"):
            np.testing.assert_allclose(mine, [values] * world_size, rtol=1e-12, err_msg=name)
        elif name != "evaluated" or layer.track_running_stats:
            np.testing.assert_allclose(np.concatenate(mine), values, rtol=0, atol=1e-12, err_msg=name)


def normalized(place: tuple[str, str, bool], dtype: torch.dtype, offset: float) -> tuple[np.ndarray, str, np.ndarray]:
    """What the layer makes of this rank's half of random inputs around `offset`."""
    layer = synchronize_for(place, nn.BatchNorm1d(4))
    half = inputs_around(offset).chunk(2)[torch.distributed.get_rank()].to(*place[:1], dtype)
    with torch.autocast(place[0], torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = layer(half)
        running = layer.running_var.clone()
        # As in the first pass of a coupled loss.
        with torch.no_grad(), RunningStatistics(layer).kept():
            assert torch.equal(layer(half), outputs)
        assert torch.equal(layer.running_var, running)
    return outputs.float().numpy(force=True), str(outputs.dtype), running.numpy(force=True)


def inputs_around(offset: float) -> torch.Tensor:
    return torch.randn(4096, 4, generator=torch.Generator().manual_seed(0)) + offset


@pytest.mark.slow
@pytest.mark.parametrize("place", [CPU, TORCHS_ON_CPU, CUDA_ON_CPU, *GPU])
@pytest.mark.parametrize(
    ("dtype", "offset", "tolerance"),
    # In fp32, E[x^2] - E[x]^2 would be off by some 10 % at this mean. In bf16, statistics in bf16 by some 1 %.
    [(torch.float32, 1000.0, 1e-4), (torch.bfloat16, 0.0, 1e-4)],
)
def test_statistics_are_exact(place, dtype, offset, tolerance):
    inputs = inputs_around(offset).to(dtype)
    results = run_job(normalized, place, dtype, offset)
    variance = 0.9 + 0.1 * inputs.double().var(0).numpy()
    for _, name, running in results:
        assert name == str(dtype)
        np.testing.assert_allclose(running, variance, rtol=tolerance)
    expected = nn.BatchNorm1d(4, dtype=torch.float64)(inputs.double()).detach().numpy()
    together = np.concatenate([outputs for outputs, _, _ in results])
    np.testing.assert_allclose(together, expected, rtol=torch.finfo(dtype).eps, atol=tolerance)


def all_noted() -> dict[str, tuple[list[str], list[tuple], list[tuple]]]:
    return {kind: noted(kind) for kind in LAYERS}


def noted(kind: str) -> tuple[list[str], list[tuple], list[tuple]]:
    """What the host reads, and the collectives of a forward and of a backward pass."""
    layer, parts, _ = layer_and_parts(kind, 2)
    synchronize_for(CUDA_ON_CPU, layer)
    inputs = parts[torch.distributed.get_rank()].requires_grad_()
    with HostReads() as reads:
        reads.put_on_device([inputs, *layer.state_dict().values()])
        with Recorder() as forward:
            loss = layer(inputs).sum()
        with Recorder() as backward:
            loss.backward()
    return reads.found, [each.short for each in forward.started], [each.short for each in backward.started]


@pytest.mark.slow
def test_without_waits_a_layer_has_one_collective_per_pass():
    for reads, forward, backward in (kind for result in run_job(all_noted) for kind in result.values()):
        assert reads == []
        # Means, deviations and a count of each process; two sums of gradients; all of 3 channels.
        assert forward == [("all_gather", 2 * (2 * 3 + 1), torch.float64)]
        assert backward == [("all_reduce", 2 * 3, torch.float64)]


@pytest.mark.parametrize(
    ("world_size", "shape", "message"),
    [
        (1, (1, 3), "more than one value per channel over all processes"),
        (2, (0, 3, 4), r"shape \(0, 3, 4\), .* set compute.sync_batch_norm_without_waits to false"),
        (2**10, (2**20, 3, 2), "1024 processes with 2097152 values .* lower batch.micro_batch_size"),
        (2, (3,), "at least 2 dimensions, got 1"),
    ],
)
def test_counts_are_refused_by_shape(world_size, shape, message, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    layer = nn.BatchNorm1d(3)
    synchronize(layer, torch.device("cuda"), True)
    with pytest.raises(ValueError, match=message):
        layer(torch.empty(shape, device="meta"))
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("device", "without_waits", "kind"),
    [
        ("cpu", False, CpuSyncBatchNorm),
        ("cpu", True, CpuSyncBatchNorm),
        ("cuda", False, nn.SyncBatchNorm),
        ("cuda", True, CudaSyncBatchNorm),
    ],
)
def test_layers_keep_their_tensors_and_names(device, without_waits, kind):
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.ModuleDict({"again": shared}), nn.BatchNorm1d(4))
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    names = list(model.state_dict())
    assert not is_synchronized(model)
    synchronize(model, torch.device(device), without_waits)
    assert is_synchronized(model)
    assert model[1] is model[2]["again"]
    assert {type(model[1]), type(model[3])} == {kind}
    assert vars(kind(4)).keys() <= vars(model[1]).keys()
    assert list(model.state_dict()) == names
    after = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert all(after[name] is tensor for name, tensor in tensors.items())
    # torch's own takes the CPU in evaluation mode only.
    assert torch.equal(model[1].eval()(torch.ones(2, 4)), nn.BatchNorm1d(4).eval()(torch.ones(2, 4)))
    model[3] = nn.BatchNorm1d(4)
    assert not is_synchronized(model)


# --- a run ------------------------------------------------------------------------------------------------------------


@cache
def plainly(micro_batch_size: int) -> dict:
    """A plain PyTorch loop in one process, with torch's BatchNorm."""
    words = (f"--batch.micro_batch_size={micro_batch_size}",)
    return run_job(reference_digits, DIGITS, words, STEPS, strategy="single", world_size=1)[0]


@cache
def alone(micro_batch_size: int) -> dict:
    """One process with torch's BatchNorm; unlike the plain loop it moves running statistics once per step."""
    with tempfile.TemporaryDirectory() as folder:
        words = (SHORT, f"--batch.micro_batch_size={micro_batch_size}")
        return run_job(recorded, DIGITS, Path(folder, "run"), *words, strategy="single", world_size=1)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size", "micro_batch_size"),
    [("ddp", 2, 4), ("fsdp", 2, 4), ("hsdp", 4, 2), ("zero3", 2, 4), ("single", 1, 8)],
)
def test_same_as_one_process_with_the_product_as_micro_batch(strategy, world_size, micro_batch_size, tmp_path):
    words = (SYNC, SHORT, f"--batch.micro_batch_size={micro_batch_size}")
    result = run_job(recorded, DIGITS, tmp_path / "run", *words, strategy=strategy, world_size=world_size)[0]
    assert_same(result, plainly(8), STEPS)
    assert_same(result, alone(8), STEPS)
    assert any(name.endswith("running_var") for name in alone(8)["weights"][-1])
    assert result["weights"][-1].keys() == alone(8)["weights"][-1].keys()
    (mine,), (theirs,) = result["evaluations"], alone(8)["evaluations"]
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def recorded_without_waits(run_dir: Path, *words: str) -> dict:
    """Train with the layers for GPUs where the plan asks for them, on the CPU."""
    from largebatch.backend import base

    batch_norm_kernels.register()
    base.synchronize = lambda model, _, without_waits: synchronize(model, torch.device("cuda"), without_waits)
    return recorded(DIGITS, run_dir, *words)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_without_waits(checkpointing, tmp_path):
    """The layers for GPUs in a run, with blocks recomputed or not."""
    words = (SYNC, SHORT, "--batch.micro_batch_size=4", f"--compute.activation_checkpointing={checkpointing}")
    fast = "--compute.sync_batch_norm_without_waits=true"
    result = run_job(recorded_without_waits, tmp_path / "run", *words, fast)[0]
    assert_same(result, alone(8), STEPS)


@pytest.mark.slow
def test_without_it_the_micro_batch_of_a_process_counts(tmp_path):
    words = (SHORT, "--batch.micro_batch_size=4")
    result = run_job(recorded, DIGITS, tmp_path / "run", *words, strategy="ddp")[0]
    assert_same(result, plainly(4), STEPS)
    with pytest.raises(AssertionError):
        assert_same(result, plainly(8), STEPS)
    assert result["metrics"][1]["grad_norm"] != pytest.approx(plainly(8)["metrics"][1]["grad_norm"], rel=1e-2)


@pytest.mark.slow
def test_one_micro_batch_a_step_moves_running_statistics_as_torch_does(tmp_path):
    """Two processes with four samples each: torch's own loop over steps of eight."""
    words = ("--batch.global_batch_size=8", "--batch.micro_batch_size=4")
    result = run_job(recorded, DIGITS, tmp_path / "run", SYNC, SHORT, *words)[0]
    expected = run_job(torchs_statistics, words, strategy="single", world_size=1)[0]
    for name, values in expected.items():
        difference = np.linalg.norm(result["weights"][0][name] - values) / np.linalg.norm(values)
        assert difference <= 1e-5, (name, difference)


def torchs_statistics(words: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The buffers of a plain model after one forward pass of the first global batch."""
    from largebatch.config import load_config
    from largebatch.data.images import digits, normalize_pixels
    from largebatch.data.order import epoch_order

    config = load_config(DIGITS, words)
    torch.manual_seed(config.seed)
    model = tasks.build_model(DIGITS)(config).train()
    indices = epoch_order(config.data.num_train_samples, config.seed, 0)(np.arange(8))
    model(pixel_values=normalize_pixels(digits(config.data)[0].fetch(indices, 0)["pixel_values"], config.data))
    return {name: buffer.numpy() for name, buffer in model.named_buffers()}


@pytest.mark.slow
def test_bf16(tmp_path):
    words = (SYNC, SHORT, "--batch.micro_batch_size=4", "--precision=bf16")
    result = run_job(recorded, DIGITS, tmp_path / "run", *words)[0]
    for mine, theirs in zip(result["metrics"][:5], plainly(8)["metrics"][:5], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-2)


# --- refusals ---------------------------------------------------------------------------------------------------------


def run_with(change: str, words: tuple[str, ...], run_dir) -> None:
    """Train with another model than the recipe's."""
    import largebatch.optim
    from jobs import train
    from largebatch.backend import base

    build_optimizer = largebatch.optim.build_optimizer

    def change_model(model, config):
        layers = [(parent, name) for parent in model.modules() for name, _ in parent.named_children()]
        for parent, name in layers:
            layer = getattr(parent, name)
            if change == "group norm" and isinstance(layer, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(1, layer.num_features))
            if change == "instance norm" and isinstance(layer, nn.BatchNorm2d):
                setattr(parent, name, nn.InstanceNorm2d(layer.num_features, affine=True))
            if change == "batch norm" and name == "ln_f":
                setattr(parent, name, nn.BatchNorm1d(128, track_running_stats=False))
        if change == "torch's":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if change == "another class":
            model.resnet.embedder.embedder.normalization.__class__ = type("OtherNorm", (nn.BatchNorm2d,), {})
        return build_optimizer(model, config)

    largebatch.optim.build_optimizer = change_model
    if change == "not synchronized":
        base.synchronize = lambda *_: None
    train(PYDOC if change == "batch norm" else DIGITS, "--train.stop_after_steps=1", *words, run_dir=run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ("group norm", (SYNC,), "no BatchNorm layer to synchronize; set model.sync_batch_norm to false"),
        ("instance norm", (), "the model has no BatchNorm layer, but the plan says"),
        (
            "batch norm",
            ("--data.block_size=128",),
            "transformer.ln_f is a BatchNorm layer, so micro_batch_size is part",
        ),
        ("torch's", (), "is a SyncBatchNorm layer, but the plan has model.sync_batch_norm: false"),
        ("torch's", (SYNC,), "is a SyncBatchNorm layer, but the plan has model.sync_batch_norm: true"),
        (
            "another class",
            (SYNC,),
            "embedder.normalization is of class OtherNorm, which may compute something other",
        ),
        ("not synchronized", (SYNC,), "BatchNorm over all processes: the plan says True, the engine has False"),
    ],
)
def test_models_that_are_not_what_the_plan_says(change, words, message, tmp_path):
    with pytest.raises(JobFailed) as caught:
        run_job(run_with, change, words, tmp_path / "run")
    report = str(caught.value)
    assert message in report
    assert "exit code 2" in report
    assert "Traceback" not in report
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_own_layers_are_trained_where_nothing_is_synchronized(tmp_path):
    run_job(run_with, "another class", (), tmp_path / "run")
