"""Tables of a sweep against numbers that were worked out by hand."""

import json
import re
from dataclasses import asdict

import pytest

from ending_files import end_run
from largebatch.errors import UserError
from largebatch.tools.sweep.points import BATCH, RATE, Sweep, grid
from largebatch.tools.sweep.results import Results, shown
from largebatch.tools.sweep.verdicts import Cell
from paths import DIGITS
from run_folders import write_lines, write_run

LOWEST = " (the lowest of the listed rates: extend the list)"
HIGHEST = LOWEST.replace("lowest", "highest")
SETTINGS = ("--learning_rate.reference_batch_size=64", "--train.duration.epochs=20")
# The last evaluation's loss of seeds 0, 1 and 2, after the rate and the batch size; "-" for a run that diverged.
LOSSES = """
0.1   64  1.0 1.2 1.1
0.2   64  1.6 1.4 1.5
0.1  128  1.3 1.5 1.4
0.2  128  1.0 1.1 0.9
0.1  256  1.2 1.0 1.4
0.2  256  1.1 1.3 1.0
0.1  512  2.0  -  2.0
0.2  512  3.0 3.1  -
"""


def write_sweep(folder, table, **about):
    """A sweep whose runs have ended with these losses."""
    losses = {(float(rate), int(batch)): seeds for rate, batch, *seeds in map(str.split, table.split("\n")[1:-1])}
    rates, batches = (",".join(map(str, dict.fromkeys(values))) for values in zip(*losses, strict=True))
    words = ["--learning_rate.base_lr", rates, "--batch.global_batch_size", batches, *SETTINGS]
    sweep = Sweep(str(DIGITS), {}, grid(words, len(next(iter(losses.values())))), **about)
    (first, *_) = losses
    for point in sweep.points:
        # What has one value is no setting of the points.
        rate, batch = (point.settings.get(name, of) for name, of in zip((RATE, BATCH), first, strict=True))
        last = losses[rate, batch][point.seed]
        run = folder / point.name
        write_run(run, tuple(point.overrides), kind="training" if last == "-" else "finished")
        evaluated = {50: 2.5, 100: 1.25} | ({} if last == "-" else {200: float(last)})
        evaluations = [
            {"step": step, "samples": batch * step, "loss": loss, "accuracy": 1 - loss}
            for step, loss in evaluated.items()
        ]
        write_lines(run / "evaluations.jsonl", evaluations)
    (folder / "sweep.json").write_text(json.dumps(asdict(sweep)))
    return folder


def cells(table):
    """The cells of a table's rows, by the names of the rows, each with what is found of it, and its headings."""
    _, headings, *lines = table.splitlines()
    rows = [line for line in lines if ": best" not in line]
    found = {name: cells for name, *cells in (re.split(r" {2,}", row.strip()) for row in (headings, *rows))}
    for line in lines[len(rows) :]:
        name, _, finding = line.strip().partition(": best")
        found[name].append(f"best{finding}")
    return found


def cells_of(*arguments, **about):
    return cells(Results.read(write_sweep(*arguments, **about)).table())


def test_loss_against_rate_and_the_rule(tmp_path):
    table = Results.read(write_sweep(tmp_path, LOSSES)).table()
    title = "loss of the last evaluation, mean ± standard deviation over seeds (number of seeds)"
    assert table.splitlines()[0] == title + "; 24 of 24 points have ended"
    assert cells(table) == {
        "loss": [],
        "base_lr=0.1 global_batch_size=64": ["1.1 ± 0.1 (3)", f"best{LOWEST}"],
        "base_lr=0.2 global_batch_size=64": ["1.5 ± 0.1 (3)"],
        # At both sizes, the other rate is 0.4 above the best, whose standard error is 0.082: t = 4.9 with 4 degrees of
        # freedom, p = 0.004.
        "base_lr=0.1 global_batch_size=128": ["1.4 ± 0.1 (3)"],
        "base_lr=0.2 global_batch_size=128": ["1 ± 0.1 (3)", f"best{HIGHEST}; the rule does not hold"],
        # 0.067 above, and a standard error of 0.15.
        "base_lr=0.1 global_batch_size=256": ["1.2 ± 0.2 (3)"],
        "base_lr=0.2 global_batch_size=256": ["1.133 ± 0.15 (3)", f"best{HIGHEST}; the rule: cannot be told"],
        # Both rates diverge.
        "base_lr=0.1 global_batch_size=512": ["2 ± 0 (2, 1 diverged)"],
        "base_lr=0.2 global_batch_size=512": ["3.05 ± 0.071 (2, 1 diverged)"],
    }


# The rate that is predicted from the first size diverges at the last one.
DIVERGES = """
0.1   64  2.0 2.1
0.2   64  1.0 1.1
0.1  128  1.5 1.6
0.2  128  1.0 1.1
0.1  256  1.5 1.6
0.2  256  1.2  -
"""
TWO_RATES = """
0.1   64  1.25 1.35 1.45
0.2   64  1.0  1.1  1.2
0.1  128  1.0  1.1  1.2
0.2  128  1.25 1.35 1.45
"""
MORE_RATES = """0.4   64  5.0  5.1  5.2
0.8   64  5.0  5.1  5.2
0.4  128  5.0  5.1  5.2
0.8  128  5.0  5.1  5.2
"""
THREE_RATES = """
0.1   64  2.0  2.1
0.2   64  1.0  1.1
0.4   64  2.0  2.1
0.1  128  2.0  2.1
0.2  128  1.0  1.1
0.4  128  2.0  2.1
"""
UNCLEAR_AT_128 = "0.1  128  1.0  1.2\n0.2  128  1.1  1.2\n"


@pytest.mark.parametrize(
    ("table", "row", "finding"),
    [
        (DIVERGES, "base_lr=0.2 global_batch_size=128", f"best{HIGHEST}; the rule: cannot be told"),
        # The other rate is clearly worse at 64: 1 above, with a standard error of 0.071.
        (DIVERGES, "base_lr=0.1 global_batch_size=256", f"best{LOWEST}; the rule does not hold"),
        # In the middle of the list, clearly the best at both sizes.
        (THREE_RATES, "base_lr=0.2 global_batch_size=128", "best, as the rule predicts"),
        # Of one seed nothing is clear.
        (
            "\n0.1   64  2.0\n0.2   64  1.0\n0.1  128  1.5\n0.2  128  1.0\n",
            "base_lr=0.2 global_batch_size=128",
            f"best{HIGHEST}; the rule: cannot be told",
        ),
        # 0.2 may be the best at both sizes: at 64, 0.4 is the best of three seeds by less than half of a deviation.
        (
            "\n0.1   64  1.2  1.25 1.3\n0.2   64  1.02 1.05 1.08\n0.4   64  1.0  1.04 1.07\n"
            "0.1  256  1.3  1.32 1.34\n0.2  256  1.09 1.11 1.13\n0.4  256  1.29 1.31 1.33\n",
            "base_lr=0.2 global_batch_size=256",
            "best; the rule: cannot be told",
        ),
        # 0.25 with a standard error of 0.082: p = 0.019, below 5 %, but with more rates not below a third of that.
        (TWO_RATES, "base_lr=0.1 global_batch_size=128", f"best{LOWEST}; the rule does not hold"),
        (TWO_RATES + MORE_RATES, "base_lr=0.1 global_batch_size=128", f"best{LOWEST}; the rule: cannot be told"),
        # At 128, both rates may be the best; where all diverge first, none is predicted.
        (
            f"\n0.1   64  1.0  1.02\n0.2   64  1.5  1.52\n{UNCLEAR_AT_128}",
            "base_lr=0.1 global_batch_size=128",
            f"best{LOWEST}; the rule: cannot be told",
        ),
        (
            f"\n0.1   64   -   1.0\n0.2   64   -    -\n{UNCLEAR_AT_128}",
            "base_lr=0.1 global_batch_size=128",
            f"best{LOWEST}",
        ),
        # Equal results say nothing of the spread.
        (
            "\n0.1   64  1.0 1.0\n0.2   64  1.1 1.1\n0.1  128  1.1 1.1\n0.2  128  1.0 1.0\n",
            "base_lr=0.2 global_batch_size=128",
            f"best{HIGHEST}; the rule: cannot be told",
        ),
    ],
)
def test_what_is_found_of_the_rule(table, row, finding, tmp_path):
    assert cells_of(tmp_path, table)[row][1:] == [finding]


def test_a_batch_size_of_which_rates_are_missing_has_no_verdict(tmp_path):
    table = """
0.1   64  2.0
0.2   64  1.0
0.4   64  2.0
0.1  128  2.0
0.2  128  1.0
0.4  128  2.0
"""
    folder = write_sweep(tmp_path, table)
    end_run(folder / "base_lr=0.4_global_batch_size=128_seed=0", None)
    assert cells(Results.read(folder).table())["base_lr=0.2 global_batch_size=128"] == ["1 (1)", "best so far"]
    # Nor has a size without rates of the first to compare with.
    for run in folder.glob("*=64_seed=0"):
        end_run(run, None)
    end_run(folder / "base_lr=0.4_global_batch_size=128_seed=0", "finished")
    assert cells(Results.read(folder).table())["base_lr=0.2 global_batch_size=128"] == ["1 (1)", "best"]


def test_a_best_rate_between_others_is_not_at_an_end(tmp_path):
    """Listed in any order; the highest rate diverges, but was tried."""
    two = "\n0.2  64  1.0 1.1\n0.8  64   -  3.0\n"
    assert cells_of(tmp_path / "a", f"{two}0.1  64  1.2 1.3\n")["base_lr=0.2"][1:] == ["best"]
    assert cells_of(tmp_path / "b", two)["base_lr=0.2"][1:] == [f"best{LOWEST}"]
    # Not before there is a result of each rate.
    for seed in (0, 1):
        end_run(tmp_path / f"b/base_lr=0.8_seed={seed}", None)
    assert cells(Results.read(tmp_path / "b").table())["base_lr=0.2"][1:] == ["best so far"]


def test_of_an_accuracy_higher_is_better(tmp_path):
    """The accuracies are one minus the losses."""
    table = "\n0.1  64  0.3 0.1\n0.2  64  0.4 0.4\n"
    accuracies = cells_of(tmp_path, table, metric="accuracy", higher_is_better=True)
    assert [*accuracies.values()][1:] == [["0.8 ± 0.14 (2)", f"best{LOWEST}"], ["0.6 ± 0 (2)"]]


def test_samples_and_time_to_a_target(tmp_path):
    results = Results.read(write_sweep(tmp_path, "\n0.1   64  1.0 1.2 1.1\n0.1  128  2.0 1.2 2.0\n"))
    assert cells(results.table(target=1.25)) == {
        "loss": ["samples to 1.25", "tokens to 1.25", "minutes to 1.25"],
        # Every run is at 1.25 after step 100, of 0.07 s each.
        "global_batch_size=64": ["1.1 ± 0.1 (3)", "6,400 ± 0 (3)", "–", "0.1167 ± 0 (3)"],
        "global_batch_size=128": ["1.733 ± 0.46 (3)", "12,800 ± 0 (3)", "–", "0.1167 ± 0 (3)"],
    }
    reached = cells(results.table(target=1.1))
    assert [row[1] for row in reached.values()][1:] == ["12,800 ± 0 (2)", "–"]


def test_points_that_are_not_finished(tmp_path, refusal_of):
    folder = write_sweep(tmp_path, "\n0.1  64  1.0 1.2 1.1\n0.2  64  1.6 1.4 1.5\n")
    end_run(folder / "base_lr=0.1_seed=1", None)
    (folder / "base_lr=0.2_seed=0/plan.json").unlink()
    table = Results.read(folder).table()
    assert "; 4 of 6 points have ended" in table
    assert [row[0] for row in [*cells(table).values()][1:]] == ["1.05 ± 0.071 (2)", "1.45 ± 0.071 (2)"]
    for plan in folder.glob("*/plan.json"):
        plan.unlink()
    assert "no point of the sweep has begun yet" in refusal_of("report", folder)


def test_the_report_has_the_table(tmp_path, output_of, refusal_of):
    folder = write_sweep(tmp_path, "\n0.1  64  1.0 1.2 1.1\n0.2  64  1.5 1.5 1.5\n")
    row = f"  base_lr=0.1: best{LOWEST}"
    assert row in output_of("report", folder, "--target=1.3")
    assert row in (folder / "report.html").read_text()
    error = refusal_of("report", folder / "base_lr=0.1_seed=0", "--target=1")
    assert "--target needs the folder of a sweep" in error


def test_a_metric_that_no_evaluation_has_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--metric acuracy: runs are evaluated by loss, accuracy"):
        Results.read(write_sweep(tmp_path, LOSSES, metric="acuracy"))


def test_one_run_without_evaluations_does_not_hide_the_others(tmp_path):
    folder = write_sweep(tmp_path, "\n0.1  64  1.0 1.2\n0.2  64  1.5 1.5\n")
    (folder / "base_lr=0.1_seed=1/evaluations.jsonl").unlink()
    assert cells(Results.read(folder).table())["base_lr=0.1"] == ["1 (1)", "best so far"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((1234.0, 1234.5), "1,234 ± 0.35 (2)"),
        ((900.0, 1500.0), "1,200 ± 424 (2)"),
        ((20.0, 420.0), "220 ± 283 (2)"),
        ((0.0123456, 0.0123456), "0.01235 ± 0 (2)"),
    ],
)
def test_digits_that_tell(values, told):
    assert shown(Cell(values)) == told
