"""The numbers of two runs are compared as a reader would by hand, and limits are those of rounding."""

import dataclasses

import numpy as np
import pytest

from largebatch.tools.verify.differences import MEASURES, Trained, beyond, compare, factors_of_the_first_step, limits

LINES = [{"loss": 2.0, "lr": 0.1, "grad_norm": 4.0}, {"loss": 1.0, "lr": 0.0, "grad_norm": 2.0}]
RUN = Trained(LINES, [{"step": 2, "loss": 3.0}], {"weight": np.array([3.0, 4.0]), "bias": np.zeros(2)})


def test_relative_differences_by_hand():
    changed = Trained(
        [{"loss": 2.002, "lr": 0.1, "grad_norm": 4.0}, {"loss": 1.0, "lr": 0.0, "grad_norm": 1.9}],
        [{"step": 2, "loss": 3.3}],
        {"weight": np.array([3.0, 4.05]), "bias": np.array([1e-6, 0.0])},
    )
    differences = compare(changed, RUN)
    assert differences["loss"] == pytest.approx(1e-3)
    assert differences["grad_norm"] == pytest.approx(0.05)
    assert differences["lr"] == 0.0
    assert differences["evaluation"] == pytest.approx(0.1)
    assert differences["parameters"] == pytest.approx(0.01)
    # The bias: against a thousandth of the model's root mean square, 2.5, times the root of its two elements.
    only_bias = dataclasses.replace(RUN, weights={**RUN.weights, "bias": np.array([1e-6, 0.0])})
    assert compare(only_bias, RUN)["parameters"] == pytest.approx(1e-6 / (2.5e-3 * 2**0.5))


@pytest.mark.parametrize(
    "changed",
    [
        {"metrics": LINES[:1]},
        {"metrics": [LINES[0], {**LINES[1], "loss": float("nan")}]},
        {"metrics": [LINES[0], {**LINES[1], "grad_norm": float("nan")}]},
        {"evaluations": []},
        {"evaluations": [{"step": 2, "loss": float("nan")}]},
        {"weights": {"weight": RUN.weights["weight"]}},
        {"weights": {**RUN.weights, "bias": np.array([np.nan, 0.0])}},
    ],
)
def test_what_is_missing_or_not_a_number_never_agrees(changed):
    assert not beyond(compare(RUN, RUN), limits(1e-12, "fp32"))
    assert beyond(compare(dataclasses.replace(RUN, **changed), RUN), limits(1e6, "fp32"))


EQUAL = dict.fromkeys(MEASURES, 0.0)
USUAL = limits(1e-6, "fp32")


def test_the_learning_rate_must_be_equal():
    small = EQUAL | {"loss": 1e-7, "grad_norm": 1e-6, "update": 9e-3, "parameters": 1e-7, "evaluation": 1e-7}
    assert not beyond(small | {"first_loss": 1e-7, "first_grad_norm": 9e-6}, USUAL)
    assert beyond(EQUAL | {"lr": 1e-16}, USUAL) == {"lr"}


def test_bf16_turns_more_of_the_first_update():
    """Of one element in 1,600 the sign: twice the root of that."""
    assert beyond(EQUAL | {"update": 0.04}, USUAL) == {"update"}
    assert not beyond(EQUAL | {"update": 0.04}, limits(1e-6, "bf16"))
    assert beyond(EQUAL | {"update": 0.06}, limits(1e-6, "bf16")) == {"update"}


def test_rounding_is_granted_to_what_it_was_measured_of():
    """Ten times the loss's own to the loss, the weights' own to weights; to the first step only where models sum."""
    rounding = EQUAL | {"loss": 1e-5, "grad_norm": 1e-4, "update": 1e-2, "parameters": 1e-3}
    rounding |= {"first_loss": 1e-6, "first_grad_norm": 1e-5}
    enlarged = limits(1e-6, "fp32", rounding)
    granted = EQUAL | {"loss": 9e-5, "grad_norm": 9e-4, "update": 9e-2, "parameters": 9e-3, "evaluation": 9e-7}
    assert not beyond(granted | {"first_loss": 9e-7, "first_grad_norm": 9e-6}, enlarged)
    large = {"loss": 2e-4, "grad_norm": 2e-3, "update": 0.2, "parameters": 2e-2, "evaluation": 2e-6, "lr": 1e-9}
    for name, value in large.items():
        assert beyond(EQUAL | {name: value}, enlarged) == {name}
    within_models = limits(1e-6, "fp32", rounding, sums_within_the_model=True)
    for name, value in {"first_loss": 2e-6, "first_grad_norm": 2e-5}.items():
        first = EQUAL | {name: value}
        assert beyond(first, enlarged) == {name}
        assert not beyond(first, within_models)
        assert beyond(EQUAL | {name: 10 * value}, within_models) == {name}


def test_factors_of_the_first_step():
    def run(loss, grad_norm):
        return dataclasses.replace(RUN, metrics=[{"loss": loss, "grad_norm": grad_norm}])

    assert factors_of_the_first_step(run(1.0, 0.5), run(2.0, 2.0)) == (0.5, 0.25)
    assert factors_of_the_first_step(run(1.0, 0.0), run(0.0, 0.0)) == (np.inf, 1.0)
    assert factors_of_the_first_step(run(np.nan, 0.5), run(2.0, 0.5)) == (np.inf, 1.0)
