"""`largebatch submit`, with an sbatch that takes down what it is given."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.tools.command_line import main
from planting import plant

SMOKE = "slurm/gpt_pydoc.sbatch"
RECIPE = "recipes/causal_lm/gpt_pydoc.json"
RECORDER = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
Path("called.json").write_text(json.dumps({{"words": sys.argv[1:], "environment": dict(os.environ)}}))
"""


@pytest.fixture
def sbatch(project, monkeypatch):
    """Put an sbatch on PATH, and return what makes it answer otherwise than `123`."""
    file = project / "bin" / "sbatch"
    file.parent.mkdir()

    def answers(code: str) -> None:
        file.write_text(RECORDER + code)
        file.chmod(0o755)

    answers("print(123)")
    monkeypatch.setenv("PATH", str(file.parent), prepend=os.pathsep)
    monkeypatch.delenv("STRATEGY", raising=False)
    monkeypatch.delenv("RUN_DIR", raising=False)
    for name in ("LARGEBATCH_ENV", "LARGEBATCH_CONTAINER"):
        monkeypatch.delenv(name, raising=False)
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/bin/activate").touch()
    return answers


def called() -> dict:
    return json.loads(Path("called.json").read_text())


def submit(*words: str) -> int:
    return main(["submit", *words])


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize("recipe", [RECIPE, f"./{RECIPE}", "gpt_pydoc"])
def test_submits_and_says_how_to_follow(recipe, capsys):
    before = {path: path.read_bytes() for path in Path().glob("slurm/*")}
    assert submit(recipe, "--nodes", "2") == 0
    assert called()["words"] == ["--parsable", "--nodes=2", SMOKE]
    printed = capsys.readouterr().out
    # The lines are those of the plan.
    assert main(["plan", RECIPE, "--world-size=4"]) == 0
    plan = capsys.readouterr().out.removeprefix("gpt_pydoc: ")
    plan = re.sub("(  Loss.*?)(?=  Steps)|  Optimizer.*", "", plan, flags=re.DOTALL)
    assert "x 4 processes\n" in plan
    assert "the run is 200 steps = 2 epochs" in plan
    assert "peak 0.002" in plan
    assert printed == (
        f"gpt_pydoc under ddp, nodes x CPU processes per node = 2 x 2: {plan}"
        "not checked: the data and any tokenizer, which the job opens when it starts\n"
        f"not checked: memory, which is estimated by largebatch plan {RECIPE} --world-sizes=4\n"
        "\n"
        f"sbatch --parsable --nodes=2 {SMOKE}\n"
        "\n"
        "job 123\n"
        "log    slurm-gpt_pydoc.sbatch-123.log\n"
        "follow tail -F slurm-gpt_pydoc.sbatch-123.log\n"
    )
    assert {path: path.read_bytes() for path in Path().glob("slurm/*")} == before


@pytest.mark.usefixtures("sbatch")
def test_which_words_go_where(capsys):
    words = "--seed 1 --partition gpu --optimizer.weight_decay=0 -t 40 --resume none --requeue --allow-change seed"
    given = shlex.split(f"{words} --strategy zero3 --run-dir /tmp/my/run --gpus-per-node h100:4 --nodes 1")
    assert submit("gpt_pydoc", *given) == 0
    before, _, behind = " ".join(called()["words"]).partition(f" {SMOKE} ")
    assert before == "--parsable --nodes=1 --gpus-per-node=h100:4 --partition gpu -t 40 --requeue"
    assert behind == "--seed 1 --optimizer.weight_decay=0 --resume none --allow-change seed"
    assert "gpt_pydoc under zero3, nodes x GPUs per node = 1 x 4: " in capsys.readouterr().out
    environment = called()["environment"]
    assert (environment["STRATEGY"], environment["RUN_DIR"]) == ("zero3", "/tmp/my/run")


UGLY = [
    "two words",
    "it's",
    'say "hi"',
    "$HOME",
    "`id`",
    "$(id)",
    "a;b",
    "a&b|c",
    "*",
    "\\",
    "new\nline",
    "é",
    "",
    "-x",
]


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize("value", UGLY)
def test_values_arrive_as_they_are(value, capsys):
    before = ["--comment", value, f"--wckey={value}"]
    behind = ["--resume", value, f"--allow-change={value}"]
    assert submit("gpt_pydoc", "--nodes", "2", *before, *behind) == 0
    arrived = called()["words"]
    assert arrived == ["--parsable", "--nodes=2", *before, SMOKE, *behind]

    # The line that was shown does the same in a shell.
    line = next(part for part in capsys.readouterr().out.split("\n\n") if part.startswith("sbatch"))
    Path("called.json").unlink()
    subprocess.run(["bash", "-c", line], check=True, capture_output=True)
    assert called()["words"] == arrived


@pytest.mark.usefixtures("sbatch")
def test_the_environment_has_an_effect_and_is_shown(monkeypatch, capsys):
    monkeypatch.setenv("STRATEGY", "fsdp")
    monkeypatch.setenv("RUN_DIR", "my runs/1")
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    assert submit("gpt_pydoc", "--nodes=2") == 0
    printed = capsys.readouterr().out
    assert f"STRATEGY=fsdp RUN_DIR='my runs/1' sbatch --parsable --nodes=2 {SMOKE}\n" in printed
    assert "gpt_pydoc under fsdp" in printed
    assert "secret" not in printed
    assert called()["environment"]["WANDB_API_KEY"] == "a-secret"


@pytest.mark.usefixtures("sbatch")
def test_dry_run(capsys):
    assert submit("gpt_pydoc", "--nodes=2-4", "--cpus-per-task=1", "--dry-run", "--batch.global_batch_size=96") == 0
    assert not Path("called.json").exists()
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if "under ddp" in line] == [
        f"gpt_pydoc under ddp, nodes x CPU processes per node = {nodes} x 1: causal_lm on {nodes} processes"
        for nodes in (2, 3, 4)
    ]
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("  ") and line[2] != " "] == [
        *["Batch"] * 3,
        "Steps",
        "Learning",
    ]
    assert f"largebatch plan {RECIPE} --world-sizes=4 --batch.global_batch_size=96\n" in printed
    assert "log    slurm-gpt_pydoc.sbatch-%j.log (Slurm fills in %j)" in printed


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--nodes=3"], "no-plan"),
        (["--nodes=x"], "nodes"),
        (["--nodes=2", "--gpus-per-node=3"], "no-plan"),
        (["--nodes=2", "--gpus-per-node=x"], "gpus-per-node"),
        (["--nodes=2", "--strategy=zero9"], "strategy"),
        (["--nodes=2", "--seed=-1"], "recipe"),
        (["--nodes=2", "--batch.global_batch_size", "42"], "recipe"),
        (["--nodes=2", "--batch.global_batch_size", "40", "--batch.micro_batch_size", "4"], "no-plan"),
        (["--nodes=2", "--time=5"], "time-too-short"),
        (["--nodes=2", "-t", "5"], "time-too-short"),
        (["--nodes=2", "--faults.time_limit_margin_seconds=1800"], "time-too-short"),
        (["--nodes=2", "--signal=USR1@300"], "signal"),
        (["--nodes=2", "--no-requeue"], "requeue"),
        (["--nodes=2", "--ntasks-per-node=4"], "ntasks-per-node"),
        (["--nodes=2", "--gpu-per-node=4"], "unknown-option"),
        (["--nodes=2", "--output=logs/x.log"], "log-folder"),
    ],
)
def test_what_speaks_against_it_is_not_submitted(words, rule, capsys):
    assert submit("gpt_pydoc", *words) == 1
    finding, end = capsys.readouterr().out.splitlines()[-2:]
    assert finding.endswith(f"[{rule}]")
    assert end == "not submitted"
    assert not Path("called.json").exists()


@pytest.mark.usefixtures("sbatch")
def test_the_values_of_the_command_line_mend_the_scripts(capsys):
    plant(SMOKE, "--time=00:30:00", "--time=5")
    plant(SMOKE, "--cpus-per-task=2", "--cpus-per-task=3")
    assert submit("gpt_pydoc", "--nodes=2") == 1
    assert submit("gpt_pydoc", "--nodes=2", "--time=60", "--gpus-per-node=2") == 0, capsys.readouterr().out


@pytest.mark.usefixtures("sbatch")
def test_a_strategy_that_the_script_would_not_take(capsys):
    plant(SMOKE, "STRATEGY=${STRATEGY:-ddp}", "STRATEGY=ddp")
    assert submit("gpt_pydoc", "--nodes=2", "--strategy=fsdp") == 1
    assert "STRATEGY=ddp cannot be overridden: fsdp would not be used" in capsys.readouterr().out


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.json"], "none.json: no such file"),
        (["elsewhere/mine.json"], "there is no slurm/mine.sbatch to submit elsewhere/mine.json with"),
        (["lone.json"], "1 problem in lone.json:\n  - there is no config.py, which defines a recipe's fields"),
        (["elsewhere/gpt_pydoc.json"], f"{SMOKE} runs {RECIPE}, not elsewhere/gpt_pydoc.json"),
        (["gpt_pydoc", "word"], "word: not an option"),
        (["gpt_pydoc", "--optimzer.eps=1"], "--optimzer.eps: neither a field of the recipe nor an option of sbatch"),
        (
            ["gpt_pydoc", "--run_dir", "x"],
            "--run_dir: neither a field of the recipe nor an option of sbatch; sections are ",
        ),
        (["gpt_pydoc", "--seed"], "--seed: has no value; write --seed VALUE"),
        (["gpt_pydoc", "--resume"], "--resume: has no value; write --resume VALUE"),
    ],
)
def test_refused(words, message, capsys):
    shutil.copytree(Path(RECIPE).parent, "elsewhere")
    shutil.copy(RECIPE, "elsewhere/mine.json")
    Path("lone.json").write_bytes(Path(RECIPE).read_bytes())
    assert submit("--nodes=2", *words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not Path("called.json").exists()


def test_sbatch_that_fails(sbatch, capsys):
    sbatch("sys.exit('sbatch: error: invalid partition specified: x')")
    assert submit("gpt_pydoc", "--nodes=2", "--partition=x") == 2
    error = capsys.readouterr().err
    assert error == "error: sbatch refused the job with exit code 1: sbatch: error: invalid partition specified: x\n"


def test_sbatch_of_a_federation(sbatch, capsys):
    sbatch("print('123;north'); print('sbatch: warning: slow', file=sys.stderr)")
    assert submit("gpt_pydoc", "--nodes=2") == 0
    printed = capsys.readouterr()
    assert "job 123 on cluster north\nlog    slurm-gpt_pydoc.sbatch-123.log\n" in printed.out
    assert printed.err == "sbatch: warning: slow\n"


@pytest.mark.usefixtures("sbatch")
def test_without_sbatch(monkeypatch, capsys):
    only_bash = Path("only_bash")
    only_bash.mkdir()
    (only_bash / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(only_bash.resolve()))
    assert submit("gpt_pydoc", "--nodes=2") == 2
    assert "error: sbatch cannot be run (No such file or directory); submit on" in capsys.readouterr().err


@pytest.mark.usefixtures("sbatch")
def test_the_log_goes_where_the_command_line_says(capsys):
    assert submit("gpt_pydoc", "--nodes=2", "--output=my log-%j-%N.txt") == 0
    printed = capsys.readouterr().out
    assert "log    my log-123-%N.txt (Slurm fills in %N)\nfollow tail -F 'my log-123-%N.txt'\n" in printed


@pytest.mark.usefixtures("sbatch")
def test_an_environment_that_is_not_there(monkeypatch, capsys):
    """Job and nodes would find it only when they start."""
    Path(".venv/bin/activate").unlink()
    assert submit("gpt_pydoc", "--nodes", "2") == 2
    assert "LARGEBATCH_ENV=.venv/bin/activate: there is no such file" in capsys.readouterr().err
    assert submit("gpt_pydoc", "--nodes", "2", "--dry-run") == 0
    assert "warning: LARGEBATCH_ENV=.venv/bin/activate: there is no such file" in capsys.readouterr().out
    assert not Path("called.json").exists()
    monkeypatch.setenv("LARGEBATCH_CONTAINER", "apptainer:image.sif")
    assert submit("gpt_pydoc", "--nodes", "2") == 0
    Path("mine").touch()
    monkeypatch.delenv("LARGEBATCH_CONTAINER")
    monkeypatch.setenv("LARGEBATCH_ENV", "mine")
    assert submit("gpt_pydoc", "--nodes", "2") == 0
    assert "LARGEBATCH_ENV=mine sbatch --parsable" in capsys.readouterr().out
