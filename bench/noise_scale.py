"""The gradient noise scale of `logging.noise_scale`: whether its intervals are right, and what it costs.

    .venv/bin/python bench/noise_scale.py

Coverage: runs whose weights stay as they are, on samples drawn with replacement, measure every step. Each 50
measurements give an interval of 95 % confidence, which should hold the exact noise scale, computed from the
gradient of every sample, in 95 % of the cases. Cost: steps on two processes that measure, beside steps that do not.
Takes some 10 minutes.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from record import ROOT, Comparison, Figure, Record, add_output_options, take_facts, write_record

RECIPE = ROOT / "recipes/sft/sft_addition.json"  # its samples have unequal weights, too
DRAWS = 200
MEASUREMENTS = 50
COVERED = (180, 199)
STRATEGIES = ("ddp", "fsdp", "zero2")
EVERY = 10
LIMIT = 1.015
WITHOUT = "without"
IN_EVERY = f"one step in {EVERY} measures"
MEASURING = "a step that measures"
SHAPES = [("digits", 8, 2), ("digits", 4, 4), ("digits", 16, 8), ("documents", 4, 4), ("documents", 2, 16)]
ABOUT = f"""**Coverage.** Of {DRAWS} intervals of 95 % confidence, each from {MEASUREMENTS} measurements by a run
whose weights stay as they are, how many hold the exact noise scale: tr(Σ) / |G|² from the gradient of every sample
(`torch.func`). Samples are drawn with replacement. `digits` is a 64 x 32 x 10 perceptron on scikit-learn's digits;
`documents` predicts the next byte of lines of 2 to 32 bytes from Python's reference, so that micro-batches have unequal
weights. **Cost.** Time of an optimizer step in the job of `two_process.py`: a GPT-2 of 3 million parameters, two CPU
processes over gloo, 4 micro-batches per process. Every second step measures, and is compared with its neighbor that
does not; from both follows the mean step if one in {EVERY} measures. Other steps run the same code as without
`logging.noise_scale`. The target is at most {LIMIT}."""


@dataclass
class Samples:
    """A source of rows, drawn with replacement: index i is a random row, always the same."""

    inputs: torch.Tensor  # (rows, …)
    targets: torch.Tensor  # (rows, targets); -100 is not predicted
    drawn: np.ndarray

    def __len__(self) -> int:
        return len(self.drawn)

    def fetch(self, indices: np.ndarray, _epoch: int | None) -> dict[str, torch.Tensor]:
        rows = torch.from_numpy(self.drawn[indices])
        return {"inputs": self.inputs[rows], "targets": self.targets[rows]}

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        return int((batch["targets"] >= 0).sum())


def digits() -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """Inputs, one target per row, and a model."""
    from sklearn.datasets import load_digits

    found = load_digits()
    inputs = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10), nn.Unflatten(1, (1, 10)))
    return inputs, torch.from_numpy(found.target)[:, None], model


def documents() -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """Lines as bytes, padded to the longest, the bytes that follow, and a model."""
    lines = [line.strip().encode("ascii", "replace")[:32] for text in topics.values() for line in text.splitlines()]
    lines = [line for line in lines if len(line) > 1][::7]
    padded = torch.full((len(lines), 32), -100)
    for row, line in zip(padded, lines, strict=True):
        row[: len(line)] = torch.tensor(list(line))
    model = nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 128))
    return padded[:, :-1].clamp(min=0), padded[:, 1:], model


def loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over all targets."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def exact_noise_scale(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """From the gradient of every row: the variance of the mean over targets, by linearization, per row."""
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def of_a_row(parameters, row, target):
        return loss_sum(functional_call(model, parameters, (row[None],)), target[None])

    sums = []
    for rows, wanted in zip(inputs.split(256), targets.split(256), strict=True):
        found = vmap(grad(of_a_row), (None, 0, 0))(parameters, rows, wanted)
        sums.append(torch.cat([each.flatten(1) for each in found.values()], dim=1))
    gradients = torch.cat(sums)
    weights = (targets >= 0).sum(1, keepdim=True)
    mean = gradients.sum(0) / weights.sum()
    residuals = (gradients - weights * mean) / weights.double().mean()
    return float(residuals.double().square().sum(1).mean() / mean.double().square().sum())


def measured(kind: str, micro_batch: int, micro_batches: int, folder: Path) -> tuple[float, list[dict[str, float]]]:
    """The exact noise scale, and what a run has measured in each step."""
    from largebatch.config import load_config
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions
    from largebatch.storage.files import read_json_lines

    torch.manual_seed(0)
    make: Callable[[], tuple[torch.Tensor, torch.Tensor, nn.Module]] = {"digits": digits, "documents": documents}[kind]
    inputs, targets, model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(60):
        rows = torch.randint(len(inputs), (64,))
        loss = loss_sum(model(inputs[rows]), targets[rows]) / (targets[rows] >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    exact = exact_noise_scale(model, inputs, targets)

    size = micro_batch * micro_batches
    steps = DRAWS * MEASUREMENTS
    drawn = np.random.default_rng(0).integers(0, len(inputs), size * steps)
    words = [
        f"--data.num_train_samples={len(drawn)}",
        "--data.num_eval_samples=1",
        f"--batch.global_batch_size={size}",
        f"--batch.micro_batch_size={micro_batch}",
        '--optimizer={"name": "sgd", "weight_decay": 0}',
        "--learning_rate.base_lr=1e-30",
        "--learning_rate.warmup=null",
        '--train.duration={"epochs": 1}',
        "--evaluation.every=null",
        "--logging.every=1000",
        "--logging.trackers=[]",
        '--logging.noise_scale={"every": 1}',
    ]
    run = Run(load_config(RECIPE, words), RunOptions(folder, resume="none", allow_change=()))
    source = Samples(inputs, targets, drawn)
    train_set, _ = run.load(lambda _config, _preparation: (source, Samples(inputs, targets, drawn[:1])))
    model, _ = run.prepare(model, build_optimizer(model, run.plan))
    for step in run.steps(train_set):
        for batch in step.micro_batches():
            step.backward(loss_sum(model(batch["inputs"]), batch["targets"]))
        run.update(step)
    run.finish()
    return exact, read_json_lines(folder / "noise_scale.jsonl")


def coverage(kind: str, micro_batch: int, micro_batches: int) -> list[Figure]:
    """How many intervals hold the exact noise scale, and how far their mean is from it."""
    from largebatch.batch.noise_scale import noise_scale

    with tempfile.TemporaryDirectory() as folder:
        exact, lines = measured(kind, micro_batch, micro_batches, Path(folder, "run"))
    assert len(lines) == DRAWS * MEASUREMENTS
    draws = [noise_scale(lines[first : first + MEASUREMENTS]) for first in range(0, len(lines), MEASUREMENTS)]
    found = [draw for draw in draws if "samples" in draw]
    covered = sum(draw["low"] <= exact <= (draw["high"] or math.inf) for draw in found)
    case = f"{kind}, {micro_batches} micro-batches of {micro_batch}"
    least, most = COVERED
    samples = float(np.mean([draw["samples"] for draw in found]))
    return [
        Figure(f"{case}: intervals that hold the exact noise scale", f"of {DRAWS}", [covered], least, most),
        Figure(f"{case}: exact noise scale", "samples", [exact]),
        Figure(f"{case}: mean of {len(found)} estimates", "samples", [samples]),
    ]


def cost(strategy: str, rounds: int) -> Comparison:
    """Pairs of neighboring steps of one strategy, of which the first, an even one, measures."""
    from two_process import WARMUP, job, ours

    assert WARMUP % 2 == 1
    print(strategy, file=sys.stderr, flush=True)
    words = ['--logging.noise_scale={"every": 2}']
    with tempfile.TemporaryDirectory() as folder, job(strategy, ours, folder, 1, words) as contender:
        pairs = [(contender.turn(), contender.turn()) for _ in range(rounds)]
    rounds_of_all = [
        {WITHOUT: without, IN_EVERY: without + (measuring - without) / EVERY, MEASURING: measuring}
        for measuring, without in pairs
    ]
    return Comparison("s per step", WITHOUT, rounds_of_all, case=strategy, limits={IN_EVERY: LIMIT})


def main(words: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Coverage and cost of the gradient noise scale.")
    add_output_options(parser, "noise_scale")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="of the cost; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=60, help="pairs of steps of each strategy; default: 60")
    options = parser.parse_args(words)
    facts = take_facts(("torch", "accelerate", "deepspeed", "transformers"))
    record = Record(
        program="noise_scale",
        title="Gradient noise scale",
        about=ABOUT,
        settings={"rounds": options.rounds, "draws": DRAWS, "measurements": MEASUREMENTS},
        facts=facts,
        comparisons=[cost(name, options.rounds) for name in options.strategies.split(",")],
        figures=[figure for shape in SHAPES for figure in coverage(*shape)],
    )
    write_record(record, options)


if __name__ == "__main__":
    main()
