"""The run folder: nothing of an earlier run or of somebody else is ever written over."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest

import tasks
from jobs import JobFailed, failure_of, train, train_in_job
from largebatch.config import load_config, validate
from largebatch.errors import UserError
from largebatch.plan import resolve
from largebatch.run.record.folder import OwnFolder
from largebatch.storage.layout import read_object
from largebatch.system.failures import kind_of
from paths import DIGITS, PYDOC
from tasks import SMALL


def begin(folder):
    """Begin a run; where the earlier one was moved."""
    config = load_config(DIGITS)
    return folder.begin(config, resolve(config, 2), False, {})[1]


def created(path):
    folder = OwnFolder(path)
    folder.hold()
    return begin(folder)


def test_config_and_plan_are_written_and_the_config_can_be_run_again(run_dir):
    assert created(run_dir) is None
    written = read_object(run_dir / "config.json")
    expected = load_config(DIGITS, ["--$schema=null"])
    assert written.pop("task") == "image_classification"
    assert validate(written, type(expected)) == expected
    assert read_object(run_dir / "plan.json")["max_global_batch_size"] == 64


def test_the_source_is_the_task_as_it_was_at_the_start(run_dir, tmp_path):
    task = tasks.copy("causal_lm", tmp_path)
    before = (task / "model.py").read_text()
    config = load_config(task / "gpt_pydoc.json")
    folder = OwnFolder(run_dir)
    folder.begin(config, resolve(config, 2), False, {})
    assert read_object(run_dir / "source/git.json") == {"commit": None, "changed": None}
    # A requeued job, which trains with the kept files, leaves them; a start with other files replaces them.
    (task / "model.py").write_text("")
    (task / "train.py").unlink()
    kept = run_dir / "source/causal_lm"
    requeued = load_config(kept / "gpt_pydoc.json")
    assert requeued.task == "causal_lm"
    folder.begin(requeued, resolve(requeued, 2), True, {})
    assert (kept / "model.py").read_text() == before
    assert (kept / "train.py").exists()
    folder.begin(config, resolve(config, 2), True, {})
    assert (kept / "model.py").read_text() == ""
    assert not (kept / "train.py").exists()


def test_the_source_has_the_recipe_that_was_elsewhere(run_dir, tmp_path):
    task = tasks.copy("causal_lm", tmp_path)
    recipe = tmp_path / "gpt_pydoc.json"
    recipe.write_text((task / "gpt_pydoc.json").read_text().replace('"seed": 0', '"seed": 9'))
    config = load_config(recipe, task=task)
    OwnFolder(run_dir).begin(config, resolve(config, 2), False, {"recipe": str(recipe)})
    assert load_config(run_dir / "source/causal_lm/gpt_pydoc.json").seed == 9


def test_earlier_runs_are_moved_aside(tmp_path):
    path = tmp_path / "run"
    created(path)
    for name in ("run.1", "run.2"):
        (path / "metrics.jsonl").write_text(name)
        assert created(path) == tmp_path / name
    assert [(tmp_path / name / "metrics.jsonl").read_text() for name in ("run.1", "run.2")] == ["run.1", "run.2"]
    assert not (path / "metrics.jsonl").exists()


def test_the_job_that_moves_a_run_aside_keeps_its_own_logs(tmp_path, monkeypatch):
    """Its batch script has been writing there since before the run began."""
    path = tmp_path / "run"
    for job in ("7", "8"):
        monkeypatch.setenv("LARGEBATCH_JOB_ID", job)
        (path / "jobs" / job).mkdir(parents=True)
        (path / "jobs" / job / "n1.log").write_text(job)
        OwnFolder(path).check_usable()
        created(path)
    assert [file.relative_to(tmp_path) for file in sorted(tmp_path.rglob("*.log"))] == [
        Path("run/jobs/7/n1.log"),
        Path("run/jobs/8/n1.log"),
    ]
    assert (tmp_path / "run.1/attempts").is_dir()


def test_a_job_obeys_its_own_batch_script_and_people_only(tmp_path, monkeypatch):
    monkeypatch.setenv("LARGEBATCH_JOB_ID", "7")
    obeyed = OwnFolder(tmp_path).obeyed_stop_files.values()
    assert [file.name for file in obeyed] == ["stop", "stop.7"]
    monkeypatch.delenv("LARGEBATCH_JOB_ID")
    assert [file.name for file in OwnFolder(tmp_path).obeyed_stop_files.values()] == ["stop"]


def test_requests_to_stop_from_before_the_start_are_forgotten_and_others_are_kept(run_dir, monkeypatch):
    """Also if the run that was there is moved aside; what else is called "stop…" is left alone."""
    began = 1000
    created(run_dir)
    monkeypatch.setenv("LARGEBATCH_JOB_ID", "7")
    monkeypatch.setenv("LARGEBATCH_BEGAN", str(began))
    for name, time in (("stop", began - 1), ("stop.7", began + 1), ("stop.6", began - 1), ("stopwatch", began - 1)):
        (run_dir / name).touch()
        os.utime(run_dir / name, (time, time))
    (run_dir / "jobs/snapshot_1").mkdir(parents=True)
    moved = created(run_dir)
    assert sorted(file.name for file in run_dir.glob("stop*")) == ["stop.7"]
    assert (moved / "stopwatch").exists()
    # A job that waits in the queue may need the snapshot.
    assert (run_dir / "jobs/snapshot_1").is_dir()


def test_a_request_to_stop_another_start_that_is_preparing_stays(tmp_path, monkeypatch):
    """Two jobs start in a folder that has no run yet; the first is asked to stop before the second looks around."""
    (tmp_path / "jobs").mkdir()
    first = OwnFolder(tmp_path)
    first.hold()
    request = tmp_path / "stop"
    request.touch()
    monkeypatch.setenv("LARGEBATCH_BEGAN", str(int(request.stat().st_mtime) + 60))
    with pytest.raises(UserError, match="another run is writing to"):
        OwnFolder(tmp_path).hold()
    assert request.exists()


def test_of_two_starts_in_a_new_folder_one_is_refused(run_dir):
    first, second = (OwnFolder(run_dir) for _ in range(2))
    for folder in (first, second):
        folder.hold()
    begin(first)
    with pytest.raises(UserError, match="another run is writing to"):
        begin(second)
    # It may have ended already.
    del first, folder
    with pytest.raises(UserError, match="another run has just begun in"):
        begin(second)


@pytest.mark.parametrize(("code", "kind"), [("EIO", "files"), ("ENOLCK", "files"), ("EACCES", "refused")])
def test_only_errors_that_last_are_the_users(code, kind, run_dir, monkeypatch):
    created(run_dir)
    number = getattr(errno, code)

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", fail)
    with pytest.raises(UserError, match=rf"cannot be written: .*{os.strerror(number)}") as caught:
        created(run_dir)
    assert kind_of(caught.value) == kind
    assert ("choose another folder" in str(caught.value)) == (kind == "refused")


def test_other_peoples_files_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds files that are not a run's"):
        OwnFolder(tmp_path).check_usable()
    with pytest.raises(UserError, match=r"thesis\.tex cannot be written: .*Not a directory.*; choose another folder"):
        OwnFolder(tmp_path / "thesis.tex").check_usable()
    OwnFolder(tmp_path / "new").check_usable()


def test_a_link_to_another_disk_stays_one(run_dir, tmp_path):
    (tmp_path / "scratch").mkdir()
    run_dir.symlink_to(tmp_path / "scratch")
    created(run_dir)
    assert created(run_dir) == tmp_path / "scratch.1"
    assert run_dir.is_symlink()
    assert (run_dir / "plan.json").exists()


@pytest.mark.slow
def test_refused_before_the_processes_join(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert failure_of(partial(train, run_dir=tmp_path), PYDOC, *SMALL).count("error: --run-dir:") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_start_that_fails_moves_nothing(run_dir, tmp_path):
    created(run_dir)
    with pytest.raises(JobFailed, match=r"data\.num_train_samples: the recipe says 1000000, but the data has"):
        train_in_job(PYDOC, run_dir, *SMALL, "--data.num_train_samples=1000000")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
