"""The shipped recipes, launched for real with `accelerate launch` and the shipped Accelerate configs.

A real launch costs some 20 s of CPU time, nearly all of it imports: the environment of every strategy is compared with
that of forked jobs, and one strategy trains.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evaluate_saved import evaluate_saved
from jobs import launch_environment, run_job, train_in_job
from largebatch.storage.files import read_json_lines
from largebatch.storage.layout import read_object
from paths import DIGITS, MAPS, PYDOC, ROOT, STRATEGIES

pytestmark = pytest.mark.slow

# `accelerate launch`, without the imports of Accelerate's other commands.
LAUNCH = Path(sys.executable).with_name("accelerate-launch")

STEPS = 10
WORDS = (f"--train.stop_after_steps={STEPS}", "--logging.every=1")
# DDP is launched by `test_launched_stops.py` and from an installed wheel, FSDP2 and ZeRO-3 on the cluster of
# tests/cluster.
STRATEGY = "zero2"


def launch_command(recipe, run_dir, *overrides, strategy):
    command = [LAUNCH, "--config_file", f"recipes/accelerate_configs/{strategy}.yaml"]
    return [*command, recipe.parent / "train.py", "--config", recipe, "--run-dir", run_dir, *overrides]


def launch(recipe, run_dir, *overrides, strategy="ddp"):
    command = launch_command(recipe, run_dir, *overrides, strategy=strategy)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def launch_by_accelerate(strategy, script):
    """What `accelerate launch` does, in a process that has imported it."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    config = f"recipes/accelerate_configs/{strategy}.yaml"
    launch_command(launch_command_parser().parse_args(["--config_file", config, "--num_processes=3", str(script)]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forked_jobs_have_the_environment_of_real_ones(strategy, tmp_path):
    """So what is proved with forked jobs holds for launched ones."""
    script = tmp_path / "environment.py"
    script.write_text(
        "import json, os, pathlib\n"
        f"file = pathlib.Path({str(tmp_path)!r}, os.environ['RANK'])\n"
        "file.write_text(json.dumps(dict(os.environ)))\n"
    )
    run_job(launch_by_accelerate, strategy, script, strategy="single")
    forked = launch_environment(strategy, 3)
    prefixes = ("ACCELERATE_", "FSDP_", "DEEPSPEED_", "PARALLELISM_")
    for rank in range(3):
        launched = json.loads((tmp_path / str(rank)).read_text())
        assert {name: launched.get(name) for name in forked} == forked
        assert {name for name in launched if name.startswith(prefixes)} <= forked.keys() | os.environ.keys()
        assert (launched["RANK"], launched["LOCAL_RANK"]) == (str(rank), str(rank))
        assert {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} <= launched.keys()


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The output of a launched run, and its folder."""
    run_dir = tmp_path_factory.mktemp("launched") / "run"
    words = [*WORDS, "--data.num_eval_samples=40", "--demonstration=false"]
    result = launch(PYDOC, run_dir, *words, strategy=STRATEGY)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result, run_dir


def noise_in(output):
    """Lines that nobody wants to read; the launcher itself imports DeepSpeed, before any code of ours runs."""
    lines = [line for line in output.splitlines() if "Setting accelerator to CPU" not in line]
    return [line for line in lines if re.search("Warning|WARNING|INFO|deprecated|Traceback", line)]


def test_rank_0_speaks_once_under_the_strategy_that_was_asked_for(launched):
    result, run_dir = launched
    assert f"Strategy      {STRATEGY} on " in result.stdout
    assert read_object(run_dir / "summary.json")["strategy"] == STRATEGY
    assert result.stdout.count("samples per optimizer step") == 1
    assert result.stdout.count("\n  Notes         ") == 1
    assert result.stdout.count(f"\nfinished {STEPS} steps") == 1
    assert noise_in(result.stdout + result.stderr) == []


def test_run_folder(launched):
    _, run_dir = launched
    json_files = {f"{name}.json" for name in ("config", "plan", "summary")}
    logs = {f"{name}.jsonl" for name in ("metrics", "evaluations", "history")}
    others = {"attempts", "checkpoints", "lock", "model", "source", "tensorboard"}
    assert {path.name for path in run_dir.iterdir()} == json_files | logs | others
    # Of the main process alone.
    assert len(list(run_dir.glob("tensorboard/*/events.out.tfevents.*"))) == 1
    assert read_object(run_dir / "plan.json")["world_size"] == 2
    line = read_json_lines(run_dir / "metrics.jsonl")[-1]
    # Readable by whoever may read the others.
    assert len({(run_dir / file).stat().st_mode for file in ("config.json", "model/model.safetensors")}) == 1
    assert {"samples", "epoch", "global_batch_size", "samples_per_second", "seconds"} <= line.keys()
    assert line["samples"] == STEPS * line["global_batch_size"]


def test_saved_weights_give_the_reported_evaluation(launched, tmp_path):
    """Loaded by `from_pretrained` into a model of their own, on the whole evaluation set at once."""
    train_in_job(DIGITS, tmp_path / "digits", *WORDS)
    for run_dir in (launched[1], tmp_path / "digits"):
        (expected,) = run_job(evaluate_saved, run_dir, strategy="single")
        reported = read_json_lines(run_dir / "evaluations.jsonl")[-1]
        for name, value in expected.items():
            assert reported[name] == pytest.approx(value, rel=1e-5), name


# --- bad input: one clear message, a non-zero exit, nothing started ------------------------------------------------


def test_bad_config_through_the_launcher(run_dir):
    result = launch(MAPS, run_dir, "--batch.micro_batch_siz=5", "--optimizer.softnes=1")
    assert result.returncode != 0
    # By one of two processes; the launcher's own report of failed workers ends with it.
    assert result.stderr.count("error: 2 problems in") == 1
    assert "optimizer.softnes: unknown key, did you mean softness?" in result.stderr
    # One of two processes introduces the launcher's traceback.
    before, _, behind = result.stderr.partition("note: the reason is the message above")
    assert "error: 2 problems in" in before
    assert "Traceback" not in before
    assert "Traceback" in behind
    assert "did you mean softness?" in behind.partition("Root Cause")[2].splitlines()[-3]
    assert "note:" not in behind
    assert "exitcode  : 2" in result.stderr
    assert 'train.py", line' not in result.stderr
    assert "src/largebatch/" not in result.stderr
    assert not run_dir.exists()


def test_make_train_refuses_before_launching():
    """With the environment that runs the tests in place of .venv."""
    bin_folder = Path(sys.executable).parent
    command = ["make", "train", f"BIN={bin_folder}", "--assume-old=.venv/installed", "STRATEGY=zero4"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "error: unknown STRATEGY zero4; one of: ddp fsdp hsdp zero1 zero2 zero3" in result.stderr
    assert "accelerate launch" not in result.stderr
