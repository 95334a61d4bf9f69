"""LARS and LAMB: against other implementations, the papers' formulas, and one process under every strategy."""

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import nn

from jobs import OTHER_ZERO_LAYOUTS, run_job, write_zero_config
from largebatch.optim import lamb
from largebatch.optim.lamb import Lamb
from largebatch.optim.lars import Lars
from largebatch.optim.layerwise import LayerPart
from largebatch.optim.whole_layers import LayerProcesses
from paths import PYDOC
from plain_optimizers import PlainLamb
from test_strategies import LAMB, SMALL_GPT, assert_last_weights_agree, recorded

STEPS = 30
SHAPES = ((5, 7), (3, 2, 2), (4, 4), (6,))


def trained(make_optimizer) -> list[np.ndarray]:
    """Parameters after steps with other gradients and learning rates each time, in float64.

    The third starts at zero, and the second's first gradient is zero; the fourth, a vector, is not adapted.
    """
    rng = np.random.default_rng(0)
    parameters = [nn.Parameter(torch.tensor(rng.normal(size=shape))) for shape in SHAPES]
    with torch.no_grad():
        parameters[2].zero_()
    optimizer = make_optimizer(parameters[:3], parameters[3:])
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + step % 5)
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.tensor(gradient(step, number))
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def gradient(step: int, number: int) -> np.ndarray:
    if (step, number) == (0, 1):
        return np.zeros(SHAPES[1])
    return np.random.default_rng((step, number)).normal(size=SHAPES[number]) * (number + 1)


def groups(adapted, others, weight_decay: float) -> list[dict]:
    return [
        {"params": adapted, "weight_decay": weight_decay, "layerwise": True},
        {"params": others, "weight_decay": 0.0, "layerwise": False},
    ]


def assert_equal(mine: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for left, right in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_lars_as_another_implementation(momentum, nesterov):
    options = {"momentum": momentum, "nesterov": nesterov}
    mine = trained(lambda *parameters: Lars(groups(*parameters, 0.03), lr=0.0, trust_coefficient=0.02, **options))
    theirs = trained(
        lambda adapted, others: pytorch_optimizer.LARS(
            [*adapted, *others], lr=0.1, weight_decay=0.03, trust_coefficient=0.02, **options
        )
    )
    # Where the first gradient is zero, theirs decays by eta, and we, with a ratio of 1, by 1.
    mine_without, theirs_without = ([found[number] for number in (0, 2, 3)] for found in (mine, theirs))
    assert_equal(mine_without, theirs_without)


def test_lamb_as_another_implementation():
    """Theirs has no bias correction, which the trust ratio takes out where there is no weight decay and no eps; and it
    takes norms of weights above 10 for 10, which these are not."""
    adapted = trained(lambda adapted, _: Lamb(adapted, lr=0.0, betas=(0.9, 0.99), eps=1e-30))[:3]
    options = {"betas": (0.9, 0.99), "eps": 1e-30, "adam_debias": True}
    theirs = trained(lambda adapted, _: pytorch_optimizer.Lamb(adapted, lr=0.1, **options))[:3]
    assert_equal(adapted, theirs)


def test_lamb_as_in_the_paper():
    options = {"betas": (0.9, 0.99), "eps": 1e-6}
    mine = trained(lambda *parameters: Lamb(groups(*parameters, 0.03), lr=0.0, **options))
    assert_equal(mine, trained(lambda *parameters: PlainLamb(groups(*parameters, 0.03), **options)))


def test_lamb_takes_large_groups_in_chunks(monkeypatch):
    """The first tensor is larger than a chunk, and the next two fit into one."""
    together = trained(lambda *parameters: Lamb(groups(*parameters, 0.03), lr=0.0))
    monkeypatch.setattr(lamb, "CHUNK", 30)
    chunked = trained(lambda *parameters: Lamb(groups(*parameters, 0.03), lr=0.0))
    assert all(map(np.array_equal, chunked, together))


@pytest.mark.parametrize("make_optimizer", [Lars, Lamb])
def test_parts_in_flat_buffers_are_stepped_as_whole_layers_are(make_optimizer):
    """One buffer has three layers with padding between them, and a part without elements; another has padding only."""
    shapes = ((3, 500), (7,), (40, 60))
    gap = 3
    starts = [gap, 2 * gap + 1500, 3 * gap + 1507]
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    flat = nn.Parameter(torch.zeros(starts[2] + 2400 + gap))
    padding = nn.Parameter(torch.zeros(5))
    parts = [LayerPart(str(number), 0, start, whole[number].numel()) for number, start in enumerate(starts)]

    def layers_in(tensor):
        return [tensor[part.offset : part.offset + part.length] for part in parts]

    def fill(tensor, layers):
        for place, layer in zip(layers_in(tensor), layers, strict=True):
            place.copy_(layer.flatten())

    with torch.no_grad():
        fill(flat, whole)
    optimizer = make_optimizer(whole, lr=0.1, weight_decay=0.1)
    sharded = make_optimizer([{"params": [flat]}, {"params": [padding]}], lr=0.1, weight_decay=0.1)
    sums = []
    located = {flat: [*parts, LayerPart("elsewhere", 10, flat.numel(), 0)], padding: []}
    layers = dict(zip(("0", "1", "2"), shapes, strict=True)) | {"elsewhere": (20,)}
    processes = LayerProcesses(0, [], lambda squares: sums.append(squares) or squares, None)
    sharded.set_layer_parts(located, layers, processes)
    for step in range(3):
        for parameter in whole:
            parameter.grad = torch.randn(parameter.shape)
        flat.grad = torch.zeros_like(flat)
        padding.grad = torch.zeros_like(padding)
        fill(flat.grad, [parameter.grad for parameter in whole])
        given = flat.grad.clone()
        optimizer.step()
        sharded.step()
        assert torch.equal(flat.grad, given)
        assert len(sums) == 2 * (step + 1)
    for mine, parameter in zip(layers_in(flat.detach()), whole, strict=True):
        assert torch.equal(mine, parameter.detach().flatten())
    assert flat.detach()[-gap:].eq(0).all()
    assert padding in sharded.state


WORDS = (*SMALL_GPT, LAMB, "--batch.global_batch_size=24", "--batch.micro_batch_size=8")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    return run_job(recorded, PYDOC, run_dir, *WORDS, strategy="single")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "settings"), OTHER_ZERO_LAYOUTS)
def test_layers_are_found_in_other_layouts_of_deepspeed(stage, settings, alone, tmp_path):
    write_zero_config(tmp_path, stage, settings)
    place = {"strategy": f"zero{stage}", "world_size": 3, "accelerate_configs": tmp_path}
    shared = run_job(recorded, PYDOC, tmp_path / "shared", *WORDS, **place)[0]
    assert_last_weights_agree(shared, alone, 1e-5)
