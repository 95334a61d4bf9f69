"""bench/gpu: rows are saved one by one, and the settings that are tried can be trained; no GPU is needed."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch

from gpu import correctness, forward_ablations
from gpu.__main__ import seconds_of_the_next
from gpu.compiled import train_compiled
from gpu.kernels import KERNELS, KernelClock
from gpu.rows import GRACE, Launcher, NotMeasured, Part, Row
from jobs import run_job
from largebatch.config import load_config
from largebatch.plan import resolve
from largebatch.tools.local_jobs.jobs import JobFailed
from paths import PYDOC
from performance import GPU_PARTS
from record import Comparison, Figure, Record, read_record, take_facts
from resuming import TINY_GPT


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


def test_every_row_is_saved_before_the_next_begins(part, tmp_path):
    file, saved = tmp_path / "new/part.json", []
    comparison = Comparison("s", "a", [{"a": 1.0, "b": 2.0}], "case")

    def measure(_):
        saved.append([each.what for each in read_record(file).figures])
        return [Figure(f"row {len(saved)}", "s", [1.0]), comparison, "a remark"]

    part.measure([Row(name, measure) for name in "abc"])
    assert saved == [[], ["row 1"], ["row 1", "row 2"]]
    assert read_record(file) == part.record
    assert (part.record.comparisons, part.record.remarks) == ([comparison] * 3, ["a remark"] * 3)
    assert json.loads(file.read_text())["seconds of each row"] == {"a": 0.0, "b": 0.0, "c": 0.0}


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_row_that_fails_is_recorded_and_the_others_run(part, at_once, tmp_path):
    def fail(_):
        raise RuntimeError("out of memory\nand more")

    def fail_in_a_job(_):
        raise JobFailed([(0, "Traceback\nValueError: in the job", "error: what to write instead\n")])

    def fail_to_compile(_):
        advice = "Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace"
        raise JobFailed([(0, f"Traceback of rank 0\nBackendMismatch: not cast\n\n{advice}\n", "a warning of torch\n")])

    def refuse(_):
        raise NotMeasured("deepspeed is not installed")

    rows = {
        "fails": fail,
        "job": fail_in_a_job,
        "compiled": fail_to_compile,
        "zero1": refuse,
        "works": lambda _: [Figure("works", "s", [2.0]), "a remark"],
    }
    part.measure([Row(name, measure) for name, measure in rows.items()], at_once)
    record = part.record
    found = {each.what: each.samples for each in record.figures}
    assert found == {"fails": [], "job": [], "compiled": [], "zero1": [], "works": [2.0]}
    assert sorted(record.remarks) == [
        "a remark",
        "compiled: not measured: failed: rank 0: BackendMismatch: not cast.",
        "fails: not measured: failed: RuntimeError: out of memory.",
        "job: not measured: failed: what to write instead.",
        "zero1: not measured: deepspeed is not installed.",
    ]
    # What one line has no room for.
    kept = (tmp_path / "new/failures.txt").read_text()
    assert sorted(re.findall(r"^=== (.*)$", kept, re.MULTILINE)) == ["part: compiled", "part: fails", "part: job"]
    for text in ("in fail\n", "and more", "Traceback of rank 0", "a warning of torch", "ValueError: in the job"):
        assert text in kept


def test_only_rows_that_are_asked_for_are_measured(tmp_path, clock, capsys):
    rows = [Row(name, lambda _, name=name: [Figure(name, "s", [1.0])]) for name in ("GPT, ddp", "GPT, fsdp", "ResNet")]
    for only, expected in ((["gpt DDP", "resnet"], ["GPT, ddp", "ResNet"]), (["llama"], [])):
        part = Part(Record("gpu", "T", "A", {}, take_facts(())), tmp_path / "part.json", 100, only, clock)
        part.measure(iter(rows))
        assert [each.what for each in part.record.figures] == expected
    assert "no row has all of these words; there are: GPT, ddp; GPT, fsdp; ResNet" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", [9, 25])
def test_a_call_ends_in_its_time_whatever_its_last_rows_take(minutes):
    left = 60 * minutes
    for number in range(len(GPU_PARTS)):
        left -= seconds_of_the_next(GPU_PARTS[number:], "cuda", left) + GRACE
    assert left >= -1e-6


def test_a_commit_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert take_facts(())["commit"] == "unknown"
    monkeypatch.setenv("LARGEBATCH_COMMIT", "v1-3-gabc")
    assert take_facts(())["commit"] == "v1-3-gabc"


def test_after_its_time_a_part_starts_no_row(part, clock):
    left = []

    def measure(deadline):
        left.append(deadline.seconds_left)
        clock.now += 60
        return [Figure("measured", "s", [1.0])]

    part.measure([Row(name, measure) for name in ("first", "second", "third")])
    # A row that begins in time may take until the part has to end.
    assert left == [100 + GRACE, 40 + GRACE]
    assert part.record.remarks == ["third: not measured: the part's time was up."]


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_no_recipe_refuses_a_setting_of_the_sample(is_small, processes):
    for setting in correctness.sample():
        words = correctness.words_of(setting, is_small, processes)
        config = load_config(correctness.recipe_file(setting.recipe), words)
        resolve(config, 1 if setting.strategy == "single" else processes)


def test_the_kernels_of_a_step():
    clock = KernelClock(None, steps=2, warmup=0)
    clock.begin_turn(KERNELS)
    for _ in range(2):
        torch.mm(torch.ones(64, 64), torch.ones(64, 64)).sum()
    kernels = clock.end_turn()
    assert {each.name: each.calls for each in kernels}["aten::mm"] == 1
    assert kernels == sorted(kernels, reverse=True)
    clock.begin_turn(True)
    assert isinstance(clock.end_turn(), float)


def flags_of_compiled_code():
    """With which values of its flag the ablation of DDP's optimizer compiles code."""
    flags = set()

    def backend(graph, _):
        flags.add(torch._dynamo.config.optimize_ddp)
        return graph

    def take_one_step_each(_, __, variants):
        for variant in variants.values():
            variant()()

    torch.compile = partial(torch.compile, backend=backend)
    forward_ablations.in_turns = take_one_step_each
    forward_ablations.ddp_optimizer(True)
    return flags


@pytest.mark.slow
def test_both_variants_of_an_ablation_are_compiled():
    (flags,) = run_job(flags_of_compiled_code, strategy="ddp", world_size=1)
    assert flags == {True, False}


def train_without_a_compiler(run_dir):
    def compile_nothing(*_):
        raise RuntimeError("no such compiler")

    torch.compile = partial(torch.compile, backend=compile_nothing)
    words = (*TINY_GPT, "--compute.compile=on", "--train.stop_after_steps=2")
    train_compiled(PYDOC, *words, run_dir=run_dir)


@pytest.mark.slow
def test_a_row_of_compiled_code_fails_where_a_run_would_go_on_eagerly(tmp_path):
    with pytest.raises(JobFailed, match=r"the model is not compiled: on rank 0: .* no such compiler"):
        run_job(train_without_a_compiler, tmp_path / "run", strategy="single", world_size=1)


@pytest.mark.slow
def test_bits_of_two_runs_on_the_cpu(part):
    runs = correctness.Runs(Launcher(1, ("ddp",)), is_small=True)
    part.measure(row for row in runs.rows() if row.name == correctness.exact_name("gpt_pydoc"))
    assert [(each.samples, each.at_most) for each in part.record.figures] == [([0], 0)]
    assert correctness.number_of_differences({1: 0.5, "w": np.ones(2)}, {1: 0.5, "w": np.array([1, 1 + 2e-16])}) == 1


@pytest.mark.slow
def test_a_run_on_the_cpu_where_nothing_waits_for_a_gpu(part):
    runs = correctness.Runs(Launcher(1, ("ddp",)), is_small=True)
    waits = ["host waits, gpt_pydoc, ddp", "loading behind a busy GPU"]
    wanted = ["gpt_pydoc, fp32, reference on the CPU", *waits]
    rows = [row for row in runs.rows() if row.name in wanted]
    setting = correctness.Setting("gpt_pydoc", "ddp", "fp32", compiled=False, recomputed="selective", resumed=True)
    part.measure([*rows, Row(setting.name, lambda deadline: runs._compare(setting, deadline))])
    *not_measured, compared = part.record.figures
    assert [(each.what, each.samples) for each in not_measured] == [(name, []) for name in waits]
    assert part.record.remarks == [f"{name}: not measured: this machine has no GPU." for name in waits]
    assert compared.samples[0] <= 1e-4
