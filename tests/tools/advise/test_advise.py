"""`largebatch advise`: what is printed and refused."""

import json
import math
import re
import shlex
from functools import partial

import pytest

from largebatch.config import load_config
from largebatch.plan import resolve
from largebatch.tools.advise.advice import steps_and_samples
from paths import DIGITS, ROOT

GIVEN = ("--critical-batch", "1024")


@pytest.fixture
def advise(output_of, monkeypatch):
    """What it prints."""
    monkeypatch.chdir(ROOT)
    return partial(output_of, "advise")


@pytest.fixture
def refusal(refusal_of, monkeypatch):
    """Why it refuses."""
    monkeypatch.chdir(ROOT)
    return lambda *words: prose(refusal_of("advise", *words))


def prose(output):
    """The output without line breaks."""
    return " ".join(output.split())


def numbers(output, first):
    """The numbers after the batch size of a row, without separators of thousands."""
    row = next(line.strip() for line in output.splitlines() if line.strip().startswith(first))
    return [float(word) for word in re.findall(r"[\d.]+(?:e-\d+)?", row.removeprefix(first).replace(",", ""))]


def measured(folder, noise):
    """The words for a run whose summary has this noise scale, if any."""
    (folder / "summary.json").write_text(json.dumps({"noise_scale": noise} if noise else {"steps": 3}))
    return "--measured", folder


def fitted(folder, lines):
    """The words for points, given as lines of CSV."""
    (folder / "points.csv").write_text(f"batch,samples,spread,seeds\n{lines}")
    return "--fit", folder / "points.csv"


def test_steps_and_samples_are_on_the_curve_of_mccandlish(advise, tmp_path):
    noise = {"samples": 1024.0, "low": 828.0, "high": 1220.0}
    output = advise(*measured(tmp_path, noise), "--batches", "256,1024,4096")
    assert "Critical batch 1,024 samples (95 % confidence: 828 to 1,220), from the noise scale" in prose(output)
    assert "which stands in for it" in prose(output)
    assert "it can underestimate the critical batch by orders of magnitude (Merrill et al. 2025)" in prose(output)
    assert numbers(output, "batch 1,024 (knee)")[0] == 2
    for batch in ("256", "1,024 (knee)", "4,096"):
        steps, _, _, samples, _, _ = numbers(output, f"batch {batch}")
        assert (steps - 1) * (samples - 1) == pytest.approx(1, rel=0.02)
    # At the ends of the interval: 1 + 828 / 256 and 1 + 256 / 1220.
    assert numbers(output, "batch 256") == [5.0, 4.23, 5.77, 1.25, 1.21, 1.31]


def test_steps_of_the_recipe(advise):
    own = ("--batch.global_batch_size=1024", '--train.duration={"steps": 1000}')
    output = advise(DIGITS, *GIVEN, *own)
    assert "If the recipe reaches the loss, after 1,000 steps at batch 1,024" in prose(output)
    # From an eighth to eight times, by doubling the recipe's batch; S_min is 500 and E_min 512,000.
    assert re.findall(r"  batch ([\d,]+)", output) == ["128", "256", "512", "1,024", "2,048", "4,096", "8,192"]
    # The recipe's own batch is shown at any distance.
    far = advise(DIGITS, "--critical-batch=32", *own)
    assert re.findall(r"  batch ([\d,]+)", far) == ["4", "8", "16", "32", "64", "128", "256", "1,024"]
    assert numbers(output, "batch 1,024 (knee)") == [1000, 1024000]
    assert numbers(output, "batch 4,096")[:2] == [625, 4096 * 625]
    assert "Critical batch 1,024 samples (its error is not known), from --critical-batch" in prose(output)


def test_a_critical_batch_below_a_sample(advise):
    assert re.findall(r"  batch ([\d,]+)", advise("--critical-batch", "0.3")) == ["1", "2"]


def test_an_infinite_critical_batch_costs_no_samples():
    assert steps_and_samples(math.inf, 512, (100, 256)) == (50, 25600)


def test_a_batch_that_costs_nothing_is_not_the_models_critical_batch(refusal, tmp_path):
    """By the model, a run at the critical batch needs twice the samples."""
    (tmp_path / "critical_batch.json").write_text('{"samples": 512, "at_step": 100, "tolerance": 0.01, "sizes": []}')
    said = "a batch that costs nothing, which is below the critical batch of this model"
    assert said in refusal("--measured", tmp_path)


NO_NUMBER = "positive number of samples"


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (None, NO_NUMBER),
        ({"samples": None, "measurements": 0}, NO_NUMBER),
        ([1], NO_NUMBER),
        *(({"samples": samples}, NO_NUMBER) for samples in (10**400, 5e-324, math.nan)),
        (
            {"not_measured": "the noise cannot be told from zero"},
            ": the noise cannot be told from zero; give the folder",
        ),
        ({"samples": 64, "low": 0, "high": None}, "its noise scale may be any number of samples; measure in more"),
    ],
)
def test_a_noise_scale_that_says_nothing(noise, message, refusal, tmp_path):
    assert message in refusal(*measured(tmp_path, noise))


@pytest.mark.parametrize("high", ["wide", [1], {}, 10**400, math.nan, -1, 100.0])
def test_what_is_damaged_is_not_known(high, advise, tmp_path):
    noise = {"samples": 128.0, "low": 88.8, "high": high}
    assert "its error is not known" in prose(advise(*measured(tmp_path, noise)))


def test_a_form_that_fails_gives_no_advice(run_command, tmp_path):
    lines = "256,1000,0,5\n512,2000,0,5\n1024,1000,0,5\n"
    code, output, _ = run_command("advise", *fitted(tmp_path, lines))
    assert code == 1
    assert "the form fails (p < 0.01)" in prose(output)
    assert "Critical batch" not in output


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("256,9,0,5\n512,9,0,5\n1024,9,0,5\n", r"95 %: [\d,]+ to inf\); add larger"),
        ("256,9,0,5\n512,18,0,5\n1024,36,0,5\n", r"95 %: 0 to [\d.]+\); add smaller"),
    ],
)
def test_a_limit_gives_a_bound_and_no_knee(advise, tmp_path, lines, words):
    output = advise(*fitted(tmp_path, lines))
    assert re.search(rf"B_crit is not determined \({words} batch sizes", prose(output))
    assert "knee" not in output


def test_batches_beyond_the_points_are_marked(advise, tmp_path):
    words = fitted(tmp_path, "256,1000,10,5\n512,1500,10,5\n1024,2500,10,5\n")
    output = advise(*words, "--batches", "128,256,1024,2048")
    rows = [line.split("  ")[1] for line in output.splitlines() if line.startswith("  batch")]
    assert rows == ["batch 128 (extrapolated)", "batch 256 (knee)", "batch 1,024", "batch 2,048 (extrapolated)"]


def test_the_run_that_is_recommended_reaches_the_same_loss(advise):
    """A warmup in steps keeps its samples, and the rule scales the rate."""
    own = ("--batch.global_batch_size=64", '--train.duration={"steps": 300}')
    own += ('--learning_rate.warmup={"duration": {"steps": 10}, "start": "zero"}',)
    output = advise(DIGITS, "--critical-batch=256", "--batches=64,256", *own)
    command = next(line for line in output.splitlines() if line.startswith("  --batch.global_batch_size=256 "))
    overrides = shlex.split(command)
    # 300 (1 + 256 / 256) / (1 + 256 / 64)
    assert '--train.duration={"steps": 120}' in overrides
    before = resolve(load_config(DIGITS, own), 1)
    after = resolve(load_config(DIGITS, [*own, *overrides]), 1)
    assert after.max_peak_lr == 4 * before.max_peak_lr
    # Of 640 samples, in whole steps.
    assert (before.schedule.warmup, after.schedule.warmup) == (640, 768)
    assert f"Its peak learning rate is {after.max_peak_lr:.4g}, by the recipe's learning_rate.scaling." in output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((*GIVEN, "--target", "3"), "--target and the folder of a sweep as --fit require each other"),
        (("--fit", "recipes"), "--target and the folder of a sweep as --fit require each other"),
        ((), "one of the arguments --measured --critical-batch --fit is required"),
        ((*GIVEN, "--seed=3"), "--seed=3: without RECIPE, there are no overrides"),
        ((*GIVEN, "--batches", 10**400), f"--batches: '1{'0' * 39}' is not a positive"),
        *((("--critical-batch", number), "is not a positive number") for number in ("5e-324", "1e308", "nan")),
    ],
)
def test_contradictions(refusal, words, problem):
    assert problem in refusal(*words)
