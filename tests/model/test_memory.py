"""No process ever holds the whole model where the strategy shards weights."""

import ctypes
from pathlib import Path

import pytest

from jobs import run_job
from paths import LLAMA
from starting import at_the_first_step

pytestmark = pytest.mark.slow

MIB = 2**20
# Four blocks of 64 MiB; the largest parameters have 16 MiB.
MODEL = (
    "--model.hidden_size=1024",
    "--model.intermediate_size=4096",
    "--model.num_layers=4",
    "--model.num_heads=8",
    "--model.num_kv_heads=8",
)
LARGEST = 16 * MIB
# For modules that are imported on the way, and small buffers.
ALLOWANCE = 8 * MIB
M_MMAP_THRESHOLD = -3


def memory(name):
    """Bytes that this process holds ("VmRSS") or has held at most ("VmHWM"), without pages of libraries' files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    total, *of_files = (int(lines[line].split()[0]) * 1024 for line in (name, "RssFile", "RssShmem"))
    return total - sum(of_files)


def growth_until_prepared(run_dir, *words):
    """The bytes of the model, and by how much this process grows at most while it is built, sharded and set."""
    from largebatch.run import Run

    build = Run.build
    numbers = []

    def measured_build(run, build_model):
        # The high-water mark starts over.
        Path("/proc/self/clear_refs").write_text("5")
        numbers.append(memory("VmRSS"))
        model = build(run, build_model)
        numbers.append(sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()))
        return model

    # What is freed goes back at once, so that the process is as large as what it holds.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    Run.build = measured_build
    at_the_first_step(lambda _: None, LLAMA, run_dir, *MODEL, *words, "--logging.trackers=[]")
    before, size = numbers
    return size, memory("VmHWM") - before


@pytest.mark.parametrize(
    ("strategy", "shares", "parameters"),
    [
        # Its rows of the weights.
        ("fsdp", 1, 0),
        # Its part of the weights, of DeepSpeed's masters and of its gradients, and one parameter that DeepSpeed puts
        # together while it makes its hooks, from a buffer of the same size.
        ("zero3", 3, 2),
    ],
)
def test_no_process_holds_the_whole_model(strategy, shares, parameters, run_dir):
    for size, grown in run_job(growth_until_prepared, run_dir, strategy=strategy, world_size=4):
        limit = shares * size // 4 + parameters * LARGEST + ALLOWANCE
        assert limit < size
        assert grown <= limit, (grown / MIB, limit / MIB, size / MIB)
