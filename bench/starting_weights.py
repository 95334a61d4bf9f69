"""Draw the starting weights of Llama 70B on single ranks of 512 simulated FSDP2 processes: seconds and memory.

    python bench/starting_weights.py

Each rank is a process of its own in a group that does not communicate. It builds the model without weights, shards it,
allocates its rows and draws them, on one CPU core. Takes about a minute.
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from largebatch.backend.state import pieces_of
from largebatch.config import load_config
from largebatch.model.building import SeededWeights, build_without_weights
from largebatch.task_folders import import_from
from record import ROOT, Figure, Record, add_output_options, take_facts, write_record

RECIPE = ROOT / "recipes/causal_lm/llama_8b.json"
# Touvron et al. 2023 and the configuration of Llama 3: 70.6e9 parameters.
SIZES = {"hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8}
PROCESSES = 512
RANKS = (0, 255, 511)
MIB = 2**20
ABOUT = """Llama 70B (70.6 billion parameters in fp32) on single ranks of 512 simulated processes under FSDP2, each on
one CPU core: the seconds of building the model without weights, of sharding it and allocating the rank's rows, and of
drawing these; and the peak of the process's own memory beyond its rows (VmHWM without pages of files) while it draws.
The figures are medians over three ranks."""


def memory(name: str) -> int:
    """Bytes that this process holds ("VmRSS") or has held at most ("VmHWM"), without pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    total, *of_files = (int(lines[line].split()[0]) * 1024 for line in (name, "RssFile", "RssShmem"))
    return total - sum(of_files)


def shard(model: nn.Module) -> dict[str, torch.Tensor]:
    """Shard a model on the meta device by its blocks, and allocate this process's rows; its parameters by name."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in model.get_submodule("model.layers").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model._apply(lambda tensor: torch.empty_like(tensor, device="cpu").zero_() if tensor.is_meta else tensor)
    return {f"weight/{name}": parameter for name, parameter in model.named_parameters()}


def measure(rank: int) -> dict[str, float]:
    """The seconds of each phase and the mebibytes of a rank's rows and beyond them."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=PROCESSES)
    config = load_config(RECIPE, [f"--model.{name}={number}" for name, number in SIZES.items()])
    build_model = import_from(RECIPE.parent, "model").build_model
    seconds: dict[str, float] = {}
    model, draws = timed(lambda: build_without_weights(lambda: build_model(config)), "building", seconds)
    weights = SeededWeights(model, draws, config.seed)
    vectors = timed(lambda: shard(model), "sharding", seconds)
    pieces = pieces_of(vectors, rank, PROCESSES)
    # The high-water mark starts over.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")

    def draw() -> None:
        for piece in pieces:
            piece.write(piece.start, weights.read(piece.vector.removeprefix("weight/"), piece.start, piece.stop))

    timed(draw, "drawing", seconds)
    rows = sum(piece.tensor.nbytes for piece in pieces)
    return seconds | {"rows": rows / MIB, "beyond": (memory("VmHWM") - before) / MIB}


def timed(work: Callable[[], Any], phase: str, seconds: dict[str, float]) -> Any:
    """The result of `work`, whose seconds are noted."""
    started = time.perf_counter()
    result = work()
    seconds[phase] = time.perf_counter() - started
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_output_options(parser, "starting_weights")
    options = parser.parse_args()
    facts = take_facts(("torch", "transformers"))
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        found = list(pool.map(measure, RANKS))
    figures = [Figure(phase, "s", [each[phase] for each in found]) for phase in ("building", "sharding", "drawing")]
    figures += [
        Figure("the rank's rows", "MiB", [each["rows"] for each in found]),
        Figure("peak memory beyond them while drawing", "MiB", [each["beyond"] for each in found]),
    ]
    title = "The starting weights of a 70B model"
    settings = {"processes": PROCESSES, "ranks": RANKS, "threads": 1} | SIZES
    write_record(Record("starting_weights", title, ABOUT, settings, facts, figures=figures), options)


if __name__ == "__main__":
    main()
