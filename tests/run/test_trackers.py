"""Trackers: one run over all starts in W&B and TensorBoard; one that fails costs no more than itself."""

import importlib.machinery
import json
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from accelerate import PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog

from jobs import train_in_job
from largebatch.config import load_config
from largebatch.run.record.folder import OwnFolder
from largebatch.run.record.trackers import Trackers
from paths import PYDOC
from tasks import SMALL


class Run:
    """What W&B's `init` returns; as that does, it ignores steps that go back."""

    def __init__(self, service, options):
        self.service = service
        self.options = options
        self.rows = service.rows.setdefault(options.get("id"), {})

    def define_metric(self, name, step_metric=None):
        self.service.axes[name] = step_metric

    def log(self, values, step):
        self.service.on_log()
        if not self.rows or step >= max(self.rows):
            self.rows.setdefault(step, {}).update(values)

    def finish(self):
        self.service.on_finish()
        self.service.finished += 1


class Service(ModuleType):
    """Stands in for the module `wandb`, and for its server."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.config = SimpleNamespace(update=lambda _values, **_: None)
        self.rows = {}
        self.axes = {}
        self.starts = []
        self.finished = 0
        # Called in each `init`, `log` and `finish`.
        self.on_init = self.on_log = self.on_finish = lambda: None

    def init(self, **options):
        self.on_init()
        self.starts.append(options)
        return Run(self, options)


@pytest.fixture(autouse=True)
def accelerate():
    """Its logging asks whether this is the main process."""
    PartialState()
    yield
    PartialState._reset_state()


@pytest.fixture
def wandb(monkeypatch):
    service = Service("wandb")
    monkeypatch.setitem(sys.modules, "wandb", service)
    return service


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
    # Killed after step 60; then, from the checkpoint of step 40, killed after step 50; then on to the end.
    show_steps(start(folder), range(10, 61, 10))
    show_steps(start(folder, 40), [50])
    last = start(folder, 40)
    show_steps(last, range(50, 101, 10))
    last.close()
    assert len(wandb.starts) == 3
    assert len({options["id"] for options in wandb.starts}) == 1
    assert all(options["resume"] == "allow" for options in wandb.starts)
    (rows,) = wandb.rows.values()
    assert list(rows) == [10, 20, 30, 40, 50, 60, 61, 62, 63, 70, 80, 90, 100]
    assert [row["step"] for row in rows.values()] == [10, 20, 30, 40, 50, 60, 50, 50, 60, 70, 80, 90, 100]
    assert all(row["train/loss"] == 1 / row["step"] for row in rows.values())
    shown = [row["step"] for row in rows.values() if "evaluation/loss" in row]
    assert shown == [20, 40, 60, 60, 80, 100]
    assert wandb.axes == {"step": None, "*": "step"}
    assert wandb.finished == 1


def test_project_and_name(wandb, folder):
    start(folder)
    start(folder, words=["--logging.tracker_project=digits"])
    named = [(options["project"], options["name"]) for options in wandb.starts]
    assert named == [("largebatch", "my_run"), ("digits", "my_run")]


def test_another_folder_is_another_run(wandb, folder, tmp_path):
    (tmp_path / "other").mkdir()
    start(folder)
    start(OwnFolder(tmp_path / "other"))
    assert len({options["id"] for options in wandb.starts}) == 2


@pytest.mark.slow
def test_only_the_main_process_has_trackers(tmp_path):
    words = (*SMALL, "--train.stop_after_steps=1", '--logging.trackers=["tensorboard"]')
    train_in_job(PYDOC, tmp_path / "run", *words)
    assert len(list((tmp_path / "run/tensorboard/run").glob("events.out.tfevents*"))) == 1


def tensorboard_steps(folder):
    events = EventAccumulator(str(folder.tensorboard_dir / folder.path.name))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


def refuse():
    raise ConnectionError("the server is away")


def leave():
    raise SystemExit(1)


@pytest.mark.parametrize("moment", ["on_init", "on_log", "on_finish"])
@pytest.mark.parametrize(
    ("fault", "problem"),
    [(refuse, "ConnectionError: the server is away"), (leave, "SystemExit: 1")],
)
def test_one_that_fails_is_dropped_with_one_warning(moment, fault, problem, wandb, folder):
    setattr(wandb, moment, fault)
    said = []
    started = start(folder, names=["wandb", "tensorboard"], said=said)
    show_steps(started, range(10, 51, 10))
    started.close()
    assert said == [f"WARNING: wandb is dropped and gets no more values in this attempt: {problem}"]
    assert tensorboard_steps(folder) == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("variable", ["WANDB_INIT_TIMEOUT", "WANDB_FINISH_TIMEOUT"])
@pytest.mark.parametrize("given", [None, "5"])
def test_each_limits_how_long_it_waits_for_its_server(variable, given, wandb, folder, monkeypatch):
    """It reads its variables when it connects; a user's own limit stays."""
    seen = []
    wandb.on_init = lambda: seen.append(os.environ[variable]) or refuse()
    monkeypatch.delenv(variable, raising=False)
    if given is not None:
        monkeypatch.setenv(variable, given)
    start(folder, said=[])
    assert (seen == [given]) if given else (1 <= int(seen[0]) <= 60)


def test_steps_that_are_repeated_are_hidden_in_tensorboard(folder):
    start(folder, names=["tensorboard"]).close()
    before = set(folder.tensorboard_dir.glob("*/events*"))
    start(folder, 10, names=["tensorboard"]).close()
    (later,) = set(folder.tensorboard_dir.glob("*/events*")) - before
    sessions = [event for event in EventFileLoader(str(later)).Load() if event.HasField("session_log")]
    assert [(event.session_log.status, event.step) for event in sessions] == [(SessionLog.START, 11)]
