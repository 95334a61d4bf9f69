"""Runs that are interrupted and go on: what the processes of a job do, and what is compared afterwards."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jobs import failure_of, train
from largebatch.storage.files import read_json_lines
from paths import PYDOC

# One layer, ragged batches, dropout, a batch that grows, accumulation, AdamW, clipping.
TINY_GPT = (
    "--model.num_layers=1",
    "--model.hidden_size=16",
    "--model.num_heads=2",
    "--model.dropout=0.1",
    "--data.block_size=16",
    "--data.num_train_samples=600",
    '--learning_rate.warmup.duration={"steps": 6}',
    "--data.num_eval_samples=32",
    "--batch.drop_last=false",
    '--batch.global_batch_size=[{"from": {"steps": 0}, "size": 24}, {"from": {"steps": 9}, "size": 48}]',
    "--batch.micro_batch_size=4",
    '--evaluation.every={"steps": 5}',
    "--logging.every=1",
    "--logging.trackers=[]",
)
# A tiny model of the task outside, and AdamW with an epsilon that does not enlarge rounding.
TINY_MAPS = (
    '--optimizer={"name": "adamw", "weight_decay": 0.01, "eps": 1e-3}',
    "--data.side=6",
    "--model.channels=[2]",
    "--batch.micro_batch_size=12",
    '--checkpoint.every={"steps": 50}',
)
# Divides over one to four processes.
CHAIN_BATCH = ("--batch.global_batch_size=48",)
# Numbers of a logged step that do not depend on the clock.
EXACT = ("step", "samples", "epoch", "loss", "lr", "grad_norm", "global_batch_size")


@dataclass(frozen=True)
class Interruption:
    """What happens to one process.

    Args:
        kind: "signal", "stop file" or "kill".
        rank: Which process.
        step: When this step is updated.
    """

    kind: str
    rank: int
    step: int


def train_interrupted(run_dir: Path, recipe: Path, words: tuple[str, ...], interruption: Interruption | None) -> None:
    """Train in a job's process."""
    from largebatch.run import Run
    from largebatch.run.watch import stop

    # A request during a step ends the run after the next one.
    stop.STOP_VOTE_STEPS = 0
    update = Run.update
    is_mine = interruption is not None and interruption.rank == int(os.environ.get("RANK", 0))

    def interrupt_and_update(run, step):
        if is_mine and step.index + 1 == interruption.step:
            _interrupt(interruption.kind, run_dir)
        update(run, step)

    Run.update = interrupt_and_update
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    train(recipe, *words, run_dir=run_dir)


def _interrupt(kind: str, run_dir: Path) -> None:
    if kind == "signal":
        os.kill(os.getpid(), signal.SIGUSR1)
    elif kind == "stop file":
        (run_dir / "stop").touch()
        # The file is looked for once a second.
        time.sleep(1.1)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def run_interrupted(
    run_dir: Path,
    words: tuple[str, ...],
    interruption: Interruption | None = None,
    strategy: str = "ddp",
    world_size: int | None = None,
    recipe: Path = PYDOC,
    accelerate_configs: Path | None = None,
) -> str | None:
    """One attempt; None if it came to its end, or the report of its failure."""
    place = {"strategy": strategy, "world_size": world_size, "accelerate_configs": accelerate_configs}
    return failure_of(train_interrupted, run_dir, recipe, words, interruption, **place)


def stop_and_resume(folder: Path, words: tuple[str, ...], interruption: Interruption, **place: Any) -> None:
    """A run at `folder / "whole"`, and one at `folder / "run"` that is asked to stop, or killed, and goes on."""
    ended = "the process ended without a result" if interruption.kind == "kill" else "exit code 75"
    assert run_interrupted(folder / "whole", words, **place) is None
    assert ended in run_interrupted(folder / "run", words, interruption, **place)
    assert run_interrupted(folder / "run", words, **place) is None


def exact_log(run_dir: Path) -> list[dict[str, Any]]:
    """The numbers of logged steps that do not depend on the clock."""
    return [{name: line.get(name) for name in EXACT} for line in read_json_lines(run_dir / "metrics.jsonl")]


def logged_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in exact_log(run_dir)]


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """The lines of the run's history about such events."""
    return [line for line in read_json_lines(run_dir / "history.jsonl") if line["event"] == event]


def assert_bit_for_bit(run_dir: Path, reference: Path, weights: str = "model.safetensors") -> None:
    """Weights, log and evaluations; of other micro-batches, the bits of a loss or gradient norm would be others."""
    assert_same_weights(run_dir / "model", reference / "model", weights)
    expected = exact_log(reference)
    assert len(expected) > 10
    assert exact_log(run_dir) == expected
    evaluations = [read_json_lines(path / "evaluations.jsonl") for path in (run_dir, reference)]
    assert evaluations[0] == evaluations[1]


def assert_same_weights(folder: Path, reference: Path, file: str = "model.safetensors") -> None:
    """Two folders of weights, such as `model/` of two runs, hold the same bits under the same names."""
    mine, theirs = (load_file(path / file) for path in (folder, reference))
    assert mine.keys() == theirs.keys()
    for name in theirs:
        assert mine[name].tobytes() == theirs[name].tobytes(), name


def assert_close_weights(run_dir: Path, reference: Path, tolerance: float = 1e-5) -> None:
    """The weights of two runs are the same up to rounding."""
    mine, theirs = (load_file(path / "model/model.safetensors") for path in (run_dir, reference))
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert np.linalg.norm(mine[name] - weight) <= tolerance * max(np.linalg.norm(weight), 1e-8), name
