"""Pre-training of a causal language model with large batches.

gpt_pydoc.json   a small GPT on the bytes of Python's own reference: a laptop's CPU, a minute, 2.2 nats per byte
gpt2_124m.json   GPT-2 124M on 10B tokens of FineWeb at batch 2M tokens, AdamW with the square-root rule; the base
                 learning rate is the one commonly used at 0.5M tokens, where validation loss 3.28 is expected; 8 GPUs
llama_pydoc.json a small Llama on the same bytes, 1.53 nats per byte, initialized like the large ones
llama_1b.json    Llama 1B on 26B tokens of FineWeb-Edu at batch 2M tokens, after TinyLlama (2401.02385); 64 GPUs
llama_8b.json    Llama 8B on 168B tokens at batch 4M tokens, after Llama 3 (2407.21783); 128 GPUs
                 (this project has trained neither of the two)

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/causal_lm/train.py \
        --config recipes/causal_lm/gpt_pydoc.json
"""

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

import torch

from largebatch.data.source import Batch
from largebatch.data.text import IGNORE_INDEX
from largebatch.optim import build_optimizer
from largebatch.run import Run, RunOptions, Value, from_command_line

from .config import Config
from .data import sources
from .model import build_model


def main(config: Config, options: RunOptions) -> None:
    run = Run(config, options)
    train_set, eval_set = run.load(sources)

    model = run.build(build_model)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)

    def token_losses(batch: Batch) -> torch.Tensor:
        """Loss of each target token, zero where a label is `IGNORE_INDEX`; shape (batch, tokens)."""
        # Positions are given if documents of a block are kept apart.
        positions = batch.get("position_ids")
        losses: torch.Tensor = model(input_ids=batch["input_ids"], position_ids=positions, targets=batch["labels"])
        return losses

    def evaluate_batch(batch: Batch) -> dict[str, Value]:
        targets = batch["labels"] != IGNORE_INDEX
        # For a mean over tokens: each sample's sum of losses, and its number of targets.
        return {"loss": (token_losses(batch).sum(dim=1), targets.sum(dim=1))}

    for step in run.steps(train_set):
        for batch in step.micro_batches():
            # A sum: the library divides by the target tokens of the whole global batch.
            step.backward(token_losses(batch).sum())
        run.update(step)
        if run.should_evaluate:
            run.evaluate(eval_set, evaluate_batch)
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
