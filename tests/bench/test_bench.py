"""The programs of bench/: each starts, and what they share counts and records rightly."""

import importlib
import re
import shutil
import sys
import time

import pytest

import performance
import scale
from experiments import EXPERIMENTS
from fuzz import TARGETS, fuzz, warm_up
from fuzzing.cases import HELD, Case, run_case
from gpu import correctness, memory, training
from gpu.__main__ import seconds_of_the_next
from gpu.rows import GRACE, Deadline, Launcher, NotMeasured, Part, Row, measured_before
from largebatch.config import load_config
from largebatch.estimate.step_time import EXPOSED_SHARE
from largebatch.plan import resolve
from largebatch.tools.local_jobs.jobs import JobFailed
from paths import ROOT
from planted_bugs import ALL
from planting import plant
from record import Figure, Record, read_record, take_facts
from runs import matrix, overrides_of

BENCH = ROOT / "bench"
FILES = [*BENCH.glob("*.py"), BENCH / "science/batch_size.py"]


@pytest.mark.slow
def test_every_program_starts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tests/backend")])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    programs = [file.stem for file in FILES if "ArgumentParser(" in file.read_text()]
    for program in (*programs, "gpu.__main__"):
        monkeypatch.setattr(sys, "argv", [f"{program}.py", "--help"])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(program).main()
        assert ended.value.code == 0, program
        assert "usage:" in capsys.readouterr().out
    for module in ("same_run", "gpu.memory", "gpu.scaling", "gpu.throughput", "gpu.training"):
        importlib.import_module(module)


def test_the_page_of_performance_is_made_of_the_results():
    assert performance.DOCUMENT.read_text(encoding="utf-8") == performance.document(), "run bench/performance.py"
    makefile = (ROOT / "Makefile").read_text()
    programs = re.search(r"^BENCH \?= (.*)$", makefile, re.MULTILINE).group(1).split()
    assert {files.partition("/")[0] for files, *_ in performance.ROWS} == {*programs, "gpu"}
    readme = (BENCH / "README.md").read_text()
    assert [file.name for file in FILES if file.name not in readme] == []


def test_step_times_against_published_figures_that_nothing_was_fitted_to():
    share = scale.fit_exposed_share(scale.SERIES)
    low, high = EXPOSED_SHARE
    assert low < share < high
    sources = (scale.FOUNDRY, scale.TORCHTITAN, scale.WHITEFIBER, scale.GOYAL)
    held_out = [each for each in scale.predictions(share) if not each.series.is_fitted]
    errors = {f"{each.series.name}, {each.gpus}": each.error for each in held_out if each.series.source in sources}
    assert len(errors) > 30
    assert {name: error for name, error in errors.items() if abs(error) > 0.05} == {}


# --- what changes with the recipes ------------------------------------------------------------------------------------


def test_each_bug_can_be_planted(tmp_path):
    for number, planted in enumerate(ALL):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in {file for file, _, _ in planted.edits}:
            shutil.copy(planted.recipe.parent / file, folder)
        for file, old, new in planted.edits:
            plant(str(folder / file), old, new)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_of_an_experiment_has_a_plan(name):
    experiment = EXPERIMENTS[name]
    for point in matrix(experiment, experiment.base_lrs[0], [3]):
        plan = resolve(load_config(experiment.recipe, overrides_of(experiment, point)), world_size=1)
        assert (plan.max_global_batch_size, plan.seed) == (point.batch, 3)
        # BatchNorm's micro-batch, Goyal's n, is the same at every batch size.
        assert plan.micro_batch_size <= experiment.reference


# --- fuzzing ----------------------------------------------------------------------------------------------------------


def test_a_few_damaged_inputs():
    warm_up()
    for target in TARGETS:
        outcomes = fuzz(target, range(2), 7)
        assert [(number, outcome.output) for number, _, outcome in outcomes if outcome.verdict != HELD] == []


@pytest.mark.parametrize(
    ("work", "verdict"),
    [
        (lambda _: 1 // 0, "traceback"),
        (lambda _: sys.exit(2), "exit code 2 without a reason"),
        (lambda _: print("\x1b[31mred"), "terminal escape"),
        (lambda _: 0, HELD),
    ],
)
def test_verdicts_on_damaged_inputs(work, verdict, tmp_path):
    assert run_case(Case([], tmp_path, work)).verdict == verdict


# --- GPUs -------------------------------------------------------------------------------------------------------------


def part_in(file, gpu=None, **settings):
    """A part that is recorded in a file, and has 100 s."""
    return Part(Record("gpu", "T", "A", {}, take_facts((), gpu)), file, 100, **settings)


def raising(error):
    def measure(_):
        raise error

    return measure


def test_a_row_that_fails_is_recorded_and_the_others_are_measured(tmp_path):
    now = [0.0]

    def measure(deadline):
        assert deadline.seconds_left == 100 + GRACE
        now[0] = 100.0
        return [Figure("works", "s", [2.0])]

    rows = {
        "fails": raising(RuntimeError("out of memory\nand more")),
        "job": raising(JobFailed([(0, "Traceback\nValueError: in the job", "error: what to write instead\n")])),
        "zero1": raising(NotMeasured("deepspeed is not installed")),
        "works": measure,
        "late": measure,
    }
    part_in(tmp_path / "part.json", clock=lambda: now[0]).measure(Row(name, each) for name, each in rows.items())
    record = read_record(tmp_path / "part.json")
    assert [each.what for each in record.figures] == [*rows]
    assert [each.samples for each in record.figures] == [[], [], [], [2.0], []]
    assert record.remarks == [
        "fails: not measured: failed: RuntimeError: out of memory.",
        "job: not measured: failed: what to write instead.",
        "zero1: not measured: deepspeed is not installed.",
        "late: not measured: the part's time was up.",
    ]
    # What one line has no room for.
    assert "and more" in (tmp_path / "failures.txt").read_text()


@pytest.mark.parametrize("minutes", [9, 25])
def test_a_call_ends_in_its_time_whatever_its_last_rows_take(minutes):
    left = 60 * minutes
    for number in range(len(performance.GPU_PARTS)):
        left -= seconds_of_the_next(performance.GPU_PARTS[number:], "cuda", left) + GRACE
    assert left >= -1e-6


def test_every_setting_that_is_tried_on_gpus_has_a_plan():
    for setting in correctness.sample():
        words = correctness.words_of(setting, is_small=False, processes=1)
        resolve(load_config(correctness.recipe_file(setting.recipe), words), world_size=1)
    for job, batch, _ in training.CASES:
        config = load_config(job.path, training.words_of(job, batch, 1, is_small=False))
        assert resolve(config, world_size=1).max_global_batch_size == batch


def test_rows_that_are_missing(tmp_path, monkeypatch):
    """One that failed is, and one of another GPU."""
    monkeypatch.setattr("gpu.rows.RESULTS", tmp_path)
    rows = [Row("measured", lambda _: [Figure("number", "s", [1.0])]), Row("failed", raising(RuntimeError()))]
    part_in(tmp_path / "gpu/H100/memory-a.json", "H100").measure([Row("other", rows[0].measure)])
    part_in(tmp_path / "gpu/H200/memory-a.json", "H200").measure(rows)
    known = measured_before("memory", "H200")
    assert known == {"measured"}
    assert measured_before("throughput", "H200") == set()
    part_in(tmp_path / "again.json", known=known).measure(rows)
    assert [figure.what for figure in read_record(tmp_path / "again.json").figures] == ["failed"]


@pytest.mark.slow
def test_a_row_is_rehearsed_on_the_cpu(tmp_path):
    name = correctness.exact_name("gpt_pydoc")
    rows = correctness.Runs(Launcher(1, ("ddp",)), is_small=True).rows()
    part_in(tmp_path / "part.json", only=[name]).measure(rows)
    (figure,) = read_record(tmp_path / "part.json").figures
    assert (figure.what, figure.samples) == (name, [0])


@pytest.mark.slow
@pytest.mark.parametrize("job", ["gpt2_124m", "resnet50", "clip_b32", "bert_large_512"])
def test_jobs_of_a_gpu_are_rehearsed_without_a_hub(job):
    """On generated samples."""
    launcher = Launcher(1, ["zero1"])
    deadline = Deadline(time.monotonic() + 120, time.monotonic)
    (figure,) = memory.compare(launcher, (job, "zero1", ()), True, deadline)
    assert figure.samples[0] > 0
