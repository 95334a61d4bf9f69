"""What a report says, what it may not do, and what cannot be reported."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.plan import explain
from largebatch.tools.command_line import main
from largebatch.tools.report import page as report_page
from paths import PYDOC
from reading_reports import read
from run_folders import HISTORY, evaluation_line, metric_line, started, write_lines, write_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A run with everything, one that still runs and has a name made of markup, and one of another task."""
    folder = tmp_path_factory.mktemp("report")
    evil = '<script>alert("1")</script>&amp;$x$'
    folders = [folder / "small", folder / evil.replace("/", ""), folder / "text"]
    plans = [
        write_run(folders[0], history=HISTORY),
        write_run(folders[1], ("--batch.global_batch_size=512",), steps=range(1, 40), outcome="running"),
        write_run(folders[2], config=PYDOC, steps=range(10, 31, 10)),
    ]
    out = folder / "comparison.html"
    assert main(["report", *map(str, folders), "--out", str(out)]) == 0
    return folders, plans, *read(out)


def test_results_are_those_of_the_files(comparison):
    folders, plans, _, page = comparison
    assert page.rows[0] == ["", *(folder.name for folder in folders)]
    assert page.row("global batch size, largest") == ["64", "512", "32"]
    assert page.row("steps") == ["200 of 440", "39 of 40", "30 of 200"]
    assert page.row("samples") == ["12,800", f"{39 * 512:,}", "960"]
    losses = [metric_line(plan, step)["loss"] for plan, step in zip(plans, (200, 39, 30), strict=True)]
    assert [float(value) for value in page.row("training loss of the last logged step")] == pytest.approx(
        losses, rel=1e-3
    )
    last = evaluation_line(plans[0], 200)
    assert page.row("evaluation: accuracy, last") == [f"{last['accuracy']:.4g} after step 200", "–", "–"]
    assert page.row("evaluation: accuracy, highest") == ["0.98 after step 100", "–", "–"]
    assert page.row("evaluation: loss, lowest") == [f"{last['loss']:.4g} after step 200", "–", "–"]
    rates = [metric_line(plans[1], step)["samples_per_second"] for step in range(1, 40)]
    assert page.row("samples per second, mean")[1] == f"{sum(rates) / 39:.2f}"
    assert page.row("time in training")[:2] == ["0:00:14", "0:00:03"]
    assert page.row("starts") == ["3", "1", "1"]
    assert page.row("steps that were not finite") == ["1", "0", "0"]
    assert page.row("checkpoints not written") == ["1", "0", "0"]
    convention = "unknown: the model is no transformer"
    assert page.row("model FLOPs, as counted") == [convention, "–", convention]


def test_only_differences_of_the_recipes(comparison):
    folders = comparison[0][:2]
    assert main(["report", *map(str, folders), "--out", str(folders[0].parent / "two.html")]) == 0
    _, page = read(folders[0].parent / "two.html")
    rows = page.rows[len(page.rows) - 1 - page.rows[::-1].index(page.rows[0]) :]
    assert rows[1:] == [["batch.global_batch_size", "64", "512"]]


def test_the_plan_is_in_the_words_of_explain(comparison):
    _, plans, _, page = comparison
    said = " ".join(page.text.split())
    for plan in plans:
        for line in explain(plan, "x").splitlines()[1:]:
            assert line[16:].strip() in page.text, line
    assert "betas (0.9, " in said


def test_a_plan_of_several_runs_is_shown_once(tmp_path):
    for name, size in (("a", 64), ("b", 64), ("c", 128)):
        write_run(tmp_path / name, (f"--batch.global_batch_size={size}",), steps=range(1, 3))
    folders = [str(tmp_path / name) for name in "abc"]
    assert main(["report", *folders, "--out", str(tmp_path / "report.html")]) == 0
    text, page = read(tmp_path / "report.html")
    assert page.text.count("one epoch is") == 2
    plans = text[text.index(">Plan<") : text.index(">History<")]
    assert re.findall("<h3>(.*?)</h3>", plans) == ["a, b", "c"]


def test_what_a_start_was_of(tmp_path):
    """The recipe's file and the versions of the last start; a version that has changed is in the history."""
    versions = {"largebatch": "0.1.0", "torch": "2.12.0", "numpy": "2.4.6"}
    history = [
        started(0, recipe="recipes/x/first.json", versions=versions),
        started(50, 2, recipe="recipes/x/second.json", versions=versions | {"torch": "2.13.0"}),
    ]
    write_run(tmp_path / "run", history=history)
    write_run(tmp_path / "old", history=[started(0)])
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "run"), str(tmp_path / "old"), "--out", str(out)]) == 0
    _, page = read(out)
    assert page.row("recipe") == ["recipes/x/second.json", "–"]
    assert page.row("versions at the last start") == ["largebatch 0.1.0, torch 2.13.0", "–"]
    changes = [event["text"] for event in page.events if event["data-kind"] == "changed"]
    assert len(changes) == 1
    assert "changed: torch 2.13.0, previously 2.12.0" in changes[0]


def test_names_are_text(comparison):
    _, _, text, page = comparison
    assert "script" not in page.tags
    assert "<script" not in text
    assert '<script>alert("1")<script>&amp;$x$' in page.text


def test_loads_nothing(comparison):
    _, _, text, page = comparison
    loading = {"src", "srcset", "data", "poster", "action", "background"}
    assert not [place for place in page.attributes if place[1] in loading]
    assert all(value.startswith("#") for _, name, value in page.attributes if name.endswith("href"))
    assert not re.search(r"@import|https?://|//[a-z]|url\((?!#)", text)
    assert not {"link", "script", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_ids_are_unique_and_references_are_kept(comparison):
    _, _, text, page = comparison
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = {value[1:] for _, name, value in page.attributes if name.endswith("href")}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", text))
    wanted |= {value for _, name, value in page.attributes if name in ("for", "aria-labelledby")}
    assert wanted <= set(ids)


def test_for_those_who_do_not_see_it(comparison):
    folders, _, _, page = comparison
    labels = [value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == 2 * page.tags.count("figure")
    assert any(label.startswith("Training loss against optimizer steps: small from 1.8") for label in labels)
    assert all(folders[1].name in label for label in labels if label.startswith("Training loss"))
    assert page.tags.count("h1") == 1
    assert ("html", "lang", "en") in page.attributes
    roles = [value for tag, name, value in page.attributes if tag == "svg" and name == "role"]
    assert roles == ["img"] * len(labels)


def test_a_run_that_is_writing(tmp_path, capsys):
    """The last lines are torn, and there is nothing yet but a loss; the report does not touch what is there."""
    run = tmp_path / "run"
    write_run(run, outcome="running", history=[started(0)])
    (run / "evaluations.jsonl").unlink()
    lines = [{"step": step, "samples": 64 * step, "loss": 2.0} for step in (1, 2)]
    write_lines(run / "metrics.jsonl", lines, torn='{"step": 3, "samples": 19')
    write_lines(run / "history.jsonl", [started(0)], torn='{"event": "stop')
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert main(["report", str(run)]) == 0
    assert "wrote" in capsys.readouterr().out
    _, page = read(run / "report.html")
    assert page.tags.count("figure") == 1
    assert "running, or killed" in page.row("outcome")[0]
    assert {name: (run / name).read_bytes() for name in before} == before
    assert {path.name for path in run.iterdir()} - before.keys() == {"report.html"}


def test_mean_rates_are_weighted_by_their_time(tmp_path):
    """A second at 100 samples a second and nine at 10 are 19 on average."""
    lines = [
        {"step": step, "samples": 64 * step, "loss": 2.0, "samples_per_second": rate, "seconds": seconds}
        for step, rate, seconds in ((1, 100.0, 1.0), (2, 10.0, 10.0))
    ]
    write_run(tmp_path / "run", outcome="stopped", metrics=lines)
    assert main(["report", str(tmp_path / "run")]) == 0
    _, page = read(tmp_path / "run/report.html")
    assert page.row("samples per second, mean") == ["19.00"]


def test_a_run_that_has_just_begun(tmp_path):
    write_run(tmp_path / "run", outcome="running")
    for name in ("metrics.jsonl", "evaluations.jsonl", "history.jsonl", "status.json"):
        (tmp_path / "run" / name).unlink()
    assert main(["report", str(tmp_path / "run")]) == 0
    _, page = read(tmp_path / "run/report.html")
    assert "No step has been logged yet" in page.text
    assert page.row("steps") == ["0 of 440"]


def test_a_plan_of_another_version(tmp_path):
    write_run(tmp_path / "run")
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    del plan["compile"]
    (tmp_path / "run/plan.json").write_text(json.dumps(plan))
    assert main(["report", str(tmp_path / "run")]) == 0
    _, page = read(tmp_path / "run/report.html")
    assert "written by a different version of largebatch" in page.text
    assert page.row("samples") == ["12,800"]


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    for place in ("a/x/run", "b/x/run"):
        write_run(tmp_path / place)
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "a/x/run"), str(tmp_path / "b/x/run"), "--out", str(out)]) == 0
    _, page = read(out)
    assert page.rows[0] == ["", "a/x/run", "b/x/run"]
    assert "None: all runs have the same recipe" in page.text


def test_a_report_is_written_over_and_nothing_else(tmp_path, capsys):
    write_run(tmp_path / "run")
    out = tmp_path / "report.html"
    words = ["report", str(tmp_path / "run"), "--out", str(out)]
    assert main(words) == 0
    first = out.read_bytes()
    write_lines(tmp_path / "run/metrics.jsonl", [])
    assert main(words) == 0
    assert out.read_bytes() != first
    capsys.readouterr()
    mine = b"<html>a page of mine, beside a largebatch report</html>"
    out.write_bytes(mine)
    assert main(words) == 2
    assert f"{out} exists and is not a report; choose another --out" in capsys.readouterr().err
    assert out.read_bytes() == mine
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "is not a folder; give the folder of a run"),
        (["empty"], "has no plan.json, which a run writes when it starts"),
        (["run", "run/"], "is given twice; give each run once"),
        (["run", "--out", "report.pdf"], "give a file name that ends in .html"),
        (["run", "--out", "file/x.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_reported(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    write_run(tmp_path / "run", steps=range(1, 3))
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("plan.json", {"total_steps": "many"}),
        ("plan.json", {"peak_lr": [0.1]}),
        ("plan.json", {"schedule": None}),
        ("plan.json", {"timeline": [1]}),
        ("plan.json", {"optimizer_options": {}}),
        ("metrics.jsonl", {"step": None}),
        ("metrics.jsonl", {"loss": float("nan")}),
        ("evaluations.jsonl", {"half a character: \ud800": 0.5}),
        ("history.jsonl", {"time": None}),
    ],
)
def test_values_that_cannot_be_shown_are_left_out(file, values, tmp_path, monkeypatch):
    write_run(tmp_path / "run", steps=range(50, 52), history=HISTORY)
    path = tmp_path / "run" / file
    if file.endswith(".jsonl"):
        write_lines(path, [json.loads(line) | values for line in path.read_text().splitlines()])
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        # Curves are of lines alone.
        monkeypatch.setattr(report_page, "svg", lambda *_: "")
    assert main(["report", str(tmp_path / "run")]) == 0
    _, page = read(tmp_path / "run/report.html")
    assert page.row("starts") == ["3"]


@pytest.mark.parametrize("content", ['{"task": ', "[]", "3", "", '"\\ud800"', "[" * 100_000])
def test_damaged_files_are_left_out(content, tmp_path):
    run = tmp_path / "run"
    write_run(run, steps=range(50, 52), history=HISTORY)
    for path in run.iterdir():
        path.write_text(content)
    assert main(["report", str(run)]) == 0
    _, page = read(run / "report.html")
    assert page.row("steps") == ["0"]
    assert "plan.json is damaged" in page.text
    assert "history.jsonl is empty or missing" in page.text


@pytest.mark.parametrize("without", ["metrics", "evaluations"])
def test_samples_behind_the_last_line_are_those_of_the_plan(without, tmp_path):
    """While the batch grows, no one size is that of all steps."""
    sizes = [{"from": {"steps": 0}, "size": 64}, {"from": {"steps": 100}, "size": 128}]
    folder = tmp_path / "run"
    plan = write_run(folder, (f"--batch.global_batch_size={json.dumps(sizes)}",), range(10, 91, 10), "stopped")
    (folder / f"{without}.jsonl").unlink()
    (folder / "status.json").write_text(json.dumps({"outcome": "stopped", "step": 155}))
    assert main(["report", str(folder)]) == 0
    _, page = read(folder / "report.html")
    assert page.row("samples") == [f"{plan.batch_at(155).samples_before:,}"]


def test_names_that_are_no_text_and_links_in_a_circle(tmp_path, capfd):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")
    write_run(Path(folder), steps=range(1, 3))
    assert main(["report", folder]) == 0
    (tmp_path / "circle").symlink_to("circle")
    assert main(["report", str(tmp_path / "circle")]) == 2
    assert "circle is not a folder" in capfd.readouterr().err


def test_neither_torch_nor_a_display(tmp_path):
    write_run(tmp_path / "run", steps=range(1, 3))
    program = (
        "import sys; from largebatch.tools.command_line import main; "
        f"code = main(['report', {str(tmp_path / 'run')!r}]); "
        "sys.exit(code or {'torch', 'accelerate', 'matplotlib.pyplot', 'tkinter'} & sys.modules.keys() or 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_without_matplotlib(tmp_path):
    """Other commands do without it; this one names what to install."""
    write_run(tmp_path / "run", steps=range(1, 3))
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/matplotlib.py").write_text('raise ModuleNotFoundError("hidden", name="matplotlib")')
    paths = os.pathsep.join([str(tmp_path / "hidden"), *sys.path])
    results = [
        subprocess.run(
            [sys.executable, "-m", "largebatch", *words],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": paths},
        )
        for words in (
            ["report", str(tmp_path / "run")],
            ["plan", str(PYDOC), "--world-size", "2"],
            ["report", "--help"],
        )
    ]
    assert [result.returncode for result in results] == [2, 0, 0]
    assert results[0].stderr == 'error: plots need matplotlib; pip install "largebatch[report]"\n'
    assert not (tmp_path / "run/report.html").exists()
