"""Supervised fine-tuning of a causal language model, which learns to predict the answers to prompts.

sft_addition.json      a small Llama learns to add two numbers: a laptop's CPU, a minute
sft_qwen_gsm8k.json    Qwen2.5 0.5B on the 7,473 questions of GSM8K: one or a few GPUs
sft_qwen_7b.json       Qwen2.5 7B on 9,344 conversations of No Robots: 8 GPUs; with LoRA (_lora), one

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/sft/train.py \
        --config recipes/sft/sft_addition.json
"""

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

import torch
from torch.nn.functional import cross_entropy

from largebatch.data.source import Batch
from largebatch.data.text import IGNORE_INDEX
from largebatch.optim import build_optimizer
from largebatch.run import Run, RunOptions, Value, from_command_line

from .adapters import check_adapters
from .answers import stop_tokens, write_answers
from .attention import check_causal, check_packing
from .config import Config
from .data import sources
from .model import build_model


def main(config: Config, options: RunOptions) -> None:
    run = Run(config, options)
    train_set, eval_set = run.load(sources)

    model = run.build(build_model)
    check_causal(model)
    if config.model.lora:
        check_adapters(model)
    if config.data.packing:
        check_packing(model)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer, stop_tokens(config, train_set))

    def token_losses(batch: Batch) -> torch.Tensor:
        """Loss of each target token, zero where a label is `IGNORE_INDEX`; shape (batch, tokens)."""
        # The positions of a pack keep its pairs apart.
        positions = batch.get("position_ids")
        losses: torch.Tensor = model(input_ids=batch["input_ids"], position_ids=positions, targets=batch["labels"])
        return losses

    def evaluate_batch(batch: Batch) -> dict[str, Value]:
        # Logits here, because the exact match needs the likeliest tokens.
        logits = model(input_ids=batch["input_ids"]).logits.to(run.dtype)
        labels = batch["labels"]
        losses = cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")
        targets = labels != IGNORE_INDEX
        is_right = (logits.argmax(dim=-1) == labels) | ~targets
        return {
            # For a mean over tokens: each pair's sum of losses, and its number of targets.
            "loss": (losses.sum(dim=1), targets.sum(dim=1)),
            # The whole answer: greedy decoding would write it if every one of its tokens is the likeliest.
            "exact_match": is_right.all(dim=1).float(),
        }

    for step in run.steps(train_set):
        for batch in step.micro_batches():
            # A sum: the library divides by the target tokens of the whole global batch.
            step.backward(token_losses(batch).sum())
        run.update(step)
        if run.should_evaluate:
            run.evaluate(eval_set, evaluate_batch)
            if config.evaluation.answers:
                write_answers(run, model, eval_set)
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
