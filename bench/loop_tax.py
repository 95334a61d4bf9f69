"""What the loop around a small model costs: this library's beside loops that people write, on one CPU core.

    .venv/bin/python bench/loop_tax.py

A perceptron on scikit-learn's digits; a step of the model takes so little that the loop is what is measured. Every
contender trains the same number of steps; the first ones are left out. The loops are in bench/peers/digits; `ours` is
here, and does all that this library does: plan, order, seeds, learning rate, TensorBoard and a line every ten steps,
watchdog, stop votes.

Each measurement is a process of its own. Takes some four minutes.
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from paired import in_own_process, interleave
from record import OURS, ROOT, Comparison, Record, add_output_options, take_facts, write_record

RECIPE = ROOT / "recipes/image_classification/vit_digits.json"
LEFT_OUT = 40
PEERS = {
    "raw": "raw",
    "hand_optimized": "hand_optimized",
    "accelerate": "accelerate_loop",
    "lightning": "lightning_loop",
    "trainer": "trainer_loop",
}
ABOUT = """Time per step of training loops around a 64 x 64 perceptron on scikit-learn's digits, in batches of 64 with
AdamW, on one CPU core. The model takes so little time that the loop is what is measured. `raw` is the loop of PyTorch's
tutorials, `hand_optimized` a loop optimized by hand, and `accelerate`, `lightning` and `trainer` are those
packages' own loops, the last two with a TensorBoard line every ten steps; all are in `bench/peers/digits`. `ours` does
everything that this library does: plan, order, seeds, learning rate, TensorBoard and a line every ten steps, watchdog,
requests to stop. Each measurement is a process of its own, and excludes the first 40 of its 1,980 steps."""


class Clock:
    """Microseconds per step, from the first step that counts to the last.

    Args:
        steps: The steps of the whole job.
    """

    def __init__(self, steps: int) -> None:
        self.expected = steps
        self.steps = 0
        self._started = 0.0

    def step(self) -> None:
        """To be called at the end of every optimizer step."""
        self.steps += 1
        if self.steps == LEFT_OUT:
            self._started = time.perf_counter()

    def microseconds(self) -> float:
        """Microseconds per step; to be called right after the last step."""
        assert self.steps == self.expected, (self.steps, self.expected)
        return (time.perf_counter() - self._started) / (self.steps - LEFT_OUT) * 1e6


def ours(clock: Clock) -> None:
    """The same job by this library."""
    from torch.nn.functional import cross_entropy

    from largebatch.config import load_config
    from largebatch.data.images import TensorImages
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions
    from largebatch.task_folders import import_from
    from peers.digits.job import BATCH, EPOCHS, digits, perceptron

    words = (
        "--data.image_size=8",
        f"--batch.global_batch_size={BATCH}",
        f"--batch.micro_batch_size={BATCH}",
        f'--train.duration={{"epochs": {EPOCHS}}}',
        "--learning_rate.base_lr=1e-3",
        f"--learning_rate.reference_batch_size={BATCH}",
        "--learning_rate.warmup=null",
        '--learning_rate.decay={"name": "polynomial", "power": 1}',
        "--optimizer.weight_decay=0.01",
        "--optimizer.no_decay=[]",
        "--optimizer.clip_norm=null",
        "--evaluation.every=null",
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run(load_config(RECIPE, words), RunOptions(run_dir=Path(folder, "run"), resume="none", allow_change=()))
        data = import_from(RECIPE.parent, "data")
        train_set, _ = run.load(lambda config: (TensorImages(*digits()), data.sources(config)[1]))
        model = perceptron()
        model, _ = run.prepare(model, build_optimizer(model, run.plan))
        for step in run.steps(train_set):
            for batch in step.micro_batches():
                step.backward(cross_entropy(model(batch["pixel_values"]), batch["labels"], reduction="sum"))
            run.update(step)
            clock.step()
        print(json.dumps(clock.microseconds()), flush=True)
        # What follows the loop is none of it.
        os._exit(0)


def train(name: str) -> float:
    """Train with one contender in this process; microseconds per step."""
    from peers.digits.job import STEPS

    clock = Clock(STEPS)
    contender = ours if name == OURS else importlib.import_module(f"peers.digits.{PEERS[name]}").train
    contender(clock)
    return clock.microseconds()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Microseconds per step of training loops around a small model.")
    add_output_options(parser, "loop_tax")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each loop; default: 5")
    parser.add_argument("--only", choices=[*PEERS, OURS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(train(options.only)))
        return
    names = [*PEERS, OURS]
    remarks = []
    if importlib.util.find_spec("lightning") is None:
        names.remove("lightning")
        remarks.append(
            "`lightning` is not installed, and left out: `.venv/bin/pip install -r bench/requirements.txt` installs it."
        )
        print(remarks[0], file=sys.stderr)
    facts = take_facts(("torch", "accelerate", "transformers", "lightning"))
    rounds = interleave(names, options.rounds, lambda name: in_own_process(Path(__file__), name))
    record = Record(
        program="loop_tax",
        title="Loop tax",
        about=ABOUT,
        settings={"rounds": options.rounds, "steps left out": LEFT_OUT},
        facts=facts,
        comparisons=[Comparison("µs per step", "raw", rounds, limits={OURS: 0.8})],
        remarks=remarks,
    )
    write_record(record, options)


if __name__ == "__main__":
    main()
