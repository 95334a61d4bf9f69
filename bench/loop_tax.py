"""What the loop around a small model costs: this library's beside loops that people write, on one CPU core.

    .venv/bin/python bench/loop_tax.py bench/results/loop_tax

A perceptron of 64 x 64 on scikit-learn's digits, batches of 64, AdamW: a step of the model takes so little that the
loop is what is measured. Every contender trains the same number of steps; the first ones are left out.

raw         `DataLoader` over a `TensorDataset`, AdamW, a `LambdaLR`: what PyTorch's tutorials show
hand        batches by index, fused AdamW, the learning rate set by hand: the least that can be done in Python
accelerate  the raw loop through `Accelerator.prepare`, as its quick tour has it
trainer     Transformers' `Trainer`, a line every ten steps
ours        all of it: plan, order, seeds, learning rate, TensorBoard and a line every ten steps, watchdog, stop votes

Each measurement is a process of its own. Contenders are interleaved, take turns in who comes first, and are judged by
the median over the rounds of their ratio to `raw` in the same round.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes/image_classification/vit_digits.json"
BATCH, EPOCHS, LEFT_OUT = 64, 90, 40
STEPS = 1437 // BATCH * EPOCHS


class Clock:
    """Microseconds a step, from the first step that counts to the last."""

    def __init__(self) -> None:
        self.steps = 0
        self._started = 0.0

    def step(self) -> None:
        self.steps += 1
        if self.steps == LEFT_OUT:
            self._started = time.perf_counter()

    def microseconds(self) -> float:
        assert self.steps == STEPS, (self.steps, STEPS)
        return (time.perf_counter() - self._started) / (STEPS - LEFT_OUT) * 1e6


def digits():
    """Pixels in [0, 1], float32 (samples, 64), and labels."""
    from largebatch.config import load_config
    from largebatch.data.images import image_sources

    train, _ = image_sources(load_config(RECIPE, ("--data.image_size=8",)))
    return train.pixels.flatten(1).float() / 255, train.labels


def perceptron():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def raw(clock: Clock, accelerated: bool = False) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    loader = DataLoader(TensorDataset(*digits()), batch_size=BATCH, shuffle=True, drop_last=True)
    backward = torch.Tensor.backward
    if accelerated:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        backward = accelerator.backward
    for _ in range(EPOCHS):
        for pixels, labels in loader:
            optimizer.zero_grad()
            backward(cross_entropy(model(pixels), labels))
            optimizer.step()
            schedule.step()
            clock.step()


def accelerate(clock: Clock) -> None:
    raw(clock, accelerated=True)


def hand(clock: Clock) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    pixels, labels = digits()
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(labels))[: len(labels) // BATCH * BATCH].view(-1, BATCH):
            cross_entropy(model(pixels[chosen]), labels[chosen]).backward()
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - clock.steps / STEPS)
            optimizer.step()
            optimizer.zero_grad()
            clock.step()


def trainer(clock: Clock) -> None:
    from torch.nn import Module
    from torch.nn.functional import cross_entropy
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Digits(Dataset):
        def __init__(self) -> None:
            self.pixels, self.labels = digits()

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, index: int):
            return {"pixels": self.pixels[index], "labels": self.labels[index]}

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = perceptron()

        def forward(self, pixels, labels):
            logits = self.network(pixels)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    class Timed(TrainerCallback):
        def on_step_end(self, *arguments, **options) -> None:  # noqa: ARG002 - Trainer's signature
            clock.step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            dataloader_drop_last=True,
            num_train_epochs=EPOCHS,
            logging_steps=10,
            save_strategy="no",
            report_to=["tensorboard"],
            remove_unused_columns=False,
        )
        Trainer(model=Model(), args=arguments, train_dataset=Digits(), callbacks=[Timed()]).train()


def ours(clock: Clock) -> None:
    from torch.nn.functional import cross_entropy

    from largebatch.config import load_config
    from largebatch.data.images import image_sources
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions

    words = (
        "--data.image_size=8",
        f"--batch.global_batch_size={BATCH}",
        f"--batch.micro_batch_size={BATCH}",
        f'--train.duration={{"epochs": {EPOCHS}}}',
        "--learning_rate.warmup=null",
        '--learning_rate.decay={"name": "linear"}',
        "--optimizer.clip_norm=null",
        "--evaluation.every=null",
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run(load_config(RECIPE, words), RunOptions(run_dir=Path(folder, "run"), resume="none", allow_change=()))
        train_set, _ = run.load(image_sources)
        model = perceptron()
        model, _ = run.prepare(model, build_optimizer(model, run.plan))
        for step in run.steps(train_set):
            for batch in step.micro_batches():
                logits = model(batch["pixel_values"].flatten(1).float() / 255)
                step.backward(cross_entropy(logits, batch["labels"], reduction="sum"))
            step.update()
            clock.step()
        print(json.dumps(clock.microseconds()), flush=True)
        # What follows the loop is none of it.
        os._exit(0)


CONTENDERS = {"raw": raw, "hand": hand, "accelerate": accelerate, "trainer": trainer, "ours": ours}


def measure(name: str) -> float:
    """Microseconds a step of one contender, in a process of its own."""
    command = [sys.executable, __file__, "--only", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if result.returncode:
        sys.exit(f"{name} failed:\n{result.stderr[-2000:]}")
    return float(json.loads(result.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds a step of several training loops around a small model.")
    parser.add_argument("output", type=Path, nargs="?", help="folder for the results")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        clock = Clock()
        CONTENDERS[options.only](clock)
        print(json.dumps(clock.microseconds()))
        return
    if options.output is None:
        parser.error("name a folder for the results")
    names = list(CONTENDERS)
    rounds = []
    for number in range(options.rounds):
        turn = number % len(names)
        measured = {name: measure(name) for name in names[turn:] + names[:turn]}
        rounds.append(measured)
        print({name: round(measured[name]) for name in names}, flush=True)
    about = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"one {platform.machine()} CPU core of {os.cpu_count()}",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "accelerate", "transformers")},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "cpu.json").write_text(json.dumps(about | {"microseconds": rounds}, indent=1) + "\n")
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        "# Loop tax",
        "",
        f"`python bench/loop_tax.py bench/results/loop_tax --rounds {options.rounds}`, {about['when']}; "
        f"{about['machine']}, {versions}.",
        "",
        "| loop | microseconds a step, median | against `raw`, median of the rounds' ratios |",
        "| --- | --- | --- |",
    ]
    for name in names:
        median = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each[name] / each["raw"] for each in rounds)
        lines.append(f"| {name} | {median:.0f} | {ratio:.2f} |")
    (options.output / "README.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[5:]))


if __name__ == "__main__":
    main()
