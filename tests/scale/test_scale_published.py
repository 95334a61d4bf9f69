"""bench/scale against published figures: those that nothing was fitted to are within 5 %."""

from dataclasses import replace

import pytest

from published import SERIES, fit_exposed_share

SHARE = fit_exposed_share(SERIES)
HELD_OUT = [(series, gpus) for series in SERIES if not series.is_fitted for gpus in series.predicted]
BY_NAME = {series.name: series for series in SERIES}


@pytest.mark.parametrize(("series", "gpus"), HELD_OUT, ids=lambda value: getattr(value, "name", value))
def test_held_out(series, gpus):
    assert series.model_efficiency(gpus, SHARE) == pytest.approx(series.efficiency(gpus), rel=0.05)


@pytest.mark.parametrize(
    ("name", "gpus", "efficiency"),
    [
        ("ResNet-50, P100, Goyal et al.", 256, 0.90),
        ("MPT-7B, H100", 512, 0.909),
        ("Llama 8B, H100, torchtitan, compiled", 128, 0.977),
    ],
)
def test_the_figures_asked_for_are_held_out(name, gpus, efficiency):
    series = BY_NAME[name]
    assert (series.reference, series.is_fitted) == (8, False)
    assert series.efficiency(gpus) == pytest.approx(efficiency, abs=5e-4)


def test_better_than_no_model():
    """Perfect scaling is within 5 % of many of them, too."""

    def squares(predict):
        return sum((predict(series, gpus) / series.efficiency(gpus) - 1) ** 2 for series, gpus in HELD_OUT)

    assert squares(lambda series, gpus: series.model_efficiency(gpus, SHARE)) < squares(lambda *_: 1.0) / 3


def test_the_fit_sees_the_fitted_alone():
    others = [each if each.is_fitted else replace(each, throughput={8: 2.0, 16: 1.0}) for each in SERIES]
    assert fit_exposed_share(others) == SHARE


def test_the_fit_finds_the_share():
    """Throughputs that the model itself has made with a share of 0.3."""
    made = []
    for series in SERIES:
        first = series.throughput[series.reference]
        rest = {gpus: first * series.model_efficiency(gpus, 0.3) for gpus in series.predicted}
        made.append(replace(series, throughput={series.reference: first} | rest))
    assert fit_exposed_share(made) == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("series", [each for each in SERIES if each.name.startswith("MPT")], ids=lambda each: each.name)
def test_layers_of_mpt(series):
    """NumParams is 12 width^2 + 13 width a layer, embeddings of 50,368 tokens and 2,048 positions, and one norm."""
    widths = {"125M": 768, "350M": 1024, "760M": 1536, "1B": 2048, "3B": 2560, "7B": 4096}
    widths |= {"13B": 5120, "30B": 7168, "70B": 8192}
    width, layers = widths[series.name.split("-")[1].split(",")[0]], series.job.units - 1
    assert series.job.params == layers * (12 * width**2 + 13 * width) + (50368 + 2048) * width + 2 * width
