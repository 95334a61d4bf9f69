"""The GPUs of this machine; imports no torch, which reads the environment when it is imported."""

import subprocess
import sys
from typing import NamedTuple


class Gpus(NamedTuple):
    """The GPUs of this machine."""

    count: int
    description: str
    """Number, name, driver and CUDA, in words; empty without a GPU."""
    name: str


def find_gpus() -> Gpus:
    """Ask in a process of its own, because processes that have used a GPU cannot be forked."""
    ask = (
        "import torch; n = torch.cuda.device_count(); print(n, torch.version.cuda, n and torch.cuda.get_device_name())"
    )
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    count, cuda, name = answer.strip().splitlines()[-1].split(" ", 2)
    if count == "0":
        return Gpus(0, "", "")
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return Gpus(int(count), f"{count} x {name}, driver and memory {driver}, CUDA {cuda}", name)
