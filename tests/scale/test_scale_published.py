"""`estimate.step_time` against published figures that nothing was fitted to."""

from dataclasses import replace

import pytest

from largebatch.estimate.step_time import EXPOSED_SHARE
from published import FOUNDRY, GOYAL, SERIES, TORCHTITAN, WHITEFIBER, fit_exposed_share

SHARE = fit_exposed_share(SERIES)
HELD_OUT = [(series, gpus) for series in SERIES if not series.is_fitted for gpus in series.predicted]
OF_ONE_FORM = [(series, gpus) for series, gpus in HELD_OUT if series.source in (FOUNDRY, TORCHTITAN, WHITEFIBER, GOYAL)]
BY_NAME = {series.name: series for series in SERIES}


@pytest.mark.parametrize(("series", "gpus"), OF_ONE_FORM, ids=lambda value: getattr(value, "name", value))
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


def root_mean_square(predict, points):
    return (sum((predict(*point) / point[0].efficiency(point[1]) - 1) ** 2 for point in points) / len(points)) ** 0.5


def test_half_the_error_of_no_model_where_scaling_is_lost():
    """Perfect scaling is near many figures, too; not near these."""
    lost = [(series, gpus) for series, gpus in HELD_OUT if series.efficiency(gpus) < 0.9]
    assert len(lost) >= 15
    model = root_mean_square(lambda series, gpus: series.model_efficiency(gpus, SHARE), lost)
    assert model <= root_mean_square(lambda *_: 1.0, lost) / 2


def test_the_range_of_a_plan_holds_what_was_fitted():
    low, high = EXPOSED_SHARE
    assert low < SHARE < high
    assert low < fit_exposed_share([replace(each, is_fitted=True) for each in SERIES]) < high


def test_hsdp_against_fsdp():
    """oumi's pull request 213, on 4 nodes of 4 GPUs."""
    fsdp, hsdp = (BY_NAME[f"Llama 2B, A100, oumi, {name}"] for name in ("FULL_SHARD", "HYBRID_SHARD"))
    assert hsdp.efficiency(16) > fsdp.efficiency(16)
    assert hsdp.model_efficiency(16, SHARE) > fsdp.model_efficiency(16, SHARE)
    assert hsdp.reference == fsdp.reference == 4
    assert hsdp.throughput[4] == fsdp.throughput[4]


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
    width = widths[series.name.split("-")[1].split(",")[0]]
    gathered = next(each for each in series.sent(2) if each.operation == "gather")
    params = (gathered.calls - 1) * (12 * width**2 + 13 * width) + (50368 + 2048) * width + 2 * width
    # In bf16, each of the units padded to two processes.
    assert 2 * params <= gathered.size <= 2 * (params + gathered.calls)


def test_a_step_too_short_for_its_communication():
    series = BY_NAME["MPT-1B, H100"]
    with pytest.raises(ValueError, match=r"on 128 GPUs communicates for longer than a step of 0\.001 s"):
        series.computing_seconds(0.001, SHARE)
