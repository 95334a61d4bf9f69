"""What a report says, what it may not do, and what cannot be reported."""

import json
import os
import sys

import numpy as np
import pytest

from largebatch.__main__ import main
from paths import PYDOC
from reading_reports import Page
from run_folders import HISTORY, evaluation_line, metric_line, started, write_lines, write_run

pytestmark = pytest.mark.slow

VERSIONS = {"largebatch": "0.1.0", "torch": "2.13.0"}
LAST = started(150, 4, recipe="recipes/x/last.json", versions=VERSIONS, world_size=4)
# A path that closes a script if it is not escaped.
EVIL = 'run<b></script><script>alert("1")&amp;$x$'


def report(*folders, axis=None):
    out = folders[0].with_name("report.html")
    words = [f"--axis={axis}"] if axis else []
    assert main(["report", *map(str, folders), "--out", str(out), *words]) == 0
    return Page(out)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A run with everything, one that still runs and has a name made of markup, and one of another task."""
    folder = tmp_path_factory.mktemp("report")
    folders = [folder / "small", folder / EVIL, folder / "text"]
    plans = [
        write_run(folders[0], history=[*HISTORY, LAST]),
        write_run(folders[1], ("--batch.global_batch_size=512",), steps=range(1, 40), kind=None),
        write_run(folders[2], config=PYDOC, steps=range(10, 31, 10)),
    ]
    return plans[0], report(*folders, axis="step")


def test_results_are_those_of_the_files(comparison):
    _, page = comparison
    assert page.column("run") == ["small", EVIL, "text"]
    assert page.column("status") == [
        "finished after step 200",
        "running, or killed; after step 39",
        "finished after step 30",
    ]
    assert page.row("step, last known") == ["200", "39", "30"]
    assert page.row("samples, last known") == ["12,800", f"{39 * 512:,}", "960"]
    assert page.row("minutes, last known") == ["0.23", "0.05", "0.04"]
    assert page.row("tokens, last known") == ["–", "–", "122,880"]
    assert page.column("evaluation: accuracy, last and range") == ["0.9175\n0.9175 to 0.98", "–", "–"]
    assert page.column("batch.global_batch_size") == ["64", "512", "32"]
    assert page.column("processes x strategy") == ["4 x ddp", "2 x ddp", "2 x ddp"]
    assert page.row("recipe") == ["recipes/x/last.json", "–", "–"]
    assert page.row("versions")[0] == "largebatch 0.1.0, torch 2.13.0"
    assert page.row("history")[0].splitlines()[2:6] == [
        "after step 73: stopped by SIGTERM, after step 73",
        "after step 60: started on 2 x ddp",
        "after step 120: skipped the loss is nan",
        "after step 150: failed no progress",
    ]
    assert page.row("batch.global_batch_size") == ["64", "512", "32"]
    fields = page.tables[1][1:]
    shared = [len(set(values)) == 1 for _, *values in fields]
    assert 0 < shared.index(True) == shared.count(False)
    assert page.row("seed") == ["0", "0", "0"]


@pytest.mark.parametrize("plan", [{}, {"total_steps": "many"}])
def test_a_run_without_an_ending_is_not_killed_after_its_last_step(plan, run_dir):
    """Even if its plan is from a different version."""
    write_run(run_dir, steps=range(50, 201, 50), kind=None)
    file = run_dir / "plan.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"stop_after_steps": 200} | plan))
    assert report(run_dir).column("status") == ["after its last step, 200"]


def test_a_run_without_its_history_tells_by_its_summary_where_it_was_trained(run_dir):
    """As those of bench/results."""
    write_run(run_dir, steps=range(1, 3))
    (run_dir / "history.jsonl").unlink()
    assert "processes x strategy" not in report(run_dir).tables[0][0]
    (run_dir / "summary.json").write_text('{"world_size": 8, "strategy": "zero2"}')
    assert report(run_dir).column("processes x strategy") == ["8 x zero2"]


def test_what_a_pattern_has_besides_runs_is_told_and_left_out(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    for name in ("a", "b"):
        write_run(sweep / name, steps=range(1, 3))
    (sweep / "logs/a").mkdir(parents=True)
    (sweep / "sweep.json").write_text("{}")
    assert report(*sorted(sweep.iterdir())).column("run") == ["a", "b"]
    assert capsys.readouterr().err == f"left out, without a plan.json: {sweep}/logs, {sweep}/sweep.json\n"


def test_columns_are_in_the_order_of_their_use(tmp_path):
    """Results that only the second run has precede its state, too."""
    write_run(tmp_path / "begun", ("--compute.compile=off", "--data.num_workers=1"), steps=range(1, 2))
    write_run(tmp_path / "done", ("--batch.global_batch_size=512", "--optimizer.momentum=0.8"), steps=range(50, 51))
    headings = report(tmp_path / "begun", tmp_path / "done").tables[0][0]
    results = ["loss, last and range", *(f"evaluation: {name}, last and range" for name in ("loss", "accuracy"))]
    decisive = ["batch.global_batch_size", "optimizer.momentum"]
    others = ["compute.compile", "data.num_workers"]
    assert headings == ["run", *results, "processes x strategy", "status", *decisive, *others]


def test_what_is_off_in_all_runs_is_no_difference_between_them(tmp_path):
    write_run(tmp_path / "warm")
    write_run(tmp_path / "cold", ("--learning_rate.warmup=null",))
    page = report(tmp_path / "warm", tmp_path / "cold")
    headings = page.tables[0][0]
    assert "learning_rate.warmup.duration.epochs" in headings
    assert not {"learning_rate.warmup", "learning_rate.warmup.duration.steps"} & {*headings}
    assert "Recipe:" not in page.text


def test_curves_are_those_of_the_files(comparison):
    plan, page = comparison
    evaluations = ["evaluation: loss", "evaluation: accuracy"]
    # The batch is constant in each run, and the first table has it.
    assert page.titles() == [*evaluations, "loss", "lr", "grad_norm", "samples_per_second"]
    truth = [(step, evaluation_line(plan, step)["accuracy"]) for step in (50, 100, 150, 200)]
    np.testing.assert_allclose(page.points("evaluation: accuracy", 0), truth)


def test_other_axes(tmp_path):
    """Several runs are compared over samples unless another axis is given; what a run does not log is not drawn."""
    folders = [tmp_path / "small", tmp_path / "text"]
    steps = [range(10, 201, 10), range(10, 31, 10)]
    write_run(folders[0], steps=steps[0])
    write_run(folders[1], steps=steps[1], config=PYDOC)
    # What a step of a run is; 128 tokens in each sample of text, and none in images.
    for axis, run, of_a_step in (("samples", 0, 64), ("minutes", 0, 0.07 / 60), ("tokens", 1, 4096)):
        page = report(*folders, axis=axis)
        assert page.layout["xaxis"]["title"]["text"] == axis
        places = [place for place, _ in page.points("loss", run)]
        np.testing.assert_allclose(places, [of_a_step * step for step in steps[run]], rtol=1e-12)
    assert {trace["legendgroup"] for trace in page.data} == {"1"}
    assert report(folders[0]).layout["xaxis"]["title"]["text"] == "step"
    assert report(*folders).layout["xaxis"]["title"]["text"] == "samples"


def test_names_close_no_script_and_nothing_is_loaded(comparison):
    _, page = comparison
    assert EVIL not in page.source
    assert EVIL in page.text
    # The page's own, plotly's settings, plotly, and the figure.
    assert [tag for tag, _ in page.tags].count("script") == page.source.count("</script>") == 4
    assert [tag for tag, _ in page.tags].count("title") == 1
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": policy}) in page.tags
    assert not [attributes for _, attributes in page.tags if {"src", "href", "data"} & attributes.keys()]


def test_evaluations_of_several_sets_after_one_step(run_dir):
    write_run(run_dir, steps=range(1, 3))
    values = [{"loss": 2.0}, {"far/loss": 3.0}]
    write_lines(run_dir / "evaluations.jsonl", [{"step": 2, "samples": 64} | value for value in values])
    page = report(run_dir)
    for name, value in (("loss", "2"), ("far/loss", "3")):
        assert page.column(f"evaluation: {name}, last and range") == [f"{value}\n{value} to {value}"]


def test_a_long_run_is_a_small_file_and_keeps_its_spike(run_dir, tmp_path):
    words = ('--train.duration={"steps": 10000}',)
    losses = {step: 2.0 + np.sin(step / 5) for step in range(1, 5_001)}
    losses[3_333] = 80.0
    plan = write_run(tmp_path / "short", words)
    lines = [metric_line(plan, step, loss=loss) for step, loss in losses.items()]
    write_run(run_dir, words, steps=range(5_000, 5_001), metrics=lines)
    page = report(run_dir)
    curve = page.points("loss", 0)
    assert len(curve) == 2000
    assert (3_333, 80.0) in curve
    # Each point is one that was logged.
    assert all(losses[step] == value for step, value in curve)
    assert (tmp_path / "report.html").stat().st_size < 7e6


def test_mean_rates_are_weighted_by_their_time(run_dir):
    """A second at 100 samples a second and nine at 10 are 19 on average."""
    lines = [
        {"step": step, "samples": 64 * step, "loss": 2.0, "samples_per_second": rate, "seconds": seconds}
        for step, rate, seconds in ((1, 100.0, 1.0), (2, 10.0, 10.0))
    ]
    write_run(run_dir, kind="stopped", metrics=lines)
    assert report(run_dir).row("samples_per_second, mean") == ["19.000"]


def test_the_noise_scale_has_its_interval(run_dir):
    lines = [
        {"step": 10, "loss": 2.0},
        {"step": 20, "noise_scale": 400.0, "noise_scale_low": 300.0, "noise_scale_high": 600.0},
        # Without an upper end.
        {"step": 30, "noise_scale": 500.0, "noise_scale_low": 450.0},
    ]
    write_run(run_dir, metrics=lines)
    page = report(run_dir)
    assert page.points("noise_scale", 0) == [(20, 400), (30, 500)]
    assert page.points("noise_scale_low", 0) == [(20, 300), (30, 450)]
    # A single value does not vary.
    assert "noise_scale_high" not in page.titles()


def test_a_run_that_is_writing(run_dir):
    """The last lines are torn, and stay so, and there is nothing yet but a loss."""
    write_run(run_dir, kind=None)
    (run_dir / "evaluations.jsonl").unlink()
    lines = [{"step": step, "samples": 64 * step, "loss": 2.0} for step in (1, 2)]
    write_lines(run_dir / "metrics.jsonl", lines, torn='{"step": 3, "samples": 19')
    write_lines(run_dir / "history.jsonl", [started(0)], torn='{"event": "stop')
    page = report(run_dir)
    assert page.titles() == ["loss"]
    assert page.points("loss", 0) == [(1, 2.0), (2, 2.0)]
    assert (run_dir / "metrics.jsonl").read_text().endswith('"samples": 19')


def test_a_report_is_written_over_and_nothing_else(run_dir, tmp_path, refusal_of):
    write_run(run_dir, steps=range(1, 3))
    first = report(run_dir)
    write_lines(run_dir / "metrics.jsonl", [])
    assert report(run_dir).source != first.source
    mine = b"<html>a page of mine, beside a largebatch report</html>"
    out = tmp_path / "report.html"
    out.write_bytes(mine)
    error = refusal_of("report", run_dir, "--out", out)
    assert f"{out} exists and is not a report; choose another --out" in error
    assert out.read_bytes() == mine
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere", "nowhere has no plan.json; give the folder of a run"),
        ("circle", "circle has no plan.json"),
        ("run nowhere", "nowhere has no plan.json"),
        ("file", "file has no plan.json"),
        ("run --out file/x.html", "File exists: 'file'"),
        ("run --axis tokens", "--axis tokens: no run has logged it; choose another"),
    ],
)
def test_what_cannot_be_reported(words, message, tmp_path, monkeypatch, refusal_of):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to("circle")
    write_run(tmp_path / "run", steps=range(1, 3))
    error = refusal_of("report", *words.split())
    assert error.startswith("error: ")
    assert message in error


def with_values(run, file, values):
    """A run in whose file other values stand."""
    write_run(run, steps=range(50, 52), history=[started(0, recipe="recipes/x/run.json")])
    path = run / file
    if file.endswith(".jsonl"):
        write_lines(path, [json.loads(line) | values for line in path.read_text().splitlines()])
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return run


def test_values_that_cannot_be_shown_are_left_out(tmp_path):
    changes = [
        ("plan.json", {"total_steps": "many"}),
        ("plan.json", {"timeline": [1]}),
        ("metrics.jsonl", {"step": None}),
        ("evaluations.jsonl", {"half a character: \ud800": 0.5}),
        ("history.jsonl", {"recipe": 7, "world_size": [[]]}),
    ]
    page = report(*(with_values(tmp_path / str(number), *change) for number, change in enumerate(changes)))
    assert page.row("recipe") == [*["recipes/x/run.json"] * 4, "7"]
    numbers = {"loss": float("nan"), "lr": "high", "mfu": 10**400}
    assert report(with_values(tmp_path / "alone", "metrics.jsonl", numbers)).titles()[2:3] == ["grad_norm"]
    many = {f"number {index}": index for index in range(1_000)}
    assert len(report(with_values(tmp_path / "many", "evaluations.jsonl", many)).titles()) < 300


def test_a_damaged_plan_is_told(run_dir):
    write_run(run_dir, steps=range(50, 52))
    (run_dir / "plan.json").write_text("[]")
    assert report(run_dir).row("plan") == ["damaged, or written by a different version of largebatch"]


def test_pipes_and_links_in_a_run_folder_are_not_read(tmp_path, refusal_of):
    run = tmp_path / "run"
    write_run(run, steps=range(50, 52))
    write_run(tmp_path / "other", ("--seed=5",), steps=range(1, 3))
    (tmp_path / "secret.json").write_text('{"password": "SECRET"}')
    (run / "config.json").unlink()
    (run / "config.json").symlink_to("../secret.json")
    page = report(run, tmp_path / "other")
    assert "SECRET" not in page.text
    assert page.row("seed")[0] == "–"
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    refusal_of("report", run)


def test_without_plotly(run_dir, monkeypatch, refusal_of):
    write_run(run_dir, steps=range(1, 3))
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert refusal_of("report", run_dir) == 'error: curves need plotly; pip install "largebatch[report]"\n'
