"""`largebatch submit`: the line that is run and shown, what the job gets, and how to follow it."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from saving import make_checkpoint
from submitting import RECIPE, SMOKE, called, layout, snapshot

pytestmark = pytest.mark.usefixtures("sbatch")


def test_submits_and_says_how_to_follow(output_of):
    before = Path(SMOKE).read_bytes()
    printed = output_of("submit", f"./{RECIPE}", "--nodes", "2")
    words = ["--parsable", "--nodes=2", "--export=ALL", SMOKE]
    assert called()["words"] == words
    assert snapshot().parent == Path("runs/gpt_pydoc/jobs").absolute()
    assert layout(printed) == "ddp, nodes x CPU processes per node = 2 x 2"
    for fact in (
        "the run is 200 steps = 2 epochs",
        "peak 0.002",
        f"\nLARGEBATCH_SNAPSHOT={snapshot()} sbatch {' '.join(words)}\n",
        "\njob 123\n",
        "follow tail -F slurm-gpt_pydoc.sbatch-123.log\n",
    ):
        assert fact in printed
    assert Path(SMOKE).read_bytes() == before


def test_which_words_go_where(tmp_path, output_of):
    words = "--seed 1 --partition=gpu --optimizer.weight_decay=0 --time=40 --resume none --requeue --allow-change seed"
    given = shlex.split(f"{words} --strategy zero3 --run-dir {tmp_path}/run --gpus-per-node h100:4 --nodes 1")
    printed = output_of("submit", "gpt_pydoc", *given)
    assert "gpt_pydoc under zero3, nodes x GPUs per node = 1 x 4: " in printed
    before, _, behind = " ".join(called()["words"]).partition(f" {SMOKE} ")
    assert before == "--parsable --nodes=1 --gpus-per-node=h100:4 --partition=gpu --time=40 --requeue --export=ALL"
    placed = f"--strategy=zero3 --run-dir={tmp_path}/run --resume=none --allow-change=seed"
    assert behind == f"{placed} --seed 1 --optimizer.weight_decay=0"
    assert snapshot().parent == tmp_path / "run/jobs"


@pytest.mark.parametrize("says_its_task", [True, False])
def test_a_recipe_elsewhere(says_its_task, tmp_path_factory, output_of):
    """It is planned, checked and copied for the job, into its task's folder."""
    recipe = tmp_path_factory.mktemp("experiments") / "mine.json"
    raw = json.loads(Path(RECIPE).read_text())
    schema = str(Path(RECIPE).with_name("recipe.schema.json").resolve()) if says_its_task else "none.json"
    recipe.write_text(json.dumps(raw | {"$schema": schema}))
    words = [] if says_its_task else ["--task", "recipes/causal_lm"]
    script = Path("slurm/mine.sbatch")
    script.write_text(Path(SMOKE).read_text().replace(f"RECIPE={RECIPE}", f"RECIPE={recipe}"))
    output_of("lint", script, *words)
    for name, *options in (["plan", "--world-size=4"], ["prepare", "--dry-run"], ["submit", "--nodes=2", "--seed=5"]):
        output_of(name, recipe, *options, *words)
    assert called()["words"][-2:] == [str(script), "--seed=5"]
    place = (snapshot() / "recipe").read_text().strip()
    assert place == "recipes/causal_lm/mine.json"
    assert (snapshot() / place).read_bytes() == recipe.read_bytes()


UGLY = ["it's", 'say "hi"', "$HOME `id`", "a;b&c|*", "\\", "new\nline", "", "-x"]


def test_values_arrive_as_they_are(output_of):
    before = [f"--comment={value}" for value in UGLY]
    behind = f"--resume={''.join(UGLY)}"
    printed = output_of("submit", "gpt_pydoc", "--nodes", "2", *before, behind)
    arrived = called()["words"]
    assert arrived == ["--parsable", "--nodes=2", *before, "--export=ALL", SMOKE, behind]

    # The line that was shown does the same in a shell.
    line = next(part for part in printed.split("\n\n") if " sbatch " in part)
    Path("called.json").unlink()
    subprocess.run(["bash", "-c", line], check=True, capture_output=True)
    assert called()["words"] == arrived


def test_the_environment_has_an_effect_and_is_shown(monkeypatch, output_of):
    environment = {
        "STRATEGY": "fsdp",
        "RUN_DIR": "my runs/1",
        "WANDB_API_KEY": "a-secret",
        "SBATCH_QOS": "high",
        "LARGEBATCH_CONTAINER": "image",
        "LARGEBATCH_CONTAINER_MOUNTS": "/a:/a,/b:/b",
        # Of a job from which this one is submitted.
        "LARGEBATCH_JOB_ID": "4",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    printed = output_of("submit", "gpt_pydoc", "--nodes=2")
    given = "LARGEBATCH_CONTAINER=image LARGEBATCH_CONTAINER_MOUNTS=/a:/a,/b:/b"
    given += f" LARGEBATCH_SNAPSHOT={shlex.quote(str(snapshot()))} SBATCH_QOS=high"
    assert (
        f"{given} sbatch --parsable --nodes=2 --export=ALL {SMOKE} --strategy=fsdp '--run-dir=my runs/1'\n" in printed
    )
    assert "gpt_pydoc under fsdp" in printed
    assert "secret" not in printed
    assert called()["environment"]["WANDB_API_KEY"] == "a-secret"
    assert "LARGEBATCH_JOB_ID" not in called()["environment"]


def test_sbatch_that_fails(sbatch, run_command):
    sbatch("sys.exit('sbatch: error: invalid partition specified: x')")
    code, _, error = run_command("submit", "gpt_pydoc", "--nodes=2", "--partition=x")
    assert code == 2
    assert error == "error: sbatch refused the job with exit code 1: sbatch: error: invalid partition specified: x\n"


def test_sbatch_of_a_federation(sbatch, run_command):
    sbatch("print('123;north'); print('sbatch: warning: slow', file=sys.stderr)")
    code, output, errors = run_command("submit", "gpt_pydoc", "--nodes=2")
    assert (code, errors) == (0, "sbatch: warning: slow\n")
    assert "job 123\nlog    slurm-gpt_pydoc.sbatch-123.log\n" in output


def test_a_larger_job_goes_on_after_a_ramp(run_command, output_of):
    """The sizes that its checkpoint is past need not divide."""
    ramp = '--batch.global_batch_size={"start": 8, "end": 32, "increment": 8, "over": {"steps": 30}}'
    words = ["submit", "gpt_pydoc", "--batch.micro_batch_size=4", ramp, "--nodes=4"]
    make_checkpoint(Path("runs/gpt_pydoc/checkpoints/step_00000029"))
    code, output, _ = run_command(*words)
    assert code == 1
    assert "global_batch_size 24 is not a multiple of" in output
    make_checkpoint(Path("runs/gpt_pydoc/checkpoints/step_00000030"))
    output = output_of(*words)
    assert "8 samples per optimizer step, taken before there were 8 processes" in output
    assert "32 samples per optimizer step = 4 per micro-batch x 1 accumulated x 8 processes" in output
