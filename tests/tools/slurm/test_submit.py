"""`largebatch submit`: the line that is run and shown, what the job gets, and how to follow it."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from largebatch.__main__ import main
from saving import make_checkpoint
from submitting import RECIPE, SMOKE, called, layout, snapshot, submit

pytestmark = pytest.mark.usefixtures("sbatch")


@pytest.mark.parametrize("recipe", [RECIPE, f"./{RECIPE}", "gpt_pydoc"])
def test_submits_and_says_how_to_follow(recipe, capsys):
    before = {path: path.read_bytes() for path in Path().glob("slurm/*.s*")}
    assert submit(recipe, "--nodes", "2") == 0
    words = ["--parsable", "--nodes=2", "--export=ALL", SMOKE]
    assert called()["words"] == words
    assert snapshot().parent == Path("runs/gpt_pydoc/jobs").absolute()
    printed = capsys.readouterr().out
    assert layout(printed) == "ddp, nodes x CPU processes per node = 2 x 2"
    for fact in (
        "the run is 200 steps = 2 epochs",
        "peak 0.002",
        f"\nLARGEBATCH_SNAPSHOT={snapshot()} sbatch {' '.join(words)}\n",
        "\njob 123\n",
        "follow tail -F slurm-gpt_pydoc.sbatch-123.log\n",
    ):
        assert fact in printed
    assert {path: path.read_bytes() for path in Path().glob("slurm/*.s*")} == before


def test_which_words_go_where(tmp_path, capsys):
    words = "--seed 1 --partition=gpu --optimizer.weight_decay=0 --time=40 --resume none --requeue --allow-change seed"
    given = shlex.split(f"{words} --strategy zero3 --run-dir {tmp_path}/run --gpus-per-node h100:4 --nodes 1")
    assert submit("gpt_pydoc", *given) == 0
    before, _, behind = " ".join(called()["words"]).partition(f" {SMOKE} ")
    assert before == "--parsable --nodes=1 --gpus-per-node=h100:4 --partition=gpu --time=40 --requeue --export=ALL"
    placed = f"--strategy=zero3 --run-dir={tmp_path}/run --resume=none --allow-change=seed"
    assert behind == f"{placed} --seed 1 --optimizer.weight_decay=0"
    assert "gpt_pydoc under zero3, nodes x GPUs per node = 1 x 4: " in capsys.readouterr().out
    assert snapshot().parent == tmp_path / "run/jobs"


@pytest.mark.parametrize("says_its_task", [True, False])
def test_a_recipe_elsewhere(says_its_task, tmp_path_factory):
    """It is planned, checked and copied for the job, into its task's folder."""
    recipe = tmp_path_factory.mktemp("experiments") / "mine.json"
    raw = json.loads(Path(RECIPE).read_text())
    schema = str(Path(RECIPE).with_name("recipe.schema.json").resolve()) if says_its_task else "none.json"
    recipe.write_text(json.dumps(raw | {"$schema": schema}))
    words = [] if says_its_task else ["--task", "recipes/causal_lm"]
    script = Path("slurm/mine.sbatch")
    script.write_text(Path(SMOKE).read_text().replace(f"RECIPE={RECIPE}", f"RECIPE={recipe}"))
    assert main(["lint", str(script), *words]) == 0
    for command in (["plan", "--world-size=4"], ["prepare", "--dry-run"], ["submit", "--nodes=2", "--seed=5"]):
        assert main([command[0], str(recipe), *command[1:], *words]) == 0
    assert called()["words"][-2:] == [str(script), "--seed=5"]
    place = (snapshot() / "recipe").read_text().strip()
    assert place == "recipes/causal_lm/mine.json"
    assert (snapshot() / place).read_bytes() == recipe.read_bytes()


UGLY = ["it's", 'say "hi"', "$HOME `id`", "a;b&c|*", "\\", "new\nline", "", "-x"]


@pytest.mark.parametrize("value", UGLY)
def test_values_arrive_as_they_are(value, capsys):
    before = [f"--comment={value}", f"--wckey={value}"]
    behind = [f"--resume={value}", f"--allow-change={value}"]
    assert submit("gpt_pydoc", "--nodes", "2", *before, *behind) == 0
    arrived = called()["words"]
    assert arrived == ["--parsable", "--nodes=2", *before, "--export=ALL", SMOKE, *behind]

    # The line that was shown does the same in a shell.
    line = next(part for part in capsys.readouterr().out.split("\n\n") if " sbatch " in part)
    Path("called.json").unlink()
    subprocess.run(["bash", "-c", line], check=True, capture_output=True)
    assert called()["words"] == arrived


def test_the_environment_has_an_effect_and_is_shown(monkeypatch, capsys):
    monkeypatch.setenv("STRATEGY", "fsdp")
    monkeypatch.setenv("RUN_DIR", "my runs/1")
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    monkeypatch.setenv("SBATCH_QOS", "high")
    monkeypatch.setenv("LARGEBATCH_CONTAINER", "image")
    monkeypatch.setenv("LARGEBATCH_CONTAINER_MOUNTS", "/a:/a,/b:/b")
    # Of a job from which this one is submitted.
    monkeypatch.setenv("LARGEBATCH_JOB_ID", "4")
    assert submit("gpt_pydoc", "--nodes=2") == 0
    printed = capsys.readouterr().out
    given = "LARGEBATCH_CONTAINER=image LARGEBATCH_CONTAINER_MOUNTS=/a:/a,/b:/b"
    given += f" LARGEBATCH_SNAPSHOT={shlex.quote(str(snapshot()))} SBATCH_QOS=high"
    assert (
        f"{given} sbatch --parsable --nodes=2 --export=ALL {SMOKE} --strategy=fsdp '--run-dir=my runs/1'\n" in printed
    )
    assert "gpt_pydoc under fsdp" in printed
    assert "secret" not in printed
    assert called()["environment"]["WANDB_API_KEY"] == "a-secret"
    assert "LARGEBATCH_JOB_ID" not in called()["environment"]


def test_sbatch_that_fails(sbatch, capsys):
    sbatch("sys.exit('sbatch: error: invalid partition specified: x')")
    assert submit("gpt_pydoc", "--nodes=2", "--partition=x") == 2
    error = capsys.readouterr().err
    assert error == "error: sbatch refused the job with exit code 1: sbatch: error: invalid partition specified: x\n"


def test_sbatch_of_a_federation(sbatch, capsys):
    sbatch("print('123;north'); print('sbatch: warning: slow', file=sys.stderr)")
    assert submit("gpt_pydoc", "--nodes=2") == 0
    printed = capsys.readouterr()
    assert "job 123\nlog    slurm-gpt_pydoc.sbatch-123.log\n" in printed.out
    assert printed.err == "sbatch: warning: slow\n"


def test_a_larger_job_goes_on_after_a_ramp(capsys):
    """The sizes that its checkpoint is past need not divide."""
    ramp = '--batch.global_batch_size={"start": 8, "end": 32, "increment": 8, "over": {"steps": 30}}'
    words = ("--batch.micro_batch_size=4", ramp, "--nodes=4")
    for step, refused in ((0, 8), (29, 24), (30, None)):
        if step:
            make_checkpoint(Path(f"runs/gpt_pydoc/checkpoints/step_{step:08}"))
        assert submit("gpt_pydoc", *words) == (0 if refused is None else 1)
        printed = capsys.readouterr()
        if refused is not None:
            assert f"global_batch_size {refused} is not a multiple of" in printed.out
        else:
            assert "8 samples per optimizer step, taken before there were 8 processes" in printed.out
            assert "32 samples per optimizer step = 4 per micro-batch x 1 accumulated x 8 processes" in printed.out
