"""bench/gpu: which parts run and for how long, what a part saves, and its verdicts; no GPU is needed."""

import importlib.util
import json
import math
import subprocess
import sys
from itertools import product

import pytest

from gpu import __main__ as program
from gpu import correctness, memory, throughput
from gpu.rows import GRACE, Launcher, NotMeasured, Part, Row, not_measured
from largebatch.config import load_config
from largebatch.plan import resolve
from largebatch.tools.verify.jobs import JobFailed
from performance import GPU_PARTS
from record import Comparison, Figure, Record, behind, read_record, tables, take_facts

# --- which parts ------------------------------------------------------------------------------------------------------


def test_parts_are_chosen_by_name():
    assert program.chosen_parts("memory,correctness", 1) == ["memory", "correctness"]
    assert program.chosen_parts("ablations memory ablations", 8) == ["ablations", "memory"]
    with pytest.raises(ValueError, match=r"no part 'speed'; PARTS is one or several of correctness,ablations,memory"):
        program.chosen_parts("memory,speed", 1)


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_all_parts_are_measured_but_scaling_on_one_gpu(gpus):
    scaling = [] if gpus == 1 else ["scaling"]
    assert program.chosen_parts(None, gpus) == ["correctness", "ablations", "memory", "throughput", *scaling]


@pytest.mark.parametrize(("device", "minutes"), [("cuda", 25), ("cpu", 15)])
def test_all_parts_end_in_their_time(device, minutes):
    left = 60 * minutes
    for number in range(len(GPU_PARTS)):
        seconds = program.seconds_of_the_next(GPU_PARTS[number:], device, left)
        assert 0 < seconds <= 7 * 60
        # Every part takes all that it may.
        left -= seconds + GRACE
    assert left >= -1e-6
    for name in GPU_PARTS:
        assert program.seconds_of_the_next([name], device, 60 * minutes) == 7 * 60
    assert program.seconds_of_the_next(["memory"], device, 10) == 0


# --- what a part saves ------------------------------------------------------------------------------------------------


class Clock:
    """Says the time that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def part(tmp_path, clock):
    record = Record("gpu", "T", "A", {"device": "cpu"}, take_facts(("torch",)))
    return Part(record, tmp_path / "new/part.json", seconds=100, clock=clock)


def figure(name, *samples):
    return Figure(name, "s", [*samples])


def test_every_row_is_saved_before_the_next_begins(part, tmp_path):
    saved = []

    def measure(_):
        saved.append([each.what for each in read_record(tmp_path / "new/part.json").figures])
        return [figure(f"row {len(saved)}", 1.0)]

    part.measure([Row(name, measure) for name in "abc"])
    assert saved == [[], ["row 1"], ["row 1", "row 2"]]
    file = tmp_path / "new/part.json"
    assert read_record(file) == part.record
    assert json.loads(file.read_text())["seconds of each row"] == {"a": 0.0, "b": 0.0, "c": 0.0}
    assert [path.name for path in file.parent.iterdir()] == ["part.json"]


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_row_that_fails_is_recorded_and_the_others_run(part, at_once):
    def fail(_):
        raise RuntimeError("out of memory\nand more")

    def fail_in_a_job(_):
        raise JobFailed([(0, "Traceback\nValueError: in the job", "error: what to write instead\n")])

    def refuse(_):
        raise NotMeasured("deepspeed is not installed")

    rows = {"fails": fail, "job": fail_in_a_job, "zero1": refuse, "works": lambda _: [figure("works", 2.0), "a remark"]}
    part.measure([Row(name, measure) for name, measure in rows.items()], at_once)
    record = part.record
    assert {each.what: each.samples for each in record.figures} == {"fails": [], "job": [], "zero1": [], "works": [2.0]}
    assert sorted(record.remarks) == [
        "a remark",
        "fails: not measured: failed: RuntimeError: out of memory.",
        "job: not measured: failed: what to write instead.",
        "zero1: not measured: deepspeed is not installed.",
    ]


def test_after_its_time_a_part_starts_no_row(part, clock):
    left = []

    def measure(deadline):
        left.append(deadline.seconds_left)
        clock.now += 60
        return [figure("measured", 1.0)]

    part.measure([Row(name, measure) for name in ("first", "second", "third")])
    # A row that begins in time may take until the part has to end.
    assert left == [100 + GRACE, 40 + GRACE]
    assert part.record.remarks == ["third: not measured: the part's time was up."]


def test_results_of_each_kind_go_where_the_tables_find_them(part):
    comparison = Comparison("s", "a", [{"a": 1.0, "b": 2.0}], "case")
    part.measure([Row("row", lambda _: [comparison, figure("x", 1.0), "remark"])])
    assert (part.record.comparisons, part.record.remarks) == ([comparison], ["remark"])
    assert not_measured("row", "why") == [Figure("row", "", []), "row: not measured: why."]


def test_without_deepspeed_its_strategies_are_not_measured(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deepspeed" else find_spec(name))
    launcher = Launcher(1, ("ddp", "zero1"))
    assert launcher.environment("ddp")["WORLD_SIZE"] == "1"
    with pytest.raises(NotMeasured, match="deepspeed is not installed"):
        launcher.environment("zero1")


WITHOUT_DEEPSPEED = """
import sys
from importlib.machinery import PathFinder

class WithoutDeepSpeed(PathFinder):
    @classmethod
    def find_spec(cls, name, *where):
        return None if name.partition(".")[0] == "deepspeed" else super().find_spec(name, *where)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutDeepSpeed
import largebatch.tools.verify.preload
assert "largebatch.backend.fsdp" in sys.modules and "largebatch.run" in sys.modules
"""


@pytest.mark.slow
def test_without_deepspeed_jobs_still_come_from_a_warm_process():
    subprocess.run([sys.executable, "-c", WITHOUT_DEEPSPEED], check=True)


# --- correctness ------------------------------------------------------------------------------------------------------


def test_the_largest_difference_of_losses():
    assert correctness.largest_difference([2.0, 4.0], [2.0, 4.0]) == 0.0
    assert correctness.largest_difference([2.0, 4.1], [2.5, 4.0]) == pytest.approx(0.2)
    assert correctness.largest_difference([2.0], [2.0, 4.0]) == math.inf
    assert correctness.largest_difference([], []) == math.inf
    assert correctness.largest_difference([math.nan, 2.0], [2.0, 2.0]) == math.inf
    assert correctness.largest_difference([2.0, math.nan], [2.0, 2.0]) == math.inf


class FakeRuns(correctness.Runs):
    """Runs whose losses are given instead of trained."""

    def __init__(self, trained):
        super().__init__(launcher=None, is_small=True)
        self._given = iter(trained)

    def _train(self, *_, **__):
        losses = next(self._given)
        if losses is None:
            raise RuntimeError("it failed")
        return losses


@pytest.mark.parametrize(
    ("precision", "loss", "is_missed"),
    [("fp32", 2.0001, False), ("fp32", 2.0003, True), ("bf16", 2.039, False), ("bf16", 2.041, True)],
)
def test_a_run_is_compared_with_its_reference(part, precision, loss, is_missed):
    runs = FakeRuns([[4.0, 2.0], [4.0, loss], [4.0, loss]])
    setting = correctness.Setting("gpt_pydoc", "ddp", precision, compiled=False, recomputed=False, resumed=True)
    rows = [
        Row("reference", lambda deadline: runs._refer("gpt_pydoc", precision, deadline)),
        Row(setting.name, lambda deadline: runs._compare(setting, deadline)),
        Row("rerun", lambda deadline: runs._rerun(setting, deadline)),
    ]
    part.measure(rows)
    compared, rerun = part.record.figures
    assert compared.what == f"gpt_pydoc, ddp, {precision}, resumed"
    assert compared.samples == [pytest.approx((loss - 2) / 2)]
    assert ("missed" in "\n".join(tables(part.record))) is is_missed is bool(behind(part.record))
    # Another result of the same settings is a result, not a failure.
    assert (rerun.samples, rerun.at_most) == ([0.0], None)


def test_without_its_reference_a_run_is_not_measured(part):
    runs = FakeRuns([None])
    setting = correctness.Setting("gpt_pydoc", "ddp", "fp32", compiled=False, recomputed=False, resumed=False)
    part.measure(
        [
            Row("reference", lambda deadline: runs._refer("gpt_pydoc", "fp32", deadline)),
            Row("run", lambda deadline: runs._compare(setting, deadline)),
        ]
    )
    assert part.record.remarks == [
        "reference: not measured: failed: RuntimeError: it failed.",
        "run: not measured: its reference on the CPU failed.",
    ]


def test_the_sample_has_every_pair_that_can_be_trained():
    sample = correctness.sample()
    assert len(sample) <= 40
    assert len(set(sample)) == len(sample)
    assert sample == correctness.sample()
    flags = [each.compiled for each in sample]
    assert flags == sorted(flags)
    values = {
        "recipe": correctness.RECIPES,
        "strategy": correctness.STRATEGIES_AND_SINGLE,
        "precision": ("fp32", "bf16"),
        "compiled": (False, True),
        "recomputed": (False, True),
        "resumed": (False, True),
    }
    every = [correctness.Setting(*each) for each in product(*values.values())]
    names = [*values]
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
            for pair in product(values[first], values[second]):
                have = [each for each in every if (getattr(each, first), getattr(each, second)) == pair]
                if any(each.can_be_trained for each in have):
                    assert any(each in sample for each in have), (first, second, pair)


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_no_recipe_refuses_a_setting_of_the_sample(is_small, processes):
    for setting in correctness.sample():
        words = correctness.words_of(setting, is_small, processes)
        config = load_config(correctness.recipe_file(setting.recipe), words)
        resolve(config, 1 if setting.strategy == "single" else processes)


@pytest.mark.slow
def test_a_run_and_its_host_waits_on_the_cpu(part):
    runs = correctness.Runs(Launcher(1, ("ddp",)), is_small=True)
    wanted = ["gpt_pydoc, fp32, reference on the CPU", "host waits, gpt_pydoc, ddp"]
    rows = [row for row in runs.rows() if row.name in wanted]
    setting = correctness.Setting("gpt_pydoc", "ddp", "fp32", compiled=False, recomputed=True, resumed=True)
    part.measure([*rows, Row(setting.name, lambda deadline: runs._compare(setting, deadline))])
    waits, compared = part.record.figures
    assert (waits.samples, waits.at_most) == ([pytest.approx(0, abs=10)], 0)
    assert compared.samples[0] <= 1e-4


# --- memory and throughput --------------------------------------------------------------------------------------------


class FakeLauncher:
    world_size = 1

    def run(self, _seconds, _strategy, function, *_, **__):
        return {memory.planned: 10 * 2**30, memory.peak_of: int(self.peak * 2**30)}[function]


@pytest.mark.parametrize(("peak", "is_missed"), [(10.4, False), (10.6, True), (9.6, False), (9.4, True)])
def test_a_peak_is_compared_with_the_plan(part, peak, is_missed):
    launcher = FakeLauncher()
    launcher.peak = peak
    case = ("gpt2_124m", "ddp", ())
    part.measure([Row("case", lambda deadline: memory.compare(launcher, case, False, deadline))])
    (ratio,) = part.record.figures
    assert ratio.what == f"GPT-2 124M, ddp: {peak:.2f} GiB of the plan's 10.00"
    assert ratio.samples == [pytest.approx(peak / 10)]
    assert bool(behind(part.record)) is is_missed


def test_utilization_is_that_of_the_data_sheet():
    # 6 x 124.4e6 + 12 x 12 x 768 x 1,024 operations per token; embedding and output layer share their weights.
    flops = 6 * (124.4e6 - 1024 * 768) + 12 * 12 * 768 * 1024
    found = throughput.utilization("gpt2_124m", False, "NVIDIA H200", 400_000)
    assert found == pytest.approx(400_000 * flops / 989e12, rel=0.01)
    assert throughput.utilization("gpt2_124m", False, "another GPU", 400_000) is None
