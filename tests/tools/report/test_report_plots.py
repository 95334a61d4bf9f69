"""The curves and marks of a report, measured in its pictures, against the files of the runs."""

import numpy as np
import pytest

from largebatch.tools.command_line import main
from largebatch.tools.report.plots import WIDTH
from reading_reports import Plot, read
from run_folders import HISTORY, evaluation_line, metric_line, started, write_lines, write_run

pytestmark = pytest.mark.slow

STEPS = range(10, 201, 10)


def report(*folders, out):
    assert main(["report", *map(str, folders), "--out", str(out)]) == 0
    return read(out)


def test_curves_are_those_of_the_files(tmp_path):
    small = write_run(tmp_path / "small")
    large = write_run(tmp_path / "large", ("--batch.global_batch_size=512",), steps=range(1, 40))
    text, _ = report(tmp_path / "small", tmp_path / "large", out=tmp_path / "report.html")
    panels = {
        "Training loss": "loss",
        "Learning rate": "lr",
        "Gradient norm": "grad_norm",
        "Throughput": "samples_per_second",
    }
    for title, name in panels.items():
        for axis, place in (("step", "step"), ("samples", "samples")):
            plot = Plot(text, title, axis)
            for run, (plan, steps) in enumerate(((small, STEPS), (large, range(1, 40)))):
                lines = [metric_line(plan, step) for step in steps]
                truth = np.array([[line[place], line[name]] for line in lines])
                curve = plot.curve(f"run-{run}")
                # To a fraction of a pixel.
                np.testing.assert_allclose(curve[:, 0], truth[:, 0], atol=np.ptp(truth[:, 0]) / 1000)
                np.testing.assert_allclose(curve[:, 1], truth[:, 1], rtol=0.01, atol=0.001)


def test_evaluations(tmp_path):
    plan = write_run(tmp_path / "run")
    text, _ = report(tmp_path / "run", out=tmp_path / "report.html")
    lines = [evaluation_line(plan, step) for step in (50, 100, 150, 200)]
    for name in ("loss", "accuracy"):
        curve = Plot(text, f"Evaluation: {name}", "samples").curve("run-0")
        np.testing.assert_allclose(curve, [[line["samples"], line[name]] for line in lines], rtol=0.003)


def test_marks_are_where_things_happened(tmp_path):
    write_run(tmp_path / "run", history=HISTORY)
    text, page = report(tmp_path / "run", out=tmp_path / "report.html")
    events = {
        ("checkpoint_failed", 0, 50),
        ("stopped", 0, 73),
        ("restarted", 0, 60),
        ("checkpoint_not_used", 0, 73),
        ("skipped", 0, 120),
        ("failed", 0, 150),
        ("restarted", 0, 150),
    }
    for title in ("Training loss", "Evaluation: accuracy", "Learning rate", "Throughput"):
        for axis, samples in (("step", 1), ("samples", 64)):
            marks = Plot(text, title, axis).marks()
            assert marks.keys() == events
            for (_, _, step), place in marks.items():
                assert place == pytest.approx(samples * step, abs=0.3 * samples)
    # The same in words, and in the order of the file.
    assert [(event["data-kind"], int(event["data-step"])) for event in page.events] == [
        ("started", 0),
        ("checkpoint_failed", 50),
        ("stopped", 73),
        ("restarted", 60),
        ("checkpoint_not_used", 73),
        ("skipped", 120),
        ("failed", 150),
        ("restarted", 150),
        ("finished", 200),
    ]
    assert "skipped steps 118 to 120: the loss is nan" in page.text
    assert "step_00000073 not used: complete.json is missing" in page.text
    legend = page.text[page.text.index("against") : page.text.index("Training loss")]
    assert all(words in legend for words in ("checkpoint not written", "started again", "step skipped"))


def test_samples_of_marks_follow_the_batch_in_force(tmp_path):
    """After a change of the recipe, the plan has another batch size than the first steps had."""
    history = [started(0), started(100, 2, checkpoint="step_00000100"), started(205, 3)]
    plan = write_run(tmp_path / "run", history=history, outcome="running")
    for name, line_of in (("metrics", metric_line), ("evaluations", evaluation_line)):
        lines = [line_of(plan, step) for step in STEPS]
        for line in lines:
            line["samples"] = 32 * min(line["step"], 100) + 64 * max(line["step"] - 100, 0)
        write_lines(tmp_path / f"run/{name}.jsonl", lines)
    text, _ = report(tmp_path / "run", out=tmp_path / "report.html")
    marks = Plot(text, "Learning rate", "samples").marks()
    assert marks["restarted", 0, 100] == pytest.approx(3200, abs=20)
    assert marks["restarted", 0, 205] == pytest.approx(3200 + 105 * 64, abs=20)


def test_what_happened_behind_the_last_value_is_within_the_picture(tmp_path):
    write_run(tmp_path / "run", steps=range(10, 101, 10), history=[started(0), started(180, 2)], outcome="running")
    text, _ = report(tmp_path / "run", out=tmp_path / "report.html")
    plot = Plot(text, "Learning rate", "step")
    (mark,) = plot.parts["restarted-0-180"].iter("use")
    assert 0 < float(mark.get("x")) < WIDTH
    assert plot.marks()["restarted", 0, 180] == pytest.approx(180, abs=1)


def test_values_that_cannot_be_drawn_are_counted(tmp_path):
    plan = write_run(tmp_path / "run")
    lines = [metric_line(plan, step, **({"loss": float("nan")} if step in (50, 60) else {})) for step in STEPS]
    write_lines(tmp_path / "run/metrics.jsonl", lines)
    text, page = report(tmp_path / "run", out=tmp_path / "report.html")
    assert len(Plot(text, "Training loss", "step").curve("run-0")) == len(STEPS) - 2
    assert page.text.count("not shown, because not finite: 2 values") == 1


def test_a_long_run_is_a_small_file_and_keeps_its_spike(tmp_path):
    words = ('--train.duration={"steps": 100000}',)
    plan = write_run(tmp_path / "short", words)
    steps = np.arange(1, 50_001)
    losses = 2.0 + np.sin(steps / 5)
    losses[33_332] = 80.0
    line = metric_line(plan, 1)
    lines = [line | {"step": int(s), "samples": 64 * int(s), "loss": x} for s, x in zip(steps, losses, strict=True)]
    write_run(tmp_path / "run", words, steps=range(50_000, 50_001), metrics=lines)
    text, page = report(tmp_path / "run", out=tmp_path / "report.html")
    assert len(text) < 600_000
    assert "50,000 values: means of 400 equal parts" in page.text
    plot = Plot(text, "Training loss", "step")
    extremes, means = plot.curve("extremes-0"), plot.curve("run-0")
    assert extremes[extremes[:, 1].argmax()] == pytest.approx([33_333, 80.0], rel=0.01)
    assert extremes[[0, -1], 0] == pytest.approx([1, 50_000], abs=100)
    assert len(means) == 400
    whole = losses[:125].mean()
    assert means[0] == pytest.approx([63, whole], rel=0.02, abs=100)


def test_a_logarithmic_scale_only_where_it_helps(tmp_path):
    plan = write_run(tmp_path / "run")
    _, page = report(tmp_path / "run", out=tmp_path / "report.html")
    assert page.text.count("logarithmic scale") == 1
    write_lines(tmp_path / "run/metrics.jsonl", [metric_line(plan, step, loss=2.0 + step / 100) for step in STEPS])
    _, page = report(tmp_path / "run", out=tmp_path / "report.html")
    assert "logarithmic scale" not in page.text
