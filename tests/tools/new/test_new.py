"""`largebatch new`: what is made, what is printed, and what is refused with nothing left behind."""

import errno
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import run_job, train
from largebatch import __version__
from largebatch.tools.command_line import main
from largebatch.tools.verify.differences import read_run
from paths import RECIPES, ROOT, STRATEGIES
from planting import plant


def new(folder, *words: str, recipe: str = "gpt_pydoc") -> int:
    return main(["new", str(folder), "--recipe", recipe, *words])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


COPIED = {
    *(f"recipes/causal_lm/{name}.py" for name in ("config", "data", "model", "train")),
    *(f"recipes/causal_lm/{name}" for name in ("README.md", "recipe.schema.json", "gpt_pydoc.json")),
    "slurm/gpt_pydoc.sbatch",
    "slurm/launch.sh",
    "slurm/site.example.sh",
    *(f"launch/{name}.sh" for name in ("claim_start", "environment", "free_port", "hosts", "node")),
    "launch/kubernetes.yaml",
    *(f"recipes/accelerate_configs/{strategy}.yaml" for strategy in (*STRATEGIES, "zero3_offload")),
    *(f"ds_configs/{name}.json" for name in ("zero1", "zero2", "zero3", "zero3_offload")),
}
WRITTEN = {"README.md", "requirements.txt", ".gitignore", "tests/test_recipe.py"}


def test_what_is_made(tmp_path):
    assert new(tmp_path / "job") == 0
    made = tree(tmp_path / "job")
    assert made.keys() == COPIED | WRITTEN | {"LICENSE.largebatch"}
    assert {name: made[name] for name in COPIED} == {name: (ROOT / name).read_bytes() for name in COPIED}
    assert made["LICENSE.largebatch"] == (ROOT / "LICENSE").read_bytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "job"]


def test_scripts_that_are_run_by_name_can_be(tmp_path):
    assert new(tmp_path / "job") == 0
    runnable = {path.name for path in (tmp_path / "job").glob("*/*.*") if path.stat().st_mode & stat.S_IXUSR}
    assert runnable == {"claim_start.sh", "free_port.sh", "hosts.sh", "node.sh"}


def test_requirements_are_the_tested_ones(tmp_path):
    assert new(tmp_path / "job") == 0
    needed = {line for line in tree(tmp_path / "job")["requirements.txt"].decode().splitlines() if "==" in line}
    tested = {line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    checks = {"pytest-xdist", "jsonschema", "mypy", "pytorch-optimizer", "ruff"}
    assert {line for line in tested if line.partition("==")[0] not in checks} == needed - {f"largebatch=={__version__}"}
    assert f"largebatch=={__version__}" in needed


def test_the_strategy_is_everywhere(tmp_path):
    assert new(tmp_path / "theirs", recipe="llama_8b") == 0
    assert new(tmp_path / "mine", "--strategy", "fsdp", recipe="llama_8b") == 0
    theirs, mine = tree(tmp_path / "theirs"), tree(tmp_path / "mine")
    assert theirs.keys() == mine.keys()
    differ = {name for name in mine if mine[name] != theirs[name]}
    assert differ == {"slurm/llama_8b.sbatch", "README.md", "tests/test_recipe.py"}
    assert "STRATEGY=${STRATEGY:-fsdp}\n" in mine["slurm/llama_8b.sbatch"].decode()
    assert "accelerate_configs/fsdp.yaml --num_processes 8 " in mine["README.md"].decode()
    assert 'STRATEGY = "fsdp"\n' in mine["tests/test_recipe.py"].decode()
    # Nothing else is said of the recipe's own.
    assert 'STRATEGY = "hsdp"\n' in theirs["tests/test_recipe.py"].decode()
    assert "accelerate_configs/hsdp.yaml" not in mine["README.md"].decode()


def test_the_smallest_task(tmp_path, monkeypatch, capsys):
    """What trains, plans, verifies and submits as it is."""
    assert main(["new", str(tmp_path / "job"), "--task", "tide_tables"]) == 0
    made = tree(tmp_path / "job")
    of_the_task = {f"recipes/tide_tables/{name}" for name in ("README.md", "recipe.schema.json", "tide_tables.json")}
    of_the_task |= {f"recipes/tide_tables/{name}.py" for name in ("config", "data", "model", "train")}
    shared = {name for name in COPIED if "causal_lm" not in name and "gpt_pydoc" not in name}
    assert made.keys() == of_the_task | shared | WRITTEN | {"LICENSE.largebatch", "slurm/tide_tables.sbatch"}
    assert not [name for name, text in made.items() if re.search(rb"@(?!check|300)", text) and name not in shared]
    assert sum(text.count(b"\n") for name, text in made.items() if name.endswith(".py")) < 150

    monkeypatch.chdir(tmp_path / "job")
    monkeypatch.setenv("LARGEBATCH_ENV", "")
    recipe = "recipes/tide_tables/tide_tables.json"
    capsys.readouterr()
    assert main(["lint"]) == 0
    assert capsys.readouterr().out == "13 files, nothing found\n"
    assert main(["schema", "--check", "recipes/tide_tables"]) == 0
    assert main(["submit", "tide_tables", "--nodes=2", "--dry-run"]) == 0
    assert main(["plan", recipe, "--world-sizes=1,4", "--gpu-memory=1", "--json"]) == 0
    capsys.readouterr()
    assert main(["plan", recipe, "--world-size=2", "--model.hidden_size=3"]) == 2
    assert "model.hidden_size: less than data.num_inputs, 4; write at least that" in capsys.readouterr().err


def test_the_smallest_task_with_other_data(tmp_path, capsys):
    """The template's check is about its own data."""
    assert main(["new", str(tmp_path / "job"), "--task", "tides"]) == 0
    folder = tmp_path / "job/recipes/tides"
    rows = 'class Rows(HubOrLocal):\n    """Rows of a table."""\n\n\nclass Config'
    plant(folder / "config.py", "class Config", rows)
    plant(folder / "config.py", "data: Points", "data: Points | Rows")
    plant(folder / "config.py", "import Data\n", "import Data, HubOrLocal\n")
    data = '{"source": "datasets", "path": "csv", "num_train_samples": 512, "num_eval_samples": 9}'
    assert main(["plan", str(folder / "tides.json"), "--world-size=2", "--data", data]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_smallest_task_learns(tmp_path):
    assert main(["new", str(tmp_path / "job"), "--task", "tides"]) == 0
    run_job(train_points, tmp_path / "job/recipes/tides/tides.json", tmp_path / "run", world_size=1, strategy="single")
    losses = [line["loss"] for line in read_run(tmp_path / "run").evaluations]
    # The values' variance is 4 (1 - sin(6) / 6) / 2, which is 2.1.
    assert losses[0] < 1 > 100 * losses[-1]


def train_points(recipe, run_dir):
    train(recipe, "--logging.trackers=[]", run_dir=run_dir)


def test_vendored(tmp_path, capsys):
    assert new(tmp_path / "job", "--vendor") == 0
    printed = capsys.readouterr().out
    assert "&& pip install --no-deps --editable .\n" in printed
    # That of the environment which has another largebatch.
    assert "LARGEBATCH_ENV" not in printed
    made, package = tree(tmp_path / "job"), tree(ROOT / "src/largebatch")
    assert {name.removeprefix("src/largebatch/"): text for name, text in made.items() if name.startswith("src/")} == {
        name: text for name, text in package.items() if "__pycache__" not in name
    }
    assert "largebatch" not in "".join(made["requirements.txt"].decode().splitlines()[1:])


def test_what_is_printed_can_be_done_there(tmp_path, capsys):
    folder = tmp_path / "it's my job"
    assert new(folder, recipe="resnet_digits") == 0
    title, _, *commands = capsys.readouterr().out.splitlines()
    recipe = "recipes/image_classification/resnet_digits.json"
    assert title == f"{folder}: 36 files, {recipe} under ddp; README.md says what to change first"
    assert [shlex.split(command) for command in commands[:2]] == [["cd", str(folder)], ["largebatch", "lint"]]
    assert commands[2] == (
        "  accelerate launch --config_file recipes/accelerate_configs/ddp.yaml --num_processes 2 "
        f"recipes/image_classification/train.py --config {recipe}"
    )
    # With the environment that largebatch is in.
    activate = Path(sys.prefix) / "bin/activate"
    environment = [f"LARGEBATCH_ENV={activate}"] if activate.is_file() else []
    assert shlex.split(commands[3]) == [*environment, "sbatch", "slurm/resnet_digits.sbatch"]


@pytest.mark.parametrize(
    ("place", "words", "message"),
    [
        ("x", ["--recipe=gpt2_124"], "--recipe gpt2_124: no such recipe, did you mean gpt2_124m?; write one of bert_"),
        ("x", ["--recipe=../recipes/causal_lm/gpt_pydoc"], "--recipe ../recipes/causal_lm/gpt_pydoc: no such recipe"),
        ("x", ["--recipe="], f"--recipe : no such recipe; write one of {sorted(path.stem for path in RECIPES)[0]}"),
        (
            "x",
            ["--strategy=zero4"],
            f"--strategy zero4: no such strategy, did you mean zero3?; write one of {', '.join(STRATEGIES)}",
        ),
        ("x", ["--strategy="], f"--strategy : no such strategy; write one of {', '.join(STRATEGIES)}"),
        (
            "x",
            ["--task=Tide tables"],
            "--task Tide tables: this names a folder next to",
        ),
        ("x", ["--task=../x"], "--task ../x: this names a folder"),
        ("x", ["--task=tides", "--strategy=zero4"], "--strategy zero4: no such strategy, did you mean zero3?"),
        ("circle", [], "circle cannot be created (File exists)"),
        ("full", [], "full cannot be created (File exists); give a new folder, where you may write"),
        ("full/a", [], "full/a cannot be created (File exists)"),
        ("none/x", [], "none/x cannot be created (No such file or directory)"),
        ("full/a/x", [], "full/a/x cannot be created (Not a directory)"),
        ("/proc/x", [], "/proc/x cannot be created (No such file or directory)"),
        ("x" * 300, [], f"{'x' * 300} cannot be created (File name too long)"),
    ],
)
def test_refused(place, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    for name in "abcd":
        Path("full", name).write_text(name)
    Path("circle").symlink_to("circle")
    before = sorted(tmp_path.rglob("*"))
    what = [] if any(word.startswith("--task") for word in words) else ["--recipe", "gpt_pydoc"]
    assert main(["new", place, *what, *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}"), printed.err
    assert printed.out == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_nothing_half_made_is_left(error, tmp_path, monkeypatch, capsys):
    before = sorted(tmp_path.rglob("*"))
    copyfile, calls = shutil.copyfile, []

    def fill_up(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 9:
            raise error
        return copyfile(*arguments, **options)

    monkeypatch.setattr(shutil, "copyfile", fill_up)
    assert new(tmp_path / "job") == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert len(calls) == 9
    assert sorted(tmp_path.rglob("*")) == before
    message = (
        "interrupted" if isinstance(error, KeyboardInterrupt) else "job cannot be created (No space left on device)"
    )
    assert message in capsys.readouterr().err


def test_without_torch(tmp_path):
    program = (
        "import sys; from largebatch.tools.command_line import main; "
        "code = main(['new', sys.argv[1], '--recipe=llama_8b', '--vendor']); "
        "sys.exit(code or {'torch', 'accelerate', 'deepspeed', 'transformers'} & sys.modules.keys() or 0)"
    )
    command = [sys.executable, "-c", program, tmp_path / "job"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
