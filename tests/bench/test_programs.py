"""The programs of bench/: each can be asked for help, and those that measure our loop run at a small size."""

import importlib
import json
import sys
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from jobs import run_job
from largebatch.backend.deepspeed_config import fill_from_plan
from largebatch.config import load_config
from largebatch.plan import resolve
from paths import ROOT
from record import read_record

pytestmark = pytest.mark.slow

FILES = [*ROOT.glob("bench/*.py"), ROOT / "bench/scale/scale.py", ROOT / "bench/science/batch_size.py"]
PROGRAMS = sorted(
    file.stem for file in FILES if "ArgumentParser(" in file.read_text() and "__main__" in file.read_text()
)


def run(program, monkeypatch, *words):
    """Call a program's `main` in this process."""
    monkeypatch.setattr("sys.argv", [f"{program}.py", *map(str, words)])
    importlib.import_module(program).main()


def test_every_program_has_a_help_text(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tests/backend")])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for program in (*PROGRAMS, "gpu.__main__"):
        with pytest.raises(SystemExit) as ended:
            run(program, monkeypatch, "--help")
        assert ended.value.code == 0, program
        assert "usage:" in capsys.readouterr().out
    # These take no words.
    for program in ("performance", "same_run"):
        importlib.import_module(program)


def test_data_path(tmp_path, monkeypatch):
    import data_path

    monkeypatch.setattr(data_path, "COPIES", 1)
    monkeypatch.setattr(data_path, "NUM_PAIRS", 3000)
    # The program keeps neither where it prepared nor how.
    monkeypatch.setattr(data_path.prepared, "HF_HOME", "")
    out = tmp_path / "out.json"
    try:
        copy_context().run(run, "data_path", monkeypatch, "--json", out, "--rounds=1", "--batches=2")
    finally:
        datasets.enable_progress_bars()
    cases = {each.case: each.names for each in read_record(out).comparisons}
    assert cases["beside the model"] == ["model", "loading"]
    assert len(cases["order"]) == 6


def test_gpu_throughput_with_toys(tmp_path, monkeypatch):
    # The program sets them.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "out.json"
    words = ["--rounds=1", "--steps=1", "--warmup=1", "--strategies=ddp", "--jobs=gpt2_124m"]
    run("gpu_throughput", monkeypatch, "--toy", "--json", out, *words)
    ratios = json.loads(out.read_text())["median_ratio_to_bare"]
    assert {case: [*found] for case, found in ratios.items()} == {
        "GPT-2 124M, Trainer": ["bare", "trainer"],
        "GPT-2 124M, ddp": ["bare", "ours"],
    }


def test_loop_tax(monkeypatch):
    import loop_tax
    from paired import in_own_process

    # It exits with an error if ours does not take as many steps as the others.
    assert in_own_process(Path(loop_tax.__file__), "ours") > 0

    class Clock:
        steps = 0

        def step(self):
            self.steps += 1

    peer, clock = importlib.import_module("peers.digits.accelerate_loop"), Clock()
    monkeypatch.setattr(peer, "EPOCHS", 2)
    peer.train(clock)
    assert clock.steps == 2 * (1437 // 64)


def test_a_pair_of_turns_on_two_processes():
    import two_process
    from peers.gpt.zero import engine_config

    comparison = two_process.compare("zero3", rounds=1, steps=1)
    assert min(comparison.rounds[0].values()) > 0
    # The loop by hand accumulates in the engine, and how models are saved has no part in a step.
    plan = resolve(load_config(two_process.RECIPE, two_process.overrides(2)), two_process.WORLD_SIZE)
    ours = fill_from_plan(json.loads((ROOT / "ds_configs/zero3.json").read_text()), plan)
    ours["zero_optimization"].pop("stage3_gather_16bit_weights_on_model_save", None)
    accumulated = {"gradient_accumulation_steps": 4, "train_batch_size": 4 * ours["train_batch_size"]}
    assert engine_config(3, two_process.WORLD_SIZE) == ours | accumulated


def measured_noise_scale(folder):
    import noise_scale

    noise_scale.DRAWS = 4
    return noise_scale.measured("documents", 4, 4, folder)


def test_the_noise_scale_is_that_of_single_samples(tmp_path):
    from largebatch.batch.noise_scale import noise_scale as averaged

    ((exact, lines),) = run_job(measured_noise_scale, tmp_path / "run", strategy="single", world_size=1)
    found = averaged(lines)
    assert found["measurements"] == 200
    assert found["standard_error"] < exact / 5
    assert abs(found["samples"] - exact) < 2 * found["standard_error"]


def test_scale(tmp_path, monkeypatch):
    import scale

    monkeypatch.setattr(scale, "RECIPES", ("gpt2_124m",))
    run("scale", monkeypatch, tmp_path)
    about = json.loads((tmp_path / "scale.json").read_text())
    own, growing = about["recipes"]["gpt2_124m"].keys() - {"parameters", "micro_batch_size", "micro_batch_flops"}
    for point in about["recipes"]["gpt2_124m"][own] + about["recipes"]["gpt2_124m"][growing]:
        assert 0 < point["efficiency"]["least"] <= point["efficiency"]["most"] < 1


def test_science(tmp_path, monkeypatch, capsys):
    import batch_size

    digits = batch_size.EXPERIMENTS["goyal_digits"]
    words = ("--train.stop_after_steps=20", "--data.num_workers=0", "--logging.every=1")
    small = replace(digits, base_lrs=(0.01, 1e11), batches=(16,), orderings=())
    small = replace(small, overrides=(*digits.overrides, '--evaluation.every={"steps": 10}'), last=2)
    monkeypatch.setitem(batch_size.EXPERIMENTS, "goyal_digits", small)
    monkeypatch.setattr(batch_size, "plot", lambda *_: None)
    folders = ("--output", tmp_path / "results", "--folder", tmp_path / "runs")
    run("batch_size", monkeypatch, "goyal_digits", "--seeds=1", "--jobs=1", *folders, "--", *words)
    results = {
        result.point.base_lr: result for result in batch_size.read_results(tmp_path / "results/results.jsonl").values()
    }
    assert 0.5 < results[0.01].value < 1
    assert not results[0.01].diverged
    assert (results[1e11].value, results[1e11].diverged) == (0.9, True)
    assert "The base learning rate 0.01 was the best of 0.01, 1e+11" in capsys.readouterr().out
