"""A recorder of an attempt, without other processes and without a model."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from largebatch.config import load_config
from largebatch.plan import resolve
from largebatch.run.command_line import RunOptions
from largebatch.run.record.folder import OwnFolder
from largebatch.run.record.recorder import Recorder
from largebatch.run.resume import Start
from largebatch.system.endings import OwnEnding
from paths import PYDOC


def begin(run_dir: Path, ending: OwnEnding) -> Recorder:
    """The recorder of the main process."""
    config = load_config(PYDOC, ["--logging.trackers=[]"])
    backend = SimpleNamespace(
        plan=resolve(config, 2),
        launch=SimpleNamespace(strategy="ddp"),
        world_size=2,
        device=torch.device("cpu"),
        is_main_process=True,
        learning_rate=0.1,
        raise_on_all_ranks=nullcontext,
        all_gather=lambda tensor: tensor[None],
        all_max=lambda value: lambda: value,
        gather_objects=lambda value: [value],
        from_main_process=lambda function: function(),
    )
    options = RunOptions(run_dir, ending=ending)
    utilization = SimpleNamespace(at=lambda _: None, convention="")
    return Recorder(config, backend, OwnFolder(run_dir), Start(), options, utilization)
