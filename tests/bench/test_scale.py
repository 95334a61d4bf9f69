"""`estimate.step_time` against published figures that nothing was fitted to."""

from dataclasses import replace

import pytest

from largebatch.estimate.step_time import EXPOSED_SHARE
from published import FOUNDRY, GOYAL, SERIES, TORCHTITAN, WHITEFIBER, fit_exposed_share

SHARE = fit_exposed_share(SERIES)
HELD_OUT = [
    (series, gpus)
    for series in SERIES
    if not series.is_fitted and series.source in (FOUNDRY, TORCHTITAN, WHITEFIBER, GOYAL)
    for gpus in series.predicted
]


@pytest.mark.parametrize(("series", "gpus"), HELD_OUT, ids=lambda value: getattr(value, "name", value))
def test_held_out(series, gpus):
    assert series.model_efficiency(gpus, SHARE) == pytest.approx(series.efficiency(gpus), rel=0.05)


def test_the_range_of_a_plan_holds_what_was_fitted():
    low, high = EXPOSED_SHARE
    assert low < SHARE < high
    assert low < fit_exposed_share([replace(each, is_fitted=True) for each in SERIES]) < high
