"""What this library adds to a step of each strategy, on two CPU processes: beside loops written by hand.

    .venv/bin/python bench/two_process.py

A GPT-2 of 3 million parameters, two processes over gloo, accumulation 4, fused AdamW, clipping, fp32. The loops by hand
are in bench/peers/gpt; `ours` is here, the loop of recipes/causal_lm/train.py. Of each strategy both jobs are alive at
once and take turns of a few steps, so that each pair of turns meets the same machine. Takes some seven minutes.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from launches import job_options
from paired import Contender, TurnClock, contender, start_job, take_turns
from record import OURS, ROOT, Comparison, Record, add_output_options, take_facts, write_record

RECIPE = ROOT / "recipes/causal_lm/gpt_pydoc.json"
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
WORLD_SIZE = 2
# Steps until caches are warm and the engines have laid out their buffers.
WARMUP = 3
LIMIT = 1.03
ABOUT = f"""Time of an optimizer step on two CPU processes over gloo: a GPT-2 of 3 million parameters in fp32, 4
micro-batches of 2 x 128 tokens per process, fused AdamW, clipping to a norm of 1. `by_hand` is
DistributedDataParallel with `no_sync`, FSDP2 with `fully_shard`, or DeepSpeed's own loop, with the same settings
(`bench/peers/gpt`) and no logging; `ours` is the loop of `recipes/causal_lm/train.py`, with one logged line per turn.
Both jobs stay alive and take turns of a few steps; the slower process counts. The target is at most {LIMIT} times the
loop by hand."""


def by_hand(connections: Sequence[Connection], strategy: str, steps: int) -> None:
    """A process of the job by hand; trains until the program has measured enough."""
    from peers.gpt import ddp, fsdp, zero

    clock = _clock(connections, steps)
    if strategy.startswith("zero"):
        zero.train(clock, stage=int(strategy[-1]))
    else:
        {"ddp": ddp, "fsdp": fsdp}[strategy].train(clock)


def ours(connections: Sequence[Connection], folder: str, steps: int, words: Sequence[str] = ()) -> None:
    """The same by this library, with further overrides; the launched Accelerate config says which strategy."""
    from largebatch.config import load_config
    from largebatch.model.token_losses import return_token_losses
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions
    from largebatch.task_folders import import_from
    from peers.gpt.job import build_model

    config = load_config(RECIPE, [*overrides(steps), *words])
    run = Run(config, RunOptions(Path(folder, "run"), resume="none", allow_change=()))
    train_set, _ = run.load(import_from(RECIPE.parent, "data").sources)
    model = run.build(lambda _: build_model())
    return_token_losses(model)
    model, _ = run.prepare(model, build_optimizer(model, run.plan))

    clock = _clock(connections, steps)
    for step in run.steps(train_set):
        for batch in step.micro_batches():
            step.backward(model(input_ids=batch["input_ids"], targets=batch["labels"]).sum())
        run.update(step)
        clock.step()


def overrides(steps: int) -> list[str]:
    """The recipe's fields that make it the job of bench/peers/gpt, with `steps` in a turn."""
    from peers.gpt import job

    return [
        f"--data.block_size={job.BLOCK}",
        f"--data.num_train_samples={job.SAMPLES}",
        f"--batch.micro_batch_size={job.MICRO_BATCH}",
        f"--batch.global_batch_size={job.MICRO_BATCH * job.ACCUMULATION * WORLD_SIZE}",
        f"--optimizer.clip_norm={job.CLIP_NORM}",
        # A line in each turn, or the median would be one of turns without.
        f"--logging.every={steps}",
        # More than will be measured.
        '--train.duration={"epochs": 1000}',
        "--evaluation.every=null",
    ]


def _clock(connections: Sequence[Connection], steps: int) -> TurnClock:
    return TurnClock(connections[int(os.environ["RANK"])], steps, WARMUP)


def job(strategy: str, function: Callable[..., None], *arguments: Any) -> AbstractContextManager[Contender]:
    """A contender on the processes of a strategy; see `paired.start_job`."""
    return contender(start_job(function, *arguments, **job_options(strategy, WORLD_SIZE, 1800)), WORLD_SIZE)


def compare(strategy: str, rounds: int, steps: int) -> Comparison:
    """The pairs of one strategy."""
    print(strategy, file=sys.stderr, flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        job(strategy, by_hand, strategy, steps) as theirs,
        job(strategy, ours, folder, steps) as mine,
    ):
        measured = take_turns({"by_hand": theirs, OURS: mine}, rounds)
    return Comparison("s per step", "by_hand", measured, case=strategy, limits={OURS: LIMIT})


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Time of a step on two CPU processes, ours against loops by hand.")
    add_output_options(parser, "two_process")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="default: all of them")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of turns of each strategy; default: 20")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a turn; default: 2")
    options = parser.parse_args()
    facts = take_facts(("torch", "accelerate", "deepspeed", "transformers"))
    record = Record(
        program="two_process",
        title="Two processes, against loops by hand",
        about=ABOUT,
        settings={"rounds": options.rounds, "steps a turn": options.steps, "warmup steps": WARMUP},
        facts=facts,
        comparisons=[compare(name, options.rounds, options.steps) for name in options.strategies.split(",")],
    )
    write_record(record, options)


if __name__ == "__main__":
    main()
