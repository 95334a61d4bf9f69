"""Synchronized BatchNorm against torch's own, in one process, on the micro-batches of all processes together."""

from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from jobs import run_job
from largebatch.backend.batch_norm import CpuSyncBatchNorm, RunningStatistics, synchronize
from largebatch.backend.check import check_before
from largebatch.backend.launch import Launch
from largebatch.config import load_config
from largebatch.errors import BackendMismatch
from largebatch.optim import build_optimizer
from largebatch.plan import resolve
from paths import DIGITS, PYDOC
from test_strategies import assert_same, recorded

SYNC = "--model.sync_batch_norm=true"

# --- the layer --------------------------------------------------------------------------------------------------------

LAYERS = {
    "2d": lambda: nn.BatchNorm2d(3),
    "channels last": lambda: nn.BatchNorm2d(3),
    "1d": lambda: nn.BatchNorm1d(3, momentum=0.3, eps=1e-3),
    "no scale": lambda: nn.BatchNorm1d(3, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
}


WORLD_SIZE = 3
# In fp32, E[x^2] - E[x]^2 would be off by some 10 % at this mean. In bf16, statistics in bf16 by some 1 %.
INPUTS = [(torch.float32, 1000.0), (torch.bfloat16, 0.0)]


def layer_and_parts(kind):
    """A layer, and for each process its inputs and what their outputs are weighted with in the loss."""
    torch.manual_seed(0)
    layer = LAYERS[kind]().double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    shape = (3, 4, 5) if isinstance(layer, nn.BatchNorm2d) else (3,)
    # Of different sizes, means and scales.
    parts = [torch.randn(2 + rank, *shape, dtype=torch.float64) * (1 + rank) + rank for rank in range(WORLD_SIZE)]
    weights = [torch.randn_like(part) for part in parts]
    if kind == "channels last":
        # Gradients are not laid out like this, because the loss's weights are not.
        parts = [part.contiguous(memory_format=torch.channels_last) for part in parts]
    return layer, parts, weights


def forward_and_backward(layer, inputs, weights):
    """What processes have parts of, what they have summands of, and what they have alike.

    Of two steps in training, so that running statistics move twice, and a look in evaluation mode.
    """
    parts = []
    for step in range(2):
        leaf = (inputs + step).requires_grad_()
        outputs = layer(leaf)
        ((outputs.contiguous() + 1).square() * weights).sum().backward()
        parts += [outputs, leaf.grad]
    if layer.track_running_stats:
        parts.append(layer.eval()(inputs))
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [[tensor.numpy(force=True) for tensor in some] for some in (parts, gradients, layer.buffers())]


def inputs_around(offset):
    return torch.randn(4096, 4, generator=torch.Generator().manual_seed(0)) + offset


def of_a_process():
    """Of every kind of layer what `forward_and_backward` returns, and what a layer makes of its part of `INPUTS`."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    stepped = {}
    for kind in LAYERS:
        layer, parts, weights = layer_and_parts(kind)
        synchronize(layer, torch.device("cpu"))
        if rank == 1:
            # In evaluation mode, nothing waits for another process.
            layer.eval()(parts[rank])
            layer.train()
        stepped[kind] = forward_and_backward(layer, parts[rank], weights[rank])
    normalized = []
    for dtype, offset in INPUTS:
        layer = nn.BatchNorm1d(4)
        synchronize(layer, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = layer(inputs_around(offset).chunk(WORLD_SIZE)[rank].to(dtype))
        assert outputs.dtype == dtype
        normalized.append((outputs.float().numpy(force=True), layer.running_var.numpy(force=True)))
    return stepped, normalized


@pytest.fixture(scope="module")
def results():
    """By process."""
    return run_job(of_a_process, world_size=WORLD_SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_normalize_all_inputs_together(kind, results):
    layer, parts, weights = layer_and_parts(kind)
    of_parts, of_gradients, of_buffers = zip(*(stepped[kind] for stepped, _ in results), strict=True)
    whole, gradients, buffers = forward_and_backward(layer, torch.cat(parts), torch.cat(weights))
    for values, *mine in zip(whole, *of_parts, strict=True):
        np.testing.assert_allclose(np.concatenate(mine), values, rtol=0, atol=1e-12)
    for values, *mine in zip(gradients, *of_gradients, strict=True):
        np.testing.assert_allclose(sum(mine), values, rtol=1e-12)
    for values, *mine in zip(buffers, *of_buffers, strict=True):
        np.testing.assert_allclose(mine, [values] * WORLD_SIZE, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(INPUTS)))
def test_statistics_are_as_exact_as_in_double_precision(number, results):
    dtype, offset = INPUTS[number]
    outputs, variances = zip(*(normalized[number] for _, normalized in results), strict=True)
    inputs = inputs_around(offset).to(dtype).double()
    layer = nn.BatchNorm1d(4, dtype=torch.float64)
    expected = layer(inputs).detach().numpy()
    np.testing.assert_allclose(np.concatenate(outputs), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
    np.testing.assert_allclose(variances, [layer.running_var] * WORLD_SIZE, rtol=1e-4)


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


class Twice(nn.Module):
    """A layer that each pass uses once, one that it uses twice, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.once = nn.BatchNorm1d(2, momentum=0.3)
        self.twice = nn.BatchNorm1d(2)
        self.frozen = nn.BatchNorm1d(2).eval()
        nn.init.normal_(self.frozen.running_mean)

    def forward(self, inputs):
        return self.frozen(self.twice(self.twice(self.once(inputs)) + inputs))


@pytest.mark.parametrize("accumulation", [1, 5])
def test_statistics_move_once_per_step(accumulation):
    """By hand: toward the mean of the micro-batches' own, and where a pass moves them twice, to the mean of where each
    micro-batch alone would have moved them."""
    torch.manual_seed(0)
    model = Twice()
    statistics = RunningStatistics(model)
    statistics.start_averages()
    frozen = model.frozen.running_mean.clone()
    before = torch.zeros(2)
    for _ in range(2):
        parts = torch.randn(accumulation, 8, 2) * 3 + 1
        alone = []
        for part in parts:
            each = deepcopy(model)
            each(part)
            alone.append(each.twice.running_var)
        for number, part in enumerate(parts):
            statistics.begin_micro_step(number)
            model(part)
            statistics.end_forward(number)
            model(part)  # as a backward pass may that recomputes blocks
            with statistics.averaged():  # an evaluation of averaged weights
                pass
        statistics.end_step()
        before = 0.7 * before + 0.3 * parts.mean((0, 1))
        torch.testing.assert_close(model.once.running_mean, before)
        torch.testing.assert_close(model.twice.running_var, torch.stack(alone).mean(0))
        assert torch.equal(model.frozen.running_mean, frozen)


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_same_as_one_process_with_the_product_as_micro_batch(tmp_path):
    """After some ten steps on micro-batches of 8, rounding errors decide on which side of zero single inputs of ReLU
    are: a plain loop in fp32 then differs from itself in fp64, too."""
    short = ("--train.stop_after_steps=5", "--batch.micro_batch_size=8")
    (alone,) = run_job(recorded, DIGITS, tmp_path / "alone", *short, strategy="single")
    words = (SYNC, *short, "--batch.micro_batch_size=4")
    result = run_job(recorded, DIGITS, tmp_path / "run", *words, strategy="zero3")[0]
    assert_same(result, alone, steps=5)
    assert any(name.endswith("running_var") for name in alone["weights"][-1])
    assert result["weights"][-1].keys() == alone["weights"][-1].keys()
    (mine,) = result["evaluations"]
    (theirs,) = alone["evaluations"]
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------


class OtherNorm(nn.BatchNorm2d):
    """A class that `synchronize` does not know."""


def check(layer, recipe, words):
    """Compare a model of one layer, which is in another, with a plan."""
    plan = resolve(load_config(recipe, words), 2)
    model = nn.Sequential(nn.Sequential(layer))
    backend = SimpleNamespace(plan=plan, launch=Launch("ddp", 0, 2, 2), differing_ranks=lambda _: "")
    check_before(model, build_optimizer(model, plan), backend)


@pytest.mark.parametrize(
    ("layer", "recipe", "words", "message"),
    [
        (nn.GroupNorm(1, 4), DIGITS, (), "the model has no BatchNorm layer, which decides whether"),
        (nn.BatchNorm1d(4), PYDOC, (), "0.0 is a BatchNorm layer, which decides whether"),
        (
            nn.SyncBatchNorm(4),
            DIGITS,
            (),
            "0.0 is of class SyncBatchNorm, but the plan has model.sync_batch_norm: false",
        ),
        (OtherNorm(4), DIGITS, (SYNC,), "0.0 is of class OtherNorm, but the plan has model.sync"),
    ],
)
def test_models_that_are_not_what_the_plan_says(layer, recipe, words, message):
    with pytest.raises(BackendMismatch, match=message):
        check(layer, recipe, words)


def test_own_layers_are_allowed_where_nothing_is_synchronized():
    check(OtherNorm(4), DIGITS, ())
