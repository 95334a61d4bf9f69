"""Time and memory of a loss over the whole global batch, and what encoding twice costs.

.venv/bin/python bench/coupled_loss.py
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"

from paired import in_own_process, interleave
from record import ROOT, Comparison, Record, add_output_options, resident, take_facts, write_record

WIDTH = 512
SCALE = 14.3
WORLD_SIZE = 2
REPEATS = 3
STEPS = 20
RECIPE = ROOT / "recipes/two_towers/clip_digits.json"
MIB = 2**20
ABOUT = """CLIP's loss and its gradient for the features of two processes on two cores, a thread each: B / 2 samples
of two vectors of 512 numbers each, in fp32. `ours` is `Step.couple`'s tiles; `local loss` is open_clip's `--local-loss
--gather-with-grad`, by hand: B / 2 x B logits in both directions; `whole` is the whole matrix on each process. At
65,536, one copy of those logits takes 8 GiB a process, so `ours` is alone, once. Memory is the peak resident set above
features and imports. Each measurement is a job of its own. The last comparison is a step of `clip_digits` in one
process, whose towers encode each sample once or twice."""


def ours(features) -> None:
    import torch

    from largebatch.backend.processes import Processes
    from largebatch.model.coupled_losses import info_nce
    from largebatch.run.coupled import CoupledBatch

    class Bare(Processes):
        device = torch.device("cpu")
        plan = SimpleNamespace(precision="fp32", world_size=WORLD_SIZE, micro_batch_size=len(features))

    backend = Bare(torch.distributed.get_rank(), WORLD_SIZE, len(features))
    encoded = {"first": features[:, 0], "second": features[:, 1], "scale": torch.tensor(SCALE)}
    batch = CoupledBatch(backend, WORLD_SIZE * len(features), [encoded], info_nce, is_first=False)  # type: ignore[arg-type]
    batch.surrogate(0, encoded).backward()


def by_hand(features, is_local: bool) -> None:
    import torch
    from torch.distributed.nn.functional import all_gather
    from torch.nn.functional import cross_entropy

    images, texts = (torch.cat(all_gather(features[:, number].contiguous())) for number in range(2))
    rows = torch.arange(len(images))
    if is_local:
        rows = rows.chunk(WORLD_SIZE)[torch.distributed.get_rank()]
        there, back = (SCALE * mine[rows] @ others.T for mine, others in ((images, texts), (texts, images)))
    else:
        there = SCALE * images @ texts.T
        back = there.T
    ((cross_entropy(there, rows) + cross_entropy(back, rows)) / 2).backward()


CONTENDERS = {
    "ours": ours,
    "local loss": lambda features: by_hand(features, True),
    "whole": lambda features: by_hand(features, False),
}


def run_alone(what: str) -> None:
    """Measure one contender in a job of two processes, and print its number: "seconds:ours:4096"."""
    import torch

    import largebatch.run.coupled  # noqa: F401 - what it imports is no part of the loss

    unit, name, size = what.split(":")
    if name in ("one_pass", "two_passes"):
        print(json.dumps(step_seconds(name)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rank = int(os.fork() == 0)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD_SIZE
        )
        torch.manual_seed(rank)
        features = torch.nn.functional.normalize(
            torch.randn(int(size) // WORLD_SIZE, 2, WIDTH), dim=-1
        ).requires_grad_()
        before = resident("VmRSS")
        seconds = []
        for _ in range(REPEATS if int(size) < 2**13 else 1):
            features.grad = None
            torch.distributed.barrier()
            started = time.perf_counter()
            CONTENDERS[name](features)
            seconds.append(time.perf_counter() - started)
        number = (resident("VmHWM") - before) / MIB if unit == "MiB" else statistics.median(seconds)
        torch.distributed.barrier()
        if rank == 1:
            os._exit(0)
        os.wait()
    print(json.dumps(number))


def step_seconds(passes: str) -> float:
    """Seconds of a step on one process with one micro-batch."""
    from largebatch.storage.files import read_json_lines
    from largebatch.tools.local_jobs.training import train

    words = (f"--compute.couple={passes}", "--batch.micro_batch_size=256", f"--train.stop_after_steps={STEPS}")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        train(RECIPE, *words, "--logging.trackers=[]", "--logging.every=10", run_dir=run)
        *_, last = read_json_lines(run / "metrics.jsonl")
        return 256 / float(last["samples_per_second"])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Time and memory of a loss over the whole global batch.")
    add_output_options(parser, "coupled_loss")
    parser.add_argument("--rounds", type=int, default=2, help="samples of each; default: 2")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run_alone(options.only)
        return

    def measured(unit: str, names: tuple[str, ...], size: int) -> Comparison:
        rounds = options.rounds if len(names) > 1 else 1
        return Comparison(
            unit,
            names[-1],
            interleave(names, rounds, lambda name: in_own_process(Path(__file__), f"{unit}:{name}:{size}")),
            f"B = {size:,}" if size else "a step of clip_digits",
        )

    contenders = {4096: ("whole", "ours", "local loss"), 16384: ("ours", "local loss"), 65536: ("ours",)}
    comparisons = [measured(unit, names, size) for size, names in contenders.items() for unit in ("seconds", "MiB")]
    comparisons.append(measured("seconds", ("one_pass", "two_passes"), 0))
    record = Record(
        program="coupled_loss",
        title="A loss over the whole global batch",
        about=ABOUT,
        settings={"rounds": options.rounds},
        facts=take_facts(("torch",), None),
        comparisons=comparisons,
    )
    write_record(record, options, name="cpu")


if __name__ == "__main__":
    main()
