"""Pre-training of a masked language model with large batches: BERT with LAMB (You et al. 2019, arXiv 1904.00962).

bert_pydoc.json           a small BERT on the bytes of Python's own reference: a laptop's CPU, a minute
bert_large_64k_128.json   BERT-Large, blocks of 128 tokens at batch 65,536, the first 7,037 of the paper's 8,599 steps
bert_large_32k_512.json   from its weights, blocks of 512 tokens at batch 32,768, the other 1,562 steps
                          (this project has trained neither of the two)

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/masked_lm/train.py \
        --config recipes/masked_lm/bert_pydoc.json
"""

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

from torch.nn.functional import cross_entropy

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

    def evaluate_batch(batch: Batch) -> dict[str, Value]:
        # Logits here, because the accuracy needs the likeliest tokens.
        logits = model(input_ids=batch["input_ids"]).logits.to(run.dtype)
        labels = batch["labels"]
        losses = cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")
        # For means over the predicted tokens: each sample's sum, and its number of them.
        num_predicted = (labels != IGNORE_INDEX).sum(dim=1)
        num_right = (logits.argmax(dim=-1) == labels).sum(dim=1)
        return {"loss": (losses.sum(dim=1), num_predicted), "accuracy": (num_right, num_predicted)}

    for step in run.steps(train_set):
        for batch in step.micro_batches():
            # A sum: the library divides by the predicted tokens of the whole global batch.
            step.backward(model(input_ids=batch["input_ids"], targets=batch["labels"]).sum())
        run.update(step)
        if run.should_evaluate:
            run.evaluate(eval_set, evaluate_batch)
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
