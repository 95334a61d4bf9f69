"""Models built without weights: what their parameters would begin with is what `transformers` and torch give them."""

import hashlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import kstest, truncnorm
from torch import nn

import tasks
from largebatch.config import load_config
from largebatch.data.order import derive_seed
from largebatch.errors import BackendMismatch
from largebatch.model.building import BLOCK, Draw, SeededWeights, build_without_weights
from paths import BERT, CLIP_DIGITS, LLAMA, PYDOC, SIMCLR


def build(recipe, *words):
    return tasks.build_model(recipe)(load_config(recipe, words))


def truncated(mean, std, low, high):
    return truncnorm((low - mean) / std, (high - mean) / std, mean, std)


# The mean and the standard deviation of what an operation draws.
MOMENTS = {
    "zero_": lambda: (0, 0),
    "fill_": lambda value: (value, 0),
    "normal_": lambda mean, std: (mean, std),
    "uniform_": lambda low, high: ((low + high) / 2, (high - low) / math.sqrt(12)),
    "trunc_normal_": lambda *numbers: (truncated(*numbers).mean(), truncated(*numbers).std()),
}
MODELS = {
    **{recipe.stem: (recipe,) for recipe in (LLAMA, PYDOC, BERT, SIMCLR, CLIP_DIGITS)},
    # The weights of its output layer of texts are drawn from a normal distribution that is cut off.
    "siglip": (
        CLIP_DIGITS,
        *("--model.architecture=siglip", "--model.features=64"),
        '--loss={"name": "sigmoid", "temperature": 0.1, "learned": true, "bias": -10, "duplicates": "negatives"}',
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_what_is_noted_is_what_a_whole_model_has(model):
    """Means and standard deviations of a model with weights, within five times what chance makes of them."""
    recipe = MODELS[model]
    torch.manual_seed(0)
    whole = dict(build(*recipe).named_parameters())
    model, draws = build_without_weights(lambda: build(*recipe))
    assert list(draws) == list(whole)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta
        for about in ("shape", "dtype", "requires_grad"):
            assert getattr(parameter, about) == getattr(whole[name], about)
        values = whole[name].detach().double()
        operation, numbers, _ = draws[name]
        mean, std = MOMENTS[operation](*numbers)
        assert values.mean() == pytest.approx(mean, rel=1e-6, abs=5 * std / math.sqrt(values.numel())), name
        assert values.std(correction=0) == pytest.approx(std, rel=5 / math.sqrt(2 * values.numel())), name
        if operation == "uniform_":
            assert numbers[0] <= values.min() < values.max() <= numbers[1], name


def test_tied_embeddings_stay_tied():
    model, draws = build_without_weights(lambda: build(LLAMA, "--model.tie_embeddings=true"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in draws


def test_what_is_shared_from_the_start_stays_shared():
    """Under two names of a module, and of two modules."""

    def build_shared():
        model = nn.Module()
        model.one = model.other = nn.Parameter(torch.empty(3))
        model.first = nn.Linear(2, 2)
        model.second = nn.Linear(2, 2)
        model.first.bias = model.second.bias = nn.Parameter(torch.empty(2))
        nn.init.ones_(model.other)
        nn.init.zeros_(model.second.bias)
        return model

    model, draws = build_without_weights(build_shared)
    assert model.one is model.other
    assert model.first.bias is model.second.bias
    assert (draws["one"], draws["first.bias"]) == (Draw("fill_", (1.0,)), Draw("zero_"))


class Own(nn.Module):
    def __init__(self, initialize):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        with torch.no_grad():
            initialize(self.weight)


def on_the_cpu(initialize, weight):
    """By way of another of torch's modes."""
    with torch.device("cpu"):
        return initialize(weight)


@pytest.mark.parametrize(
    ("initialize", "last"),
    [
        (nn.Parameter.numel, "nothing"),
        (lambda weight: nn.init.normal_(weight).mul_(2), "mul_"),
        (lambda weight: nn.init.zeros_(weight)[0].normal_(), "normal_ of a part"),
        (lambda weight: nn.init.normal_(weight)[:, 0].zero_(), "zero_ of a part"),
        (nn.init.eye_, "eye"),
        # Torch before 2.13 calls other operations, and later ones do nothing without memory.
        (lambda weight: nn.init.orthogonal_(nn.init.zeros_(weight)), "(copy_|mul_|orthogonal_)"),
        (lambda weight: nn.init.sparse_(nn.init.zeros_(weight), 0.5), "(sparse_|.* of a part)"),
        (lambda weight: nn.init.dirac_(nn.init.zeros_(weight).unsqueeze(2)), "(dirac_|.* of a part)"),
        (lambda weight: on_the_cpu(nn.init.orthogonal_, nn.init.zeros_(weight)), "(copy_|mul_|orthogonal_)"),
    ],
)
def test_what_does_not_follow_from_a_name_is_refused(initialize, last):
    build_without_weights(lambda: Own(nn.init.normal_))
    with pytest.raises(BackendMismatch, match=f"parameter weight would start with values .* is {last}"):
        build_without_weights(lambda: Own(initialize))


def test_nothing_is_believed_of_a_parameter_that_was_thrown_away():
    """Its place in memory may be the next one's."""

    def build():
        for _ in range(50):
            Own(nn.init.zeros_)
        return Own(nn.Parameter.numel)

    with pytest.raises(BackendMismatch, match="is nothing"):
        build_without_weights(build)


# --- large parameters ---------------------------------------------------------------------------------------------


def seeded(initialize, *shape, dtype=torch.float32):
    """The weights of a model with one parameter that no process could hold, if it is large."""

    def build():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(shape, device="meta", dtype=dtype))
        with torch.no_grad():
            initialize(model.weight)
        return model

    return SeededWeights(*build_without_weights(build), seed=3)


@pytest.mark.parametrize(("rows", "value"), [(2, 0.0), (slice(1, 3), 1.0)])
def test_rows_that_are_filled_after_the_draw(rows, value):
    """As that of `padding_idx`; every other number is the one of a parameter without such rows."""

    def initialize(weight):
        nn.init.normal_(weight)
        weight[rows].fill_(value)

    plain, filled = (seeded(each, 7, 3).read("weight", 0, 21).view(7, 3) for each in (nn.init.normal_, initialize))
    plain[rows] = value
    assert torch.equal(filled, plain)


def test_a_truncated_normal_distribution_is_drawn():
    numbers = (0.1, 0.5, -0.2, 0.4)
    values = seeded(lambda weight: nn.init.trunc_normal_(weight, *numbers), 100, 100).read("weight", 0, 10**4)
    assert -0.2 <= values.min() < -0.199
    assert 0.399 < values.max() <= 0.4
    assert kstest(values.numpy(), truncated(*numbers).cdf).pvalue > 0.001


def twister(number):
    """The generator of a block of `seeded`'s parameter, by NumPy."""
    words = np.frombuffer(hashlib.shake_128(f"3/weights/weight/{number}".encode()).digest(4 * 624), dtype="<u4")
    generator = np.random.MT19937()
    generator.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    return generator


def test_few_elements_of_ten_trillion():
    """They are found without the others, and are 24 bits each of the Mersenne Twister."""
    weights = seeded(nn.init.uniform_, 10**6, 10**7)
    number = 10**13 // BLOCK // 3
    found = weights.read("weight", number * BLOCK - 5, number * BLOCK + 7)
    expected = [(twister(each).random_raw(BLOCK) % 2**24 / 2**24) for each in (number - 1, number)]
    np.testing.assert_array_equal(found.numpy(), np.concatenate([expected[0][-5:], expected[1][:7]]))
    first = torch.rand(BLOCK, generator=torch.Generator().manual_seed(derive_seed(3, "weights", "weight")))
    assert torch.equal(weights.read("weight", 0, 9), first[:9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_parts_are_those_of_the_whole(dtype):
    """Whatever their bounds, with a row of zeros that is in two blocks, and empty parts."""

    def initialize(weight):
        nn.init.normal_(weight, 1.0, 0.5)
        weight[65].zero_()

    size = 253 * 1001
    weights = seeded(initialize, 253, 1001, dtype=dtype)
    assert 65 * 1001 < BLOCK < 66 * 1001 < size / 3
    whole = weights.read("weight", 0, size)
    assert whole.dtype == dtype
    assert (whole.view(253, 1001)[65] == 0).all()
    for bounds in ([0, 1, 4 * 1001 + 7, BLOCK - 1, BLOCK + 1, BLOCK + 1, size], range(0, size + 1, 253)):
        parts = [weights.read("weight", start, stop) for start, stop in pairwise(bounds)]
        assert torch.equal(torch.cat(parts), whole)
