"""Trackers: one run over all starts in W&B and TensorBoard; one that fails costs no more than itself."""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock, call

import pytest
from accelerate import PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog

from largebatch.config import load_config
from largebatch.run.record.folder import OwnFolder
from largebatch.run.record.trackers import Trackers
from paths import PYDOC


@pytest.fixture(autouse=True)
def accelerate():
    """Its logging asks whether this is the main process."""
    PartialState()
    yield
    PartialState._reset_state()


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the module `wandb`; its `init` returns one run."""
    module = MagicMock(__spec__=ModuleSpec("wandb", None))
    module.run = module.init.return_value
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_run").mkdir()
    return OwnFolder(tmp_path / "my_run")


def start(folder, first_step=0, names=("wandb",), words=(), said=None):
    config = load_config(PYDOC, [f"--logging.trackers={json.dumps(names)}", *words])
    say = pytest.fail if said is None else said.append
    return Trackers(names, config, folder, first_step, say)


def show_steps(started, steps):
    for step in steps:
        started.add("train", {"loss": 1 / step}, step)
        if step % 20 == 0:
            started.add("evaluation", {"loss": 2 / step}, step)


def test_starts_of_a_run_folder_are_one_run_with_increasing_steps(wandb, folder):
    """W&B ignores steps that go back."""
    # Killed after step 60; then, from the checkpoint of step 40, killed after step 50; then on to the end.
    show_steps(start(folder), range(10, 61, 10))
    show_steps(start(folder, 40), [50])
    last = start(folder, 40)
    show_steps(last, range(50, 101, 10))
    last.close()
    starts = [options for _, options in wandb.init.call_args_list]
    assert len(starts) == 3
    assert len({options["id"] for options in starts}) == 1
    assert all(options["resume"] == "allow" for options in starts)
    rows = {}
    for (values,), options in wandb.run.log.call_args_list:
        assert options["step"] >= max(rows, default=0)
        rows.setdefault(options["step"], {}).update(values)
    assert list(rows) == [10, 20, 30, 40, 50, 60, 61, 62, 63, 70, 80, 90, 100]
    assert [row["step"] for row in rows.values()] == [10, 20, 30, 40, 50, 60, 50, 50, 60, 70, 80, 90, 100]
    assert all(row["train/loss"] == 1 / row["step"] for row in rows.values())
    shown = [row["step"] for row in rows.values() if "evaluation/loss" in row]
    assert shown == [20, 40, 60, 60, 80, 100]
    assert wandb.run.define_metric.mock_calls[:2] == [call("step"), call("*", step_metric="step")]
    wandb.run.finish.assert_called_once()


def test_project_and_name(wandb, folder, tmp_path):
    (tmp_path / "other").mkdir()
    start(folder)
    start(OwnFolder(tmp_path / "other"), words=["--logging.tracker_project=digits"])
    first, second = (options for _, options in wandb.init.call_args_list)
    assert (first["project"], first["name"]) == ("largebatch", "my_run")
    assert (second["project"], second["name"]) == ("digits", "other")
    assert first["id"] != second["id"]


def tensorboard_steps(folder):
    events = EventAccumulator(str(folder.tensorboard_dir / folder.path.name))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


@pytest.mark.parametrize("call", ["init", "run.log", "run.finish"])
@pytest.mark.parametrize("error", [ConnectionError("the server is away"), SystemExit(1)])
def test_one_that_fails_is_dropped_with_one_warning(call, error, wandb, folder):
    wandb.configure_mock(**{f"{call}.side_effect": error})
    said = []
    started = start(folder, names=["wandb", "tensorboard"], said=said)
    show_steps(started, range(10, 51, 10))
    started.close()
    problem = f"{type(error).__name__}: {error}"
    assert said == [f"WARNING: wandb is dropped and gets no more values in this attempt: {problem}"]
    assert tensorboard_steps(folder) == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("variable", ["WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"])
@pytest.mark.parametrize(("given", "limits"), [("", range(1, 61)), ("5", [5])])
def test_each_limits_how_long_it_waits_for_its_server(variable, given, limits, wandb, folder, monkeypatch):
    """It reads its variables when it connects; a user's own limit stays."""
    seen = []
    wandb.init.side_effect = lambda **_: seen.append(int(os.environ[variable]))
    monkeypatch.delenv(variable, raising=False)
    if given:
        monkeypatch.setenv(variable, given)
    start(folder, said=[])
    assert seen[0] in limits


def test_steps_that_are_repeated_are_hidden_in_tensorboard(folder):
    start(folder, names=["tensorboard"]).close()
    before = set(folder.tensorboard_dir.glob("*/events*"))
    start(folder, 10, names=["tensorboard"]).close()
    (later,) = set(folder.tensorboard_dir.glob("*/events*")) - before
    sessions = [event for event in EventFileLoader(str(later)).Load() if event.HasField("session_log")]
    assert [(event.session_log.status, event.step) for event in sessions] == [(SessionLog.START, 11)]
