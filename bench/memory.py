"""Peak memory of training a causal language model: this library's beside a plain loop's and Transformers' Trainer's.

    .venv/bin/python bench/memory.py bench/results/memory

A Llama of 30 million parameters with a vocabulary of 50,304 tokens and tied embeddings; eight sequences of 512 tokens a
step, AdamW, gradients clipped; two steps, of which the second has the optimizer's states. On a CPU in fp32, in one
thread; on a GPU under bf16 autocast.

raw                    the loop by hand: logits, which it keeps until the next ones, `cross_entropy`, AdamW
trainer                Transformers' `Trainer`
trainer_checkpointing  with its `gradient_checkpointing`
logits                 ours, with the loss computed from logits
logits_checkpointing   with `compute.activation_checkpointing`
ours                   ours, as recipes/causal_lm trains: losses from the output layer
ours_checkpointing     with `compute.activation_checkpointing`

Each is a process of its own. On a CPU, memory is the peak of the resident set above what it was when everything had
been imported; on a GPU, `torch.cuda.max_memory_allocated`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes/causal_lm/llama_pydoc.json"
BATCH, TOKENS, STEPS = 8, 512, 2
WORDS = (
    "--model.vocab_size=50304",
    "--model.hidden_size=384",
    "--model.intermediate_size=1024",
    "--model.num_layers=6",
    "--model.num_heads=6",
    "--model.num_kv_heads=6",
    "--model.tie_embeddings=true",
    f"--data.block_size={TOKENS}",
    "--data.num_train_samples=200",
    "--data.num_eval_samples=10",
    f"--batch.global_batch_size={BATCH}",
    f"--batch.micro_batch_size={BATCH}",
    '--train.duration={"steps": 40}',
    "--learning_rate.warmup=null",
    '--learning_rate.decay={"name": "constant"}',
    "--evaluation.every=null",
    "--checkpoint.every=null",
    "--logging.trackers=[]",
)
MIB = 2**20

Report = Callable[[], None]


def recipe(*words: str):
    """The config, and the module that the recipe's train.py is."""
    import importlib.util

    from largebatch.config import load_config

    spec = importlib.util.spec_from_file_location("train", RECIPE.parent / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return load_config(RECIPE, (*WORDS, *words)), module


def raw(report: Report) -> None:
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    from largebatch.data.text import text_sources

    config, module = recipe()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set, _ = text_sources(config)
    model = module.build_model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        batch = train_set.fetch(np.arange(step * BATCH, (step + 1) * BATCH), 0)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=batch["input_ids"].to(device)).logits
        cross_entropy(logits.float().flatten(0, 1), batch["labels"].to(device).flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    report()


def trainer(report: Report, checkpointing: bool = False) -> None:
    import numpy as np
    import torch
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments

    from largebatch.data.text import text_sources

    config, module = recipe()
    train_set, _ = text_sources(config)

    class Blocks(Dataset):
        def __len__(self) -> int:
            return len(train_set)

        def __getitem__(self, index: int):
            tokens = train_set.fetch(np.array([index]), 0)["input_ids"][0]
            # It shifts them itself.
            return {"input_ids": tokens, "labels": tokens}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=checkpointing,
        )
        Trainer(model=module.build_model(config), args=arguments, train_dataset=Blocks()).train()
        report()


def trainer_checkpointing(report: Report) -> None:
    trainer(report, checkpointing=True)


def ours(report: Report, *words: str, from_logits: bool = False) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from largebatch.data.text import text_sources
    from largebatch.memory.token_losses import return_token_losses
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions

    config, module = recipe(*words, *(["--precision=bf16"] if torch.cuda.is_available() else []))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, RunOptions(run_dir=Path(folder, "run"), resume="none", allow_change=()))
        train_set, _ = run.load(text_sources)
        model = run.build(module.build_model)
        if not from_logits:
            return_token_losses(model)
        model, _ = run.prepare(model, build_optimizer(model, run.plan))

        def loss_of(batch) -> torch.Tensor:
            if not from_logits:
                return model(input_ids=batch["input_ids"], targets=batch["labels"]).sum()
            logits = model(input_ids=batch["input_ids"]).logits.to(run.dtype)
            return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

        for step in run.steps(train_set):
            for batch in step.micro_batches():
                step.backward(loss_of(batch))
            step.update()
            if step.index + 1 == STEPS:
                report()


def ours_checkpointing(report: Report) -> None:
    ours(report, "--compute.activation_checkpointing=true")


def logits(report: Report) -> None:
    ours(report, from_logits=True)


def logits_checkpointing(report: Report) -> None:
    ours(report, "--compute.activation_checkpointing=true", from_logits=True)


CONTENDERS = {
    function.__name__: function
    for function in (raw, trainer, trainer_checkpointing, logits, logits_checkpointing, ours, ours_checkpointing)
}


def resident(field: str) -> int:
    """VmRSS, the resident set now, or VmHWM, its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def run_alone(name: str) -> None:
    """Train in this process, print the peak in MiB, and leave."""
    import accelerate
    import torch
    import transformers.trainer
    from transformers import LlamaForCausalLM

    import largebatch.optim
    import largebatch.run  # noqa: F401 - what it imports is no part of the training

    assert accelerate
    assert transformers.trainer
    assert LlamaForCausalLM
    before = resident("VmRSS")

    def report() -> None:
        on_gpu = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM") - before
        print(json.dumps(peak / MIB), flush=True)
        # What follows the steps, such as a checkpoint, is none of them.
        os._exit(0)

    CONTENDERS[name](report)


def measure(name: str) -> float:
    """Peak memory in MiB of one contender, in a process of its own."""
    command = [sys.executable, __file__, "--only", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    if result.returncode:
        sys.exit(f"{name} failed:\n{result.stderr[-2000:]}")
    return float(json.loads(result.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of training a causal language model in several ways.")
    parser.add_argument("output", type=Path, nargs="?", help="folder for the results")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run_alone(options.only)
    if options.output is None:
        parser.error("name a folder for the results")
    rounds = []
    for _ in range(options.rounds):
        rounds.append({name: measure(name) for name in CONTENDERS})
        print({name: round(number) for name, number in rounds[-1].items()}, flush=True)
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    about = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": gpu or f"{platform.machine()} CPU, fp32",
        "overrides": WORDS,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "accelerate", "transformers")},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    kind = "cuda" if gpu else "cpu"
    (options.output / f"{kind}.json").write_text(json.dumps(about | {"peak_mib": rounds}, indent=1) + "\n")
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        "# Peak memory of a causal language model",
        "",
        f"`python bench/memory.py bench/results/memory --rounds {options.rounds}`, {about['when']}; "
        f"{about['machine']}, {versions}. What is measured, and what the names mean, is at the top of the program.",
        "",
        "| training | peak of each round, MiB | median against `trainer` |",
        "| --- | --- | --- |",
    ]
    medians = {name: statistics.median(each[name] for each in rounds) for name in CONTENDERS}
    for name, median in medians.items():
        numbers = ", ".join(f"{each[name]:.0f}" for each in rounds)
        lines.append(f"| {name} | {numbers} | {median / medians['trainer']:.2f} |")
    (options.output / "README.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[5:]))


if __name__ == "__main__":
    main()
