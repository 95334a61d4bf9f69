"""What takes seconds to import is imported by those who use it: `transformers` by recipes, DeepSpeed by ZeRO."""

import os
import subprocess
import sys

import pytest

from jobs import launch_environment
from largebatch.tools.local_jobs.jobs import local_store, meeting_place
from paths import DIGITS, ROOT

PROGRAM = """
import sys
import largebatch.data.images
import largebatch.data.text
import largebatch.run
import torch
from largebatch.backend.launch import read_launch
from largebatch.backend.start import start
from largebatch.config import load_config
from largebatch.plan import resolve

launch = read_launch()
config = load_config(sys.argv[1], ["--optimizer.momentum=0.0", "--optimizer.nesterov=false"])
backend = start(launch, resolve(config, launch.world_size))
model = torch.nn.Linear(4, 4)
model, _ = backend.prepare(model, torch.optim.SGD(model.parameters()))
backend.begin_micro_step(0, 1)
backend.backward(model(torch.ones(2, 4)).sum(), 1.0)
backend.clip_and_step(measure_norm=True)
backend.end()
print(launch.strategy, *sorted({"deepspeed", "transformers", "datasets"} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_no_library_of_models_to_start_ddp_and_step(tmp_path):
    """Of FSDP2, Accelerate imports DeepSpeed itself where it is installed."""
    store = local_store()
    settings = os.environ | launch_environment("ddp", 2) | meeting_place(store)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(DIGITS), str(tmp_path)],
            env=settings | {"RANK": rank, "LOCAL_RANK": rank},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    assert [process.communicate(timeout=600)[0].split() for process in processes] == [["ddp"], ["ddp"]]
