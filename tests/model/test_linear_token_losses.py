"""The losses of a linear layer chunk by chunk, against torch's `linear` and `cross_entropy`."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.exc import InvalidCxxCompiler
from torch.nn.functional import cross_entropy, linear

from largebatch.data.text import IGNORE_INDEX
from largebatch.model import token_losses as module
from largebatch.model.token_losses import compiled, linear_token_losses, losses_and_gradients

BATCH = 3
TOKENS = 7
FEATURES = 5
CLASSES = 11
# From one token a chunk to all of them; 8 does not divide 21.
CHUNKS = [1, 8, 21, 1000]
# What is made of the losses: their sum; a weighted sum; the square of a sum.
OBJECTIVES = {
    "sum": lambda losses: losses.sum() * 0.25,
    "weighted": lambda losses: (losses * torch.linspace(-1, 2, losses.numel()).view(losses.shape)).sum(),
    "square": lambda losses: losses.sum().square(),
}


@pytest.fixture
def inputs():
    """Inputs, weight and bias in fp64, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, TOKENS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    targets = torch.randint(CLASSES, (BATCH, TOKENS), generator=generator)
    targets[0, 2:] = targets[2, 0] = IGNORE_INDEX
    return [*tensors, targets]


def plain(inputs, weight, bias, targets):
    logits = linear(inputs, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none")


def results_of(function, hidden, weight, bias, targets, objective=torch.sum):
    """The losses, and the gradients of what is made of them."""
    losses = function(hidden, weight, bias, targets)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None and leaf.requires_grad]
    return losses, torch.autograd.grad(objective(losses), leaves)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_losses_and_gradients_in_fp64(objective, has_bias, chunk, inputs, monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", chunk * CLASSES)
    if not has_bias:
        inputs[2] = None
    mine, my_gradients = results_of(linear_token_losses, *inputs, OBJECTIVES[objective])
    theirs, their_gradients = results_of(plain, *inputs, OBJECTIVES[objective])
    torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)
    assert (mine[inputs[-1] == IGNORE_INDEX] == 0).all()
    torch.testing.assert_close(my_gradients, their_gradients, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_only_what_is_trained_has_a_gradient(trained, inputs):
    for position, leaf in enumerate(inputs[:3]):
        leaf.requires_grad_(position == trained)
    (_, mine), (_, theirs) = (results_of(function, *inputs) for function in (linear_token_losses, plain))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_a_second_backward_pass_has_the_same_gradient(inputs):
    *leaves, targets = inputs
    total = linear_token_losses(*leaves, targets).sum() * 3
    first = [gradient.clone() for gradient in torch.autograd.grad(total, leaves, retain_graph=True)]
    torch.testing.assert_close(first, list(torch.autograd.grad(total, leaves)), rtol=1e-12, atol=1e-13)


def test_without_gradients_there_are_the_same_losses(inputs):
    with torch.no_grad():
        losses = linear_token_losses(*inputs)
    assert not losses.requires_grad
    torch.testing.assert_close(losses, plain(*inputs).detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("chunk", [8, 1000])
def test_under_autocast_the_arithmetic_is_that_of_logits_in_bf16_and_losses_in_fp32(chunk, inputs, monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", chunk * CLASSES)
    _, exact = results_of(plain, *inputs)
    halves = [*(leaf.detach().float().requires_grad_() for leaf in inputs[:3]), inputs[3]]
    in_bf16 = torch.autocast("cpu", torch.bfloat16)
    mine, my_gradients = results_of(in_bf16(linear_token_losses), *halves)
    theirs, their_gradients = results_of(in_bf16(plain), *halves)
    # Processors differ in the last bits of a sum in fp32; losses in bf16 would be off by 1e-3.
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    for my_gradient, their_gradient, true in zip(my_gradients, their_gradients, exact, strict=True):
        assert my_gradient.dtype == torch.float32
        # No further from the exact gradient than what torch gives, but for luck.
        assert (my_gradient - true).norm() <= 1.2 * (their_gradient - true).norm()


def test_the_weights_gradient_is_summed_in_fp32(monkeypatch):
    """Of a thousand chunks; in bfloat16, the sum would stop to grow at some hundred times what a chunk adds."""
    monkeypatch.setattr(module, "MAX_LOGITS", 2)
    hidden = torch.ones(1000, 1)
    weight = torch.zeros(2, 1, requires_grad=True)
    targets = torch.zeros(1000).long()
    with torch.autocast("cpu", torch.bfloat16):
        linear_token_losses(hidden, weight, None, targets).sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[-500.0], [500.0]]))


# --- the compiled function, which GPUs use, on a CPU ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_chunk_is_the_eager_one(dtype):
    generator = torch.Generator().manual_seed(0)
    of_sizes = compiled(torch.device("cpu"))
    graphs = counters["stats"]["unique_graphs"]
    for tokens in (96, 7, 2):
        logits = torch.randn(tokens, 301, generator=generator).mul_(4).to(dtype)
        targets = torch.randint(301, (tokens,), generator=generator)
        targets[0] = IGNORE_INDEX
        mine, my_gradient, _ = of_sizes(logits, targets, None, True, False)
        losses, gradient, _ = losses_and_gradients(logits, targets, None, True, False)
        torch.testing.assert_close(mine, losses, rtol=1e-6, atol=1e-6)
        assert my_gradient.dtype == dtype
        # In bf16, the neighbor of a number that is halfway between two.
        close = {"rtol": 2**-8, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(my_gradient, gradient, **close)
    assert counters["stats"]["unique_graphs"] == graphs + 1


def test_without_a_compiler_losses_are_eager(monkeypatch):
    def no_compiler(*_, **__):
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch, "compile", lambda *_, **__: no_compiler)
    compiled.cache_clear()
    with pytest.warns(UserWarning, match="without torch.compile.*No working C"):
        assert compiled(torch.device("cpu")) is losses_and_gradients
    compiled.cache_clear()
