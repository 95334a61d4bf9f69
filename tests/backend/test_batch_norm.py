"""Synchronized BatchNorm against torch's own, in one process, on the micro-batches of all processes together."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tasks
from jobs import run_job
from largebatch.backend.batch_norm import CpuSyncBatchNorm, RunningStatistics, synchronize
from largebatch.backend.check import check_before
from largebatch.backend.launch import Launch
from largebatch.config import load_config
from largebatch.errors import BackendMismatch
from largebatch.optim import build_optimizer
from largebatch.plan import resolve
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


def synchronized(layer: nn.Module) -> nn.Module:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    synchronize(layer, torch.device("cpu"))
    return layer


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


def own_parts(world_size: int):
    """Of every kind of layer what `forward_and_backward` returns, and what layers make of each of `INPUTS`."""
    return {kind: own_part(kind, world_size) for kind in LAYERS}, [normalized(*inputs) for inputs in INPUTS]


def own_part(kind: str, world_size: int) -> dict[str, np.ndarray]:
    layer, parts, weights = layer_and_parts(kind, world_size)
    synchronized(layer)
    rank = torch.distributed.get_rank()
    if rank == 1:
        # In evaluation mode, nothing waits for another process.
        layer.eval()(parts[rank])
        layer.train()
    return forward_and_backward(layer, parts[rank], weights[rank])


def normalized(dtype: torch.dtype, offset: float) -> tuple[np.ndarray, str, np.ndarray]:
    """What the layer makes of this rank's part of random inputs around `offset`."""
    layer = synchronized(nn.BatchNorm1d(4))
    part = inputs_around(offset).chunk(3)[torch.distributed.get_rank()].to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = layer(part)
        running = layer.running_var.clone()
        # As in the first pass of a coupled loss.
        with torch.no_grad(), RunningStatistics(layer).kept():
            assert torch.equal(layer(part), outputs)
        assert torch.equal(layer.running_var, running)
    return outputs.float().numpy(force=True), str(outputs.dtype), running.numpy(force=True)


def inputs_around(offset: float) -> torch.Tensor:
    return torch.randn(4096, 4, generator=torch.Generator().manual_seed(0)) + offset


# In fp32, E[x^2] - E[x]^2 would be off by some 10 % at this mean. In bf16, statistics in bf16 by some 1 %.
INPUTS = [(torch.float32, 1000.0), (torch.bfloat16, 0.0)]


@pytest.mark.slow
def test_layers_normalize_all_inputs_together():
    results = run_job(own_parts, 3, world_size=3)
    for kind in LAYERS:
        layer, parts, weights = layer_and_parts(kind, 3)
        expected = forward_and_backward(layer, torch.cat(parts), torch.cat(weights))
        for name, values in expected.items():
            mine = [layers[kind][name] for layers, _ in results]
            about = f"{kind}: {name}"
            if name.startswith("gradient of"):
                np.testing.assert_allclose(sum(mine), values, rtol=1e-12, err_msg=about)
            elif name.startswith("buffer"):
                np.testing.assert_allclose(mine, [values] * 3, rtol=1e-12, err_msg=about)
            elif name != "evaluated" or layer.track_running_stats:
                np.testing.assert_allclose(np.concatenate(mine), values, rtol=0, atol=1e-12, err_msg=about)
    for number, (dtype, offset) in enumerate(INPUTS):
        inputs = inputs_around(offset).to(dtype)
        variance = 0.9 + 0.1 * inputs.double().var(0).numpy()
        found = [exact[number] for _, exact in results]
        for _, name, running in found:
            assert name == str(dtype)
            np.testing.assert_allclose(running, variance, rtol=1e-4)
        expected = nn.BatchNorm1d(4, dtype=torch.float64)(inputs.double()).detach().numpy()
        together = np.concatenate([outputs for outputs, *_ in found])
        np.testing.assert_allclose(together, expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize(("device", "kind"), [("cpu", CpuSyncBatchNorm), ("cuda", nn.SyncBatchNorm)])
def test_layers_keep_their_tensors_and_names(device, kind):
    shared = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.ModuleDict({"again": shared}), nn.BatchNorm1d(4))
    before = model.state_dict(keep_vars=True)
    synchronize(model, torch.device(device))
    assert model[1] is model[2]["again"]
    assert {type(model[1]), type(model[3])} == {kind}
    assert vars(kind(4)).keys() <= vars(model[1]).keys()
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is tensor for name, tensor in before.items())
    # torch's own takes the CPU in evaluation mode only.
    assert torch.equal(model[1].eval()(torch.ones(2, 4)), nn.BatchNorm1d(4).eval()(torch.ones(2, 4)))


# --- a run ------------------------------------------------------------------------------------------------------------


OF_EIGHT = "--batch.micro_batch_size=8"


@pytest.fixture(scope="module")
def plain():
    """A plain PyTorch loop in one process, with torch's BatchNorm."""
    return run_job(reference_digits, DIGITS, (OF_EIGHT,), STEPS, strategy="single")[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process with torch's BatchNorm; unlike the plain loop it moves running statistics once per step."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    return run_job(recorded, DIGITS, run_dir, SHORT, OF_EIGHT, strategy="single")[0]


@pytest.mark.slow
def test_same_as_one_process_with_the_product_as_micro_batch(plain, alone, tmp_path):
    words = (SYNC, SHORT, "--batch.micro_batch_size=4")
    result = run_job(recorded, DIGITS, tmp_path / "run", *words, strategy="zero3")[0]
    assert_same(result, plain, STEPS)
    assert_same(result, alone, STEPS)
    assert any(name.endswith("running_var") for name in alone["weights"][-1])
    assert result["weights"][-1].keys() == alone["weights"][-1].keys()
    (mine,) = result["evaluations"]
    (theirs,) = alone["evaluations"]
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------


def changed_model(change: str, recipe: Path) -> nn.Module:
    """Another model than the recipe's."""
    model = tasks.build_model(recipe)(load_config(recipe))
    layers = [(parent, name) for parent in model.modules() for name, _ in parent.named_children()]
    for parent, name in layers:
        layer = getattr(parent, name)
        if change == "group norm" and isinstance(layer, nn.BatchNorm2d):
            setattr(parent, name, nn.GroupNorm(1, layer.num_features))
        if change == "batch norm" and name == "ln_f":
            setattr(parent, name, nn.BatchNorm1d(128, track_running_stats=False))
    if change == "torch's":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if change == "another class":
        model.resnet.embedder.embedder.normalization.__class__ = type("OtherNorm", (nn.BatchNorm2d,), {})
    return model


def check_changed(change: str, words: tuple[str, ...]) -> None:
    recipe = PYDOC if change == "batch norm" else DIGITS
    plan = resolve(load_config(recipe, words), 2)
    model = changed_model(change, recipe)
    backend = SimpleNamespace(plan=plan, launch=Launch("ddp", 0, 2, 2), gather_objects=lambda value: [value, value])
    check_before(model, build_optimizer(model, plan), backend)


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ("group norm", (), "the model has no BatchNorm layer, which decides whether"),
        ("batch norm", (), "transformer.ln_f is a BatchNorm layer, which decides whether"),
        ("torch's", (), "is of class SyncBatchNorm, but the plan has model.sync_batch_norm: false"),
        ("another class", (SYNC,), "embedder.normalization is of class OtherNorm, but the plan has model.sync"),
    ],
)
def test_models_that_are_not_what_the_plan_says(change, words, message):
    with pytest.raises(BackendMismatch, match=message):
        check_changed(change, words)


def test_own_layers_are_allowed_where_nothing_is_synchronized():
    check_changed("another class", ())
