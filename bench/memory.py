"""Peak memory of training a causal language model: this library's beside a plain loop's and Transformers' Trainer's.

    .venv/bin/python bench/memory.py

A Llama of 30 million parameters with a vocabulary of 50,304 tokens and tied embeddings; eight sequences of 512 tokens a
step, AdamW, gradients clipped; two steps, of which the second has the optimizer's states. On a CPU in fp32, in one
thread; on a GPU under bf16 autocast.

raw                    the loop by hand: logits, which it keeps until the next ones, `cross_entropy`, AdamW
trainer                Transformers' `Trainer`
trainer_checkpointing  with its `gradient_checkpointing`
logits                 ours, with the loss computed from logits
logits_checkpointing   with `compute.activation_checkpointing` "full"
ours                   ours, as recipes/causal_lm trains: losses from the output layer
ours_checkpointing     with `compute.activation_checkpointing` "full"
ours_selective         with "selective", which keeps matrix products and attention

Each is a process of its own. On a CPU, memory is the peak of the resident set above what it was when everything had
been imported; on a GPU, `torch.cuda.max_memory_allocated`.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from largebatch.task_folders import import_from
from paired import in_own_process, interleave
from record import ROOT, Comparison, Record, add_output_options, resident, take_facts, write_record

RECIPE = ROOT / "recipes/causal_lm/llama_pydoc.json"
BATCH = 8
TOKENS = 512
STEPS = 2
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
ABOUT = """Peak memory of training a Llama of 30 million parameters with a vocabulary of 50,304 tokens: two steps of 8 x
512 tokens with AdamW, in fp32 on a CPU (the peak resident set minus what imports take), or under bf16 autocast on a
GPU. `raw` is a loop by hand, `trainer` is Transformers' `Trainer`, `logits` is this library with the loss computed from
logits, and `ours` is `recipes/causal_lm`, with losses from the output layer; each but `raw` also with activation
checkpointing, and `ours` also with that of single operations. Each measurement is a process of its own."""

Report = Callable[[], None]


def recipe(*words: str):
    """The config, and the module that the recipe's train.py is."""
    from largebatch.config import load_config

    return load_config(RECIPE, (*WORDS, *words)), import_from(RECIPE.parent, "train")


def raw(report: Report) -> None:
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    config, module = recipe()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set, _ = module.sources(config)
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

    config, module = recipe()
    train_set, _ = module.sources(config)

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


def ours(report: Report, words: Sequence[str] = (), from_logits: bool = False) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions

    config, module = recipe(*words, *(["--precision=bf16"] if torch.cuda.is_available() else []))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, RunOptions(run_dir=Path(folder, "run"), resume="none", allow_change=()))
        train_set, _ = run.load(module.sources)
        model = run.build(module.build_model)
        model, _ = run.prepare(model, build_optimizer(model, run.plan))

        def loss_of(batch) -> torch.Tensor:
            if not from_logits:
                return model(input_ids=batch["input_ids"], targets=batch["labels"]).sum()
            logits = model(input_ids=batch["input_ids"]).logits.to(run.dtype)
            return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

        for step in run.steps(train_set):
            for batch in step.micro_batches():
                step.backward(loss_of(batch))
            run.update(step)
            if step.index + 1 == STEPS:
                report()


FULL, SELECTIVE = (f"--compute.activation_checkpointing={kind}" for kind in ("full", "selective"))
CONTENDERS: dict[str, Callable[[Report], None]] = {
    "raw": raw,
    "trainer": trainer,
    "trainer_checkpointing": partial(trainer, checkpointing=True),
    "logits": partial(ours, from_logits=True),
    "logits_checkpointing": partial(ours, words=[FULL], from_logits=True),
    "ours": ours,
    "ours_checkpointing": partial(ours, words=[FULL]),
    "ours_selective": partial(ours, words=[SELECTIVE]),
}


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


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Peak memory of training a causal language model in several ways.")
    add_output_options(parser, "memory")
    parser.add_argument("--rounds", type=int, default=2, help="samples of each; default: 2")
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run_alone(options.only)
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = take_facts(("torch", "accelerate", "transformers"), gpu)
    rounds = interleave([*CONTENDERS], options.rounds, lambda name: in_own_process(Path(__file__), name, timeout=1200))
    record = Record(
        program="memory",
        title="Peak memory of a causal language model",
        about=ABOUT,
        settings={"rounds": options.rounds, "overrides": [*WORDS]},
        facts=facts,
        comparisons=[Comparison("MiB", "trainer", rounds)],
    )
    write_record(record, options, name="cuda" if gpu else "cpu")


if __name__ == "__main__":
    main()
