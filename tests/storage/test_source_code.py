"""The snapshot of what a job runs."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from largebatch.errors import StorageError, UserError
from largebatch.storage.source_code import keep_source, take_snapshot

FILES = (
    "launch/node.sh",
    "slurm/launch.sh",
    "recipes/task/train.py",
    "recipes/task/config.py",
    "recipes/task/data/__init__.py",
    "recipes/task/tokens.txt",
    "recipes/accelerate_configs/ddp.yaml",
    "ds_configs/zero2.json",
    "src/largebatch/data/order.py",
)
LEFT_OUT = (
    ".git/HEAD",
    ".venv/bin/python",
    "README.md",
    "runs/x/plan.json",
    "data/train.bin",
    "recipes/task/data_of_x/plan.json",
    "recipes/other/data/train.bin",
    "recipes/other/runs/x/status.json",
    "recipes/task/__pycache__/train.pyc",
    "recipes/task/.cache/x.py",
)


@pytest.fixture
def project(tmp_path):
    for name in (*FILES, *LEFT_OUT):
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "project"


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_job_gets_what_it_needs_and_nothing_else(project, run_dir):
    (project / "launch/node.sh").chmod(0o755)
    take_snapshot(project, run_dir / "jobs/snapshot_1")
    assert files(run_dir / "jobs/snapshot_1") == sorted((*FILES, "git.json"))
    assert (run_dir / "jobs/snapshot_1/launch/node.sh").stat().st_mode & 0o100


def test_links_are_followed_but_not_to_a_parent(project, tmp_path):
    outside = tmp_path / "mine"
    outside.mkdir()
    (outside / "train.py").write_text("mine")
    (project / "recipes/mine").symlink_to(outside)
    (project / "recipes/loop").symlink_to(project)
    (project / "recipes/nowhere").symlink_to("none")
    take_snapshot(project, tmp_path / "copy")
    (outside / "train.py").write_text("changed")
    assert (tmp_path / "copy/recipes/mine/train.py").read_text() == "mine"
    assert not (tmp_path / "copy/recipes/mine").is_symlink()
    assert not (tmp_path / "copy/recipes/loop").exists()


def test_a_snapshot_stays_as_it_is(project, tmp_path):
    take_snapshot(project, tmp_path / "copy")
    (project / FILES[0]).write_text("changed")
    take_snapshot(project, tmp_path / "copy")
    assert (tmp_path / "copy" / FILES[0]).read_text() == FILES[0]


def test_a_recipe_from_elsewhere_is_placed_in_its_task(project, tmp_path):
    """As a job runs it, whether it or its task or both are outside of recipes/."""
    own = tmp_path / "mine"
    own.mkdir()
    (own / "train.py").write_text("mine")
    for number, (recipe, task, place) in enumerate(
        (
            (tmp_path / "moved.json", "recipes/task", "recipes/task/moved.json"),
            ("trials/moved.json", "recipes/../recipes/task", "recipes/task/moved.json"),
            (own / "moved.json", own, "recipes/mine/moved.json"),
        )
    ):
        (project / recipe).parent.mkdir(exist_ok=True)
        (project / recipe).write_text(place)
        copy = tmp_path / f"copy_{number}"
        with contextlib.chdir(project):
            take_snapshot(Path(), copy, Path(recipe), Path(task))
        assert (copy / "recipe").read_text() == f"{place}\n"
        assert (copy / place).read_text() == place
        assert (copy / place).with_name("train.py").read_text() in ("mine", "recipes/task/train.py")


def test_it_is_complete_or_absent(project, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises(StorageError, match=r"cannot be written: .*No space left"):
        take_snapshot(project, tmp_path / "copies/1")
    assert list((tmp_path / "copies").iterdir()) == []


def test_refused(project, tmp_path):
    with pytest.raises(UserError, match="go to the top of the repository"):
        take_snapshot(project / "recipes", tmp_path / "copy")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with pytest.raises(UserError, match="name another folder"):
        take_snapshot(project, tmp_path / "mine")
    assert files(tmp_path / "mine") == ["thesis.tex"]


def test_the_commit_is_that_of_the_project_also_for_runs_inside_of_it(project, tmp_path):
    (project / ".git/HEAD").unlink()
    (project / ".git").rmdir()
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "--quiet"], ["add", "recipes"], ["commit", "--quiet", "--message=x"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    snapshot = project / "runs/x/jobs/5/code"
    take_snapshot(project, snapshot)
    state = {"commit": commit, "changed": True}
    assert json.loads((snapshot / "git.json").read_text()) == state
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=y"], check=True)
    keep_source(tmp_path / "source", snapshot / "recipes/task")
    assert json.loads((tmp_path / "source/git.json").read_text()) == state


def test_a_read_only_task_can_be_kept_at_every_start(project, tmp_path):
    """Its copies' folders can be written, and so deleted."""
    task = project / "recipes/task"
    for folder in (task / "data", task):
        folder.chmod(0o555)
    for _ in range(2):
        keep_source(tmp_path / "source", task)
    copied = [tmp_path / "source/task", tmp_path / "source/task/data"]
    assert all(folder.stat().st_mode & 0o200 for folder in copied)


def test_copies_are_as_secret_as_the_files(project, tmp_path):
    task = project / "recipes/task"
    secrets = {"account.json": 0o600, "data/keys.py": 0o440}
    for name, mode in secrets.items():
        (task / name).touch(mode)
    os.mkfifo(task / "pipe.py")
    keep_source(tmp_path / "source", task)
    take_snapshot(project, tmp_path / "snapshot")
    for copy in (tmp_path / "source/task", tmp_path / "snapshot/recipes/task"):
        assert {name: (copy / name).stat().st_mode & 0o777 for name in secrets} == secrets
        assert not (copy / "pipe.py").exists()
