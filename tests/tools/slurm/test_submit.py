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

import tasks
from largebatch.__main__ import main
from played import write_commands
from run_folders import started, write_lines, write_run
from saving import FakeRun, mark

SMOKE = "slurm/gpt_pydoc.sbatch"
QUEUE = ((0, "rates"), (2, "rates"), (3, "other"))  # tasks of arrays, and the folders of their sweeps
RECIPE = "recipes/causal_lm/gpt_pydoc.json"
RECORDER = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
Path("called.json").write_text(json.dumps({{"words": sys.argv[1:], "environment": dict(os.environ)}}))
"""


@pytest.fixture
def sbatch(project, monkeypatch):
    """Put an sbatch and an empty queue on PATH, and return what makes sbatch answer otherwise than `123`."""
    file = project / "bin" / "sbatch"
    file.parent.mkdir()
    write_commands(file.parent, {"squeue": ""})

    def answers(code: str) -> None:
        file.write_text(RECORDER + code)
        file.chmod(0o755)

    answers("print(123)")
    monkeypatch.setenv("PATH", str(file.parent), prepend=os.pathsep)
    monkeypatch.delenv("STRATEGY", raising=False)
    monkeypatch.delenv("RUN_DIR", raising=False)
    for name in [name for name in os.environ if name.startswith(("LARGEBATCH_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/bin/activate").touch()
    return answers


def called() -> dict:
    return json.loads(Path("called.json").read_text())


def snapshot() -> Path:
    """The folder that the job was told to run."""
    return Path(called()["environment"]["LARGEBATCH_SNAPSHOT"])


def submit(*words: str) -> int:
    return main(["submit", *words])


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize("recipe", [RECIPE, f"./{RECIPE}", "gpt_pydoc"])
def test_submits_and_says_how_to_follow(recipe, capsys):
    before = {path: path.read_bytes() for path in Path().glob("slurm/*.s*")}
    assert submit(recipe, "--nodes", "2") == 0
    words = ["--parsable", "--nodes=2", "--export=ALL,LARGEBATCH_SNAPSHOT", SMOKE]
    assert called()["words"] == words
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


@pytest.mark.usefixtures("sbatch")
def test_a_wrong_optimizer_is_not_submitted(monkeypatch, capsys):
    monkeypatch.setattr("torch.optim.AdamW.step", lambda _: None)
    assert submit("gpt_pydoc", "--nodes", "2") == 2
    assert "the optimizer keeps no state 'exp_avg' for a parameter of shape" in capsys.readouterr().err
    assert not Path("called.json").exists()


@pytest.mark.usefixtures("sbatch")
def test_which_words_go_where(tmp_path, capsys):
    words = "--seed 1 --partition=gpu --optimizer.weight_decay=0 --time=40 --resume none --requeue --allow-change seed"
    given = shlex.split(f"{words} --strategy zero3 --run-dir {tmp_path}/run --gpus-per-node h100:4 --nodes 1")
    assert submit("gpt_pydoc", *given) == 0
    before, _, behind = " ".join(called()["words"]).partition(f" {SMOKE} ")
    names = "ALL,LARGEBATCH_SNAPSHOT"
    assert before == f"--parsable --nodes=1 --gpus-per-node=h100:4 --partition=gpu --time=40 --requeue --export={names}"
    placed = f"--strategy=zero3 --run-dir={tmp_path}/run --resume=none --allow-change=seed"
    assert behind == f"{placed} --seed 1 --optimizer.weight_decay=0"
    assert "gpt_pydoc under zero3, nodes x GPUs per node = 1 x 4: " in capsys.readouterr().out
    assert snapshot().parent == tmp_path / "run/jobs"


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize("says_its_task", [True, False])
def test_a_recipe_elsewhere(says_its_task, tmp_path_factory, capsys):
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
        if not says_its_task:
            capsys.readouterr()
            assert main([command[0], str(recipe), *command[1:]]) == 2
            assert "config.py, which defines a recipe's fields; move its JSON" in capsys.readouterr().err
    assert called()["words"][-2:] == [str(script), "--seed=5"]
    place = (snapshot() / "recipe").read_text().strip()
    assert place == "recipes/causal_lm/mine.json"
    assert (snapshot() / place).read_bytes() == recipe.read_bytes()


@pytest.mark.usefixtures("sbatch")
def test_what_a_container_would_not_see(tmp_path, tmp_path_factory, monkeypatch, capsys):
    """Of the recipe's files and the environment; links count by what they lead to."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "env.sh").touch()
    Path("image").touch()
    for name in ("tokenizer", "data", "seen"):
        (outside / name).mkdir()
    (outside / "data/1.jsonl").touch()
    (tmp_path / "link").symlink_to(outside / "tokenizer")
    # A text may be too long for a path, or have a character that no path has.
    data_files = {"train": f"{outside}/data/*.jsonl", "eval": ["none" * 70, "no\0ne"]}
    data = {"source": "datasets", "path": "json", "data_files": data_files}
    data |= {"tokenizer": "link", "block_size": 128, "num_train_samples": 3200, "num_eval_samples": 400}
    words = ("gpt_pydoc", "--nodes=2", f"--data={json.dumps(data)}")

    def problems(image: str, **settings: str) -> list[str]:
        for name, value in {"LARGEBATCH_CONTAINER": image, **settings}.items():
            monkeypatch.setenv(name, value)
        Path("called.json").unlink(missing_ok=True)
        code = submit(*words)
        assert (code == 0) is Path("called.json").exists()
        lines = capsys.readouterr().out.splitlines()
        return [line.removeprefix("error: ").partition(" is ")[0] for line in lines if line.startswith("error: ")]

    files = ["data.tokenizer: link", f"data.data_files.train: {outside}/data/*.jsonl"]
    assert problems("registry#image") == ["HF_HOME", *files]
    Path("slurm/site.sh").write_text(f"export HF_HOME={outside}/seen\n")
    assert problems("registry#image") == files
    assert problems("apptainer:image", LARGEBATCH_CONTAINER_MOUNTS=f"{outside}/data:{outside}/data:ro") == files[:1]
    assert problems("registry#image", LARGEBATCH_CONTAINER_MOUNTS=f"/x:/y,{outside}:{outside}") == []
    assert problems("registry#image", LARGEBATCH_ENV=f"{outside}/env.sh") == []
    named = [f"LARGEBATCH_ENV: {outside}/env.sh", *files]
    assert problems("registry#image", LARGEBATCH_CONTAINER_MOUNTS="") == named
    assert problems("command:shifter", LARGEBATCH_CONTAINER_MOUNTS="") == []


@pytest.mark.usefixtures("sbatch")
def test_an_image_that_is_not_there(tmp_path, monkeypatch, capsys):
    """A file's path, as both programs read it; a name in a registry cannot be looked up."""
    (tmp_path / "here.sqsh").touch()
    missing = (f"{tmp_path}/none", "/none/x.sqsh", "./none", "none.sqsh", "here.sqsh", "./here.sqsh")
    missing += ("apptainer:/none/x.sif", "apptainer:none.sif")
    present = (f"{tmp_path}/here.sqsh", "apptainer:here.sqsh", f"apptainer:{tmp_path}")
    present += ("nvcr.io#nvidia/pytorch:24.01-py3", "ubuntu", "apptainer:docker://ubuntu", "command:shifter --image=x")
    for image in missing + present:
        monkeypatch.setenv("LARGEBATCH_CONTAINER", image)
        assert submit("gpt_pydoc", "--nodes=2") == (image in missing), image
        found = f"error: LARGEBATCH_CONTAINER={image}: there is no such file" in capsys.readouterr().out
        assert found == (image in missing)


@pytest.mark.usefixtures("sbatch")
def test_data_that_only_the_container_has_is_not_looked_at(tmp_path, monkeypatch, capsys):
    (tmp_path / "link").symlink_to("/usr")
    monkeypatch.setenv("LARGEBATCH_CONTAINER", "registry#image")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    # It runs what looks at the data.
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    data = {"source": "datasets", "path": "json", "data_files": {"train": "/data/*.jsonl", "eval": "eval.jsonl"}}
    data |= {"tokenizer": "bytes", "block_size": 128, "num_train_samples": 3200, "num_eval_samples": 400}
    words = ("gpt_pydoc", "--nodes=2", "--dry-run", f"--data={json.dumps(data)}")
    where = "only the container has data.data_files.train: /data/*.jsonl"
    note = f"\nnot checked: the data and any tokenizer, because {where}\n"
    for mounts, looked_at in (("/none:/data:ro", False), ("/data:/data", True), ("/none:/datas", True)):
        monkeypatch.setenv("LARGEBATCH_CONTAINER_MOUNTS", mounts)
        assert submit(*words) == looked_at
        assert (note in capsys.readouterr().out) is not looked_at
        assert called()["words"][0] == "--test-only"
    # Both paths lead to the same folder.
    monkeypatch.setenv("LARGEBATCH_CONTAINER_MOUNTS", f"/usr:{tmp_path}/link")
    assert submit(*words, f"--data.data_files.train={tmp_path}/link/x") == 1


UGLY = ["it's", 'say "hi"', "$HOME `id`", "a;b&c|*", "\\", "new\nline", "", "-x"]


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize("value", UGLY)
def test_values_arrive_as_they_are(value, capsys):
    before = [f"--comment={value}", f"--wckey={value}"]
    behind = [f"--resume={value}", f"--allow-change={value}"]
    assert submit("gpt_pydoc", "--nodes", "2", *before, *behind) == 0
    arrived = called()["words"]
    assert arrived == ["--parsable", "--nodes=2", *before, "--export=ALL,LARGEBATCH_SNAPSHOT", SMOKE, *behind]

    # The line that was shown does the same in a shell.
    line = next(part for part in capsys.readouterr().out.split("\n\n") if " sbatch " in part)
    Path("called.json").unlink()
    subprocess.run(["bash", "-c", line], check=True, capture_output=True)
    assert called()["words"] == arrived


@pytest.mark.usefixtures("sbatch")
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
    names = "LARGEBATCH_CONTAINER,LARGEBATCH_CONTAINER_MOUNTS,LARGEBATCH_SNAPSHOT"
    given = "LARGEBATCH_CONTAINER=image LARGEBATCH_CONTAINER_MOUNTS=/a:/a,/b:/b"
    given += f" LARGEBATCH_SNAPSHOT={shlex.quote(str(snapshot()))} SBATCH_QOS=high"
    assert (
        f"{given} sbatch --parsable --nodes=2 --export=ALL,{names} {SMOKE} --strategy=fsdp '--run-dir=my runs/1'\n"
        in printed
    )
    assert "gpt_pydoc under fsdp" in printed
    assert "secret" not in printed
    assert called()["environment"]["WANDB_API_KEY"] == "a-secret"
    assert "LARGEBATCH_JOB_ID" not in called()["environment"]


@pytest.mark.usefixtures("sbatch")
def test_a_job_runs_what_was_there_when_it_was_submitted():
    recipe = Path(RECIPE).read_bytes()
    assert submit("gpt_pydoc", "--nodes=2") == 0
    Path(RECIPE).write_text("{}")
    assert snapshot().is_relative_to(Path.cwd() / "runs/gpt_pydoc/jobs")
    assert (snapshot() / RECIPE).read_bytes() == recipe
    assert (snapshot() / SMOKE).is_file()


def layout(printed: str) -> str:
    return re.search("under (.*?):", printed)[1]


@pytest.mark.usefixtures("sbatch")
def test_the_sites_profile(monkeypatch, capsys):
    Path("slurm/site.sh").write_text(
        "export SBATCH_GPUS_PER_NODE=${SBATCH_GPUS_PER_NODE:-4} LARGEBATCH_ENV=site_env\nexport OTHER=1\n"
        "echo welcome; LARGEBATCH_WRAP=(a b)\n[[ -d /none ]] && export LARGEBATCH_CONTAINER=x\n"
    )
    Path("site_env").touch()
    monkeypatch.delenv("OTHER", raising=False)
    assert submit("gpt_pydoc", "--nodes=1") == 0
    printed = capsys.readouterr().out
    assert layout(printed) == "ddp, nodes x GPUs per node = 1 x 4"
    assert "LARGEBATCH_ENV=site_env LARGEBATCH_SNAPSHOT=" in printed
    assert "SBATCH_GPUS_PER_NODE=4 sbatch" in printed
    environment = called()["environment"]
    assert environment["SBATCH_GPUS_PER_NODE"] == "4"
    assert environment.keys().isdisjoint({"OTHER", "LARGEBATCH_WRAP", "LARGEBATCH_CONTAINER"})
    monkeypatch.setenv("SBATCH_GPUS_PER_NODE", "2")
    assert submit("gpt_pydoc", "--nodes=1") == 0
    assert "1 x 2" in layout(capsys.readouterr().out)


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 3", "it ended with exit code 3"),
        ("if then", "syntax error"),
        ("source /none/file", "/none/file: No such file"),
    ],
)
def test_a_profile_that_fails(text, message, capsys):
    Path("slurm/site.sh").write_text(text)
    assert submit("gpt_pydoc", "--nodes=2") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {Path.cwd()}/slurm/site.sh fails: ")
    assert message in error
    assert not Path("called.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("sbatch")
def test_dry_run(capsys):
    assert submit("gpt_pydoc", "--nodes=2-4", "--cpus-per-task=1", "--dry-run", "--batch.global_batch_size=96") == 0
    words = ["--parsable", "--nodes=2-4", "--cpus-per-task=1", "--export=ALL", SMOKE, "--batch.global_batch_size=96"]
    assert called()["words"] == ["--test-only", *words]
    printed = capsys.readouterr().out
    assert "\n123\n" in printed  # what Slurm says
    assert [line for line in printed.splitlines() if "under ddp" in line] == [
        f"gpt_pydoc under ddp, nodes x CPU processes per node = {nodes} x 1: causal_lm on {nodes} processes"
        for nodes in (2, 3, 4)
    ]
    assert re.search(r"data\.num_train_samples +3,\d\d\d samples found; the recipe expects 3,200\n", printed)
    assert "log    slurm-gpt_pydoc.sbatch-%j.log" in printed
    assert f"\nsbatch --parsable --nodes=2-4 --cpus-per-task=1 --export=ALL {SMOKE}" in printed
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("sbatch")
def test_dry_run_tells_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    Path("text.jsonl").write_text('{"text": "a"}\n' * 9000)
    data = {"source": "datasets", "path": "json", "data_files": {"train": "text.jsonl", "eval": "text.jsonl"}}
    data |= {"tokenizer": "bytes", "block_size": 8, "num_train_samples": 900, "num_eval_samples": 10}
    words = ("--nodes=2", "--dry-run", f"--data={json.dumps(data)}", "--learning_rate.warmup=null")
    assert submit("gpt_pydoc", *words) == 0
    assert "0.2 MiB of data must still be prepared: a job does that when it starts; " in capsys.readouterr().out
    assert submit("gpt_pydoc", *words, "--data.tokenizer=./none") == 1
    assert "error: data.tokenizer: there is no folder './none'" in capsys.readouterr().out


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--nodes=3"], "no-plan"),
        (["--nodes=2", "--strategy=zero9"], "strategy"),
        (["--nodes=2", "--seed=-1"], "recipe"),
        (["--nodes=2", "--batch.global_batch_size", "40", "--batch.micro_batch_size", "4"], "no-plan"),
    ],
)
def test_what_speaks_against_it_is_not_submitted(words, rule, capsys):
    assert submit("gpt_pydoc", *words) == 1
    finding, end = capsys.readouterr().out.splitlines()[-2:]
    assert finding.endswith(f"[{rule}]")
    assert end == "not submitted"
    assert not Path("called.json").exists()


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.json"], "none.json: no such file"),
        (["elsewhere/mine.json"], "there is no slurm/mine.sbatch that runs elsewhere/mine.json; copy another"),
        (["lone.json"], "1 problem in lone.json:\n  - there is no config.py, which defines a recipe's fields; move"),
        (["elsewhere/gpt_pydoc.json"], f"there is no {SMOKE} that runs elsewhere/gpt_pydoc.json; copy another"),
        (["gpt_pydoc", "word"], "word: neither a field of the recipe nor an option of sbatch"),
        (["gpt_pydoc", "--time", "5"], "5: neither a field of the recipe nor an option of sbatch"),
        (["gpt_pydoc", "-t5"], "-t5: neither a field of the recipe nor an option of sbatch"),
        (["gpt_pydoc", "--optimzer.eps=1"], "--optimzer.eps=1: neither a field of the recipe nor an option of sbatch"),
        (["gpt_pydoc", "--export=NONE"], "--export=NONE: all of the environment is passed on"),
        (["gpt_pydoc", "--nodes=x"], "--nodes=x: the job's nodes or processes per node cannot be read"),
        (["gpt_pydoc", "--gpus=8"], "--nodes=2 --gpus=8: the job's nodes or processes per node cannot be read"),
    ],
)
def test_refused(words, message, capsys):
    shutil.copytree(Path(RECIPE).parent, "elsewhere")
    shutil.copy(RECIPE, "elsewhere/mine.json")
    Path("lone.json").write_bytes(Path(RECIPE).read_bytes())
    assert submit("--nodes=2", *words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not Path("called.json").exists()


def test_a_dry_run_that_slurm_refuses(sbatch, capsys):
    sbatch("sys.exit('sbatch: error: invalid partition specified: x')")
    assert submit("gpt_pydoc", "--nodes=2", "--partition=x", "--dry-run") == 1
    assert "sbatch: error: invalid partition specified: x\n" in capsys.readouterr().out


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
    assert submit("gpt_pydoc", "--nodes=2", "--dry-run") == 0
    assert "not checked: the options of sbatch, which is not installed here" in capsys.readouterr().out


@pytest.mark.usefixtures("sbatch")
def test_an_environment_that_is_not_there(monkeypatch, capsys):
    """Job and nodes would find it only when they start."""
    Path(".venv/bin/activate").unlink()
    error = "error: LARGEBATCH_ENV=.venv/bin/activate: there is no such file"
    assert submit("gpt_pydoc", "--nodes", "2") == 1
    assert error in capsys.readouterr().out
    assert not Path("called.json").exists()
    # A dry run shows the rest as well.
    assert submit("gpt_pydoc", "--nodes", "2", "--dry-run") == 1
    found = capsys.readouterr().out
    assert error in found
    assert "data.num_train_samples" in found
    monkeypatch.setenv("LARGEBATCH_CONTAINER", "apptainer:docker://image")
    assert submit("gpt_pydoc", "--nodes", "2") == 0
    Path("mine").touch()
    monkeypatch.delenv("LARGEBATCH_CONTAINER")
    monkeypatch.setenv("LARGEBATCH_ENV", "mine")
    assert submit("gpt_pydoc", "--nodes", "2") == 0
    assert "LARGEBATCH_ENV=mine LARGEBATCH_SNAPSHOT=" in capsys.readouterr().out


@pytest.mark.usefixtures("sbatch")
def test_a_sweep_is_one_array(capsys):
    words = ["--learning_rate.base_lr", "1e-3,2e-3", "--logging.trackers", "[[]]", "--seeds", "2", "--slurm"]
    words += ["--nodes", "2", "--partition=gpu", "--max-parallel", "3", "--folder", "runs/rates"]
    assert main(["sweep", "gpt_pydoc", *words]) == 0
    options = "--array=0,1,2,3%3 --output=runs/rates/points/%a.log --nodes=2 --partition=gpu"
    names = "ALL,LARGEBATCH_SNAPSHOT"
    assert called()["words"] == shlex.split(
        f"--parsable {options} --export={names} {SMOKE} --run-dir={Path.cwd()}/runs/rates --sweep"
    )
    assert snapshot().parent == Path("runs/rates/jobs").absolute()
    assert (snapshot() / RECIPE).is_file()
    lines = ["base_lr=0.002_seed=0", "--learning_rate.base_lr=0.002", "--logging.trackers=[]", "--seed=0"]
    assert Path("runs/rates/points/2").read_text().splitlines() == lines
    # What has finished is not submitted again.
    run = Path("runs/rates/base_lr=0.001_seed=1")
    run.mkdir()
    (run / "summary.json").write_text('{"steps": 200}')
    assert main(["sweep", "gpt_pydoc", *words]) == 0
    assert called()["words"][1] == "--array=0,2,3%3"
    printed = capsys.readouterr().out
    assert "4 points in runs/rates, 1 of them trained already\n" in printed
    assert "\nfollow tail -F runs/rates/points/0.log\nwhen all points are trained, the same command" in printed
    # Nor what is in the queue, of this sweep; more values are.
    queue = "".join(f"echo '{number} {SMOKE} --run-dir={Path.cwd()}/runs/{name} --sweep'\n" for number, name in QUEUE)
    write_commands(Path("bin"), {"squeue": queue})
    words[1] = "5e-4,1e-3,2e-3"
    assert main(["sweep", "gpt_pydoc", *words]) == 0
    assert called()["words"][1] == "--array=3,4,5%3"
    assert "6 points in runs/rates, 1 of them trained already, 2 in Slurm's queue\n" in capsys.readouterr().out
    # The same folder by another path; and a queue that does not answer.
    Path("link").symlink_to("runs")
    assert main(["sweep", "gpt_pydoc", *words[:-1], "link/rates"]) == 0
    assert called()["words"][1] == "--array=3,4,5%3"
    Path("called.json").unlink()
    write_commands(Path("bin"), {"squeue": "echo 'Socket timed out' >&2\nexit 1\n"})
    assert main(["sweep", "gpt_pydoc", *words]) == 2
    assert "squeue does not say which points are in the queue: Socket timed out; try again" in capsys.readouterr().err
    # When all have finished, the result.
    write_commands(Path("bin"), {"squeue": ""})
    for number in range(6):
        shutil.rmtree(run := Path("runs/rates", Path(f"runs/rates/points/{number}").read_text().split()[0]), True)
        write_run(run)
    assert main(["sweep", "gpt_pydoc", *words]) == 0
    assert "6 of them trained already\n\nloss of the last evaluation" in capsys.readouterr().out
    assert not Path("called.json").exists()


@pytest.mark.usefixtures("sbatch")
def test_branches_of_a_jobs_run_are_one_array(capsys):
    """The run has noted the recipe of its snapshot, for which there is no script."""
    run = Path("runs/pydoc")
    write_run(run, history=[started(0, recipe=str(run / "jobs/snapshot" / RECIPE))], config=Path(RECIPE))
    assert main(["snapshot", "--to", f"{run}/jobs/snapshot"]) == 0
    checkpoint = FakeRun(run).save(100)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["config"] = json.loads((run / "config.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    mark(checkpoint)
    capsys.readouterr()
    assert main(["critical-batch", f"{run}/", "--at=100", "--batches=1,2", "--slurm", "--nodes=1", "--time=20"]) == 0
    folder = Path("runs/pydoc.critical_batch_at_100").absolute()
    options = f"--array=0,1 --output={folder}/points/%a.log --nodes=1 --time=20 --export=ALL,LARGEBATCH_SNAPSHOT"
    assert called()["words"] == shlex.split(f"--parsable {options} {SMOKE} --run-dir={folder} --sweep")
    name, allowed, *words = (folder / "points/1").read_text().splitlines()
    assert (name, allowed.partition("=")[0]) == ("global_batch_size=64_seed=0", "--allow-change")
    assert "--train.stop_after_steps=150" in words
    linked = folder / name / "checkpoints" / checkpoint.name / "manifest.json"
    assert linked.samefile(checkpoint / "manifest.json")
    # Nothing is said of branches that have not been trained.
    printed = capsys.readouterr().out
    assert printed.endswith("when all points are trained, the same command shows the result\n")
    assert "undecided" not in printed
    assert not (folder / "critical_batch.json").exists()
    # A finding of fewer seeds is not theirs.
    (folder / "critical_batch.json").touch()
    words = ["--at=100", "--batches=1,2", "--slurm", "--nodes=1", "--time=20"]
    assert main(["critical-batch", str(run), *words, "--seeds=2"]) == 0
    assert not (folder / "critical_batch.json").exists()
    # The run of another task, which has no script here.
    tasks.copy("causal_lm", Path("mine"))
    write_lines(run / "history.jsonl", [started(0, recipe="mine/causal_lm/gpt_pydoc.json")])
    assert main(["critical-batch", str(run), *words, "--folder", "branches"]) == 2
    assert "belongs to a different task than mine/causal_lm" in capsys.readouterr().err


@pytest.mark.usefixtures("sbatch")
def test_a_sweep_with_a_wrong_point_is_not_submitted(capsys):
    words = ["--batch.global_batch_size", "32,33", "--slurm", "--nodes", "2"]
    assert main(["sweep", "gpt_pydoc", *words]) == 2
    assert "  - global_batch_size=33_seed=0: " in capsys.readouterr().err
    assert not Path("called.json").exists()
    assert not Path("runs").exists()
