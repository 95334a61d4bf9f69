"""The shipped recipes, launched for real with `accelerate launch` and the shipped Accelerate configs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from evaluate_saved import evaluate_saved
from jobs import run_job
from paths import DIGITS, PYDOC, ROOT, STRATEGIES

STEPS = 20


def launch_command(recipe: Path, run_dir: Path, *overrides: str, strategy: str) -> list[str | Path]:
    accelerate = Path(sys.executable).with_name("accelerate")
    command = [accelerate, "launch", "--config_file", f"recipes/accelerate_configs/{strategy}.yaml"]
    return [*command, recipe.parent / "train.py", "--config", recipe, "--run_dir", run_dir, *overrides]


def launch(recipe: Path, run_dir: Path, *overrides: str, strategy: str = "ddp") -> subprocess.CompletedProcess[str]:
    command = launch_command(recipe, run_dir, *overrides, strategy=strategy)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module", params=[DIGITS, PYDOC], ids=["sgd", "adamw"])
def runs(request, tmp_path_factory) -> dict[str, tuple[subprocess.CompletedProcess[str], Path]]:
    """Each strategy's output and run folder, for one recipe."""
    folder = tmp_path_factory.mktemp(request.param.stem)
    words = [f"--train.stop_after_steps={STEPS}", "--logging.every=1"]
    if request.param == PYDOC:
        words += ["--data.num_eval_samples=40"]
    launched = {}
    for strategy in STRATEGIES:
        result = launch(request.param, folder / strategy, *words, strategy=strategy)
        assert result.returncode == 0, f"{strategy}:\n{result.stdout}\n{result.stderr}"
        launched[strategy] = (result, folder / strategy)
    return launched


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_same_trajectory_on_every_strategy(runs):
    _, ddp = runs["ddp"]
    expected = metrics_of(ddp)
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))
    for strategy in STRATEGIES[1:]:
        _, run_dir = runs[strategy]
        for mine, theirs in zip(metrics_of(run_dir), expected, strict=True):
            for name in ("loss", "lr", "grad_norm"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5), (strategy, mine["step"], name)
        weights, others = load_file(run_dir / "model/model.safetensors"), load_file(ddp / "model/model.safetensors")
        assert weights.keys() == others.keys()
        for name in weights:
            difference = np.linalg.norm(weights[name] - others[name]) / max(np.linalg.norm(others[name]), 1e-8)
            assert difference <= 1e-5, (strategy, name, difference)


def test_the_strategy_is_the_one_that_was_asked_for(runs):
    for strategy, (result, run_dir) in runs.items():
        assert f"Strategy      {strategy} on " in result.stdout
        assert json.loads((run_dir / "summary.json").read_text())["strategy"] == strategy


def test_rank_0_speaks_once_and_the_engines_are_quiet(runs):
    for strategy, (result, _) in runs.items():
        assert result.stdout.count("samples per optimizer step") == 1, strategy
        assert result.stdout.count("\nfinished 20 steps") == 1, strategy
        for noise in ("Warning", "WARNING", "INFO", "deprecated", "Traceback"):
            said_by_workers = [
                # The launcher itself imports DeepSpeed, before any code of ours runs.
                line
                for line in (result.stdout + result.stderr).splitlines()
                if noise in line and "Setting accelerator to CPU" not in line
            ]
            assert said_by_workers == [], (strategy, said_by_workers)


def test_run_folder(runs):
    for _, run_dir in runs.values():
        assert {path.name for path in run_dir.iterdir()} == {
            "config.json",
            "plan.json",
            "metrics.jsonl",
            "evaluations.jsonl",
            "summary.json",
            "tensorboard",
            "model",
            "lock",
            "status.json",
            "history.jsonl",
            "checkpoints",
            "attempts",
        }
        assert list(run_dir.glob("tensorboard/**/events.out.tfevents.*"))
        assert json.loads((run_dir / "plan.json").read_text())["world_size"] == 2
        line = metrics_of(run_dir)[-1]
        assert {"samples", "epoch", "global_batch_size", "samples_per_second", "seconds"} <= line.keys()
        assert line["samples"] == STEPS * line["global_batch_size"]


def test_saved_weights_give_the_reported_evaluation(runs):
    """Loaded by `from_pretrained` into a model of their own, on the whole evaluation set at once."""
    for strategy, (_, run_dir) in runs.items():
        (expected,) = run_job(evaluate_saved, run_dir, strategy="single", world_size=1)
        reported = json.loads((run_dir / "evaluations.jsonl").read_text().splitlines()[-1])
        for name, value in expected.items():
            assert reported[name] == pytest.approx(value, rel=1e-5), (strategy, name)


# --- bad input: one clear message, a non-zero exit, nothing started ------------------------------------------------


def test_bad_config_through_the_launcher(tmp_path):
    result = launch(DIGITS, tmp_path / "run", "--batch.global_batch_size=66", "--optimizer.momentun=0.9")
    assert result.returncode != 0
    # Once by the recipe, and once in the launcher's own report of failed workers.
    assert result.stderr.count("error: 2 problems in") == 2
    assert "optimizer.momentun: unknown key, did you mean momentum?" in result.stderr
    assert "exitcode  : 2" in result.stderr
    assert 'File "recipes' not in result.stderr
    assert "largebatch/" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_deepspeed_config_with_a_scheduler_through_the_launcher(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}}')
    yaml = (ROOT / "recipes/accelerate_configs/zero2.yaml").read_text()
    (tmp_path / "zero2.yaml").write_text(yaml.replace("ds_configs/zero2.json", str(tmp_path / "ds.json")))
    accelerate = Path(sys.executable).with_name("accelerate")
    command = [accelerate, "launch", "--config_file", tmp_path / "zero2.yaml", DIGITS.parent / "train.py"]
    command += ["--config", DIGITS, "--run_dir", tmp_path / "run"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode != 0
    assert result.stderr.count("cannot be used:\n  - scheduler: remove it; the recipe's learning_rate section") == 1
    assert 'File "recipes' not in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["STRATEGY=zero4"], "error: unknown STRATEGY zero4; one of: ddp fsdp zero1 zero2 zero3"),
        (["ARGS=--batch.global_batch_size=66"], "66 is not a multiple of batch.micro_batch_size 16; nearest: 64, 80"),
        (["NUM_PROCESSES=3"], "64 is not a multiple of micro_batch_size x world_size = 16 x 3 = 48; nearest: 48, 96"),
        (["CONFIG=recipes/image_classification/none.json"], "no such file"),
    ],
)
def test_make_train_refuses_before_launching(words, message):
    """With the environment that runs the tests in place of .venv."""
    environment = os.environ | {"MAKEFLAGS": ""}
    command = ["make", "train", f"BIN={Path(sys.executable).parent}", "--assume-old=.venv/installed", *words]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert "accelerate launch" not in result.stderr
