"""Contrastive learning of images with large batches, after SimCLR (Chen et al. 2020, arXiv 2002.05709).

simclr_digits.json         a small ConvNet on scikit-learn's digits: a laptop's CPU, under a minute
simclr_resnet50_4k.json    ResNet-50 on ImageNet at batch 4,096 with LARS, as in the paper: 32 GPUs, 100 epochs

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/contrastive/train.py \
        --config recipes/contrastive/simclr_digits.json
"""

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

import torch
from torch import nn
from torch.nn.functional import normalize

from largebatch.data.images import normalize_pixels
from largebatch.data.source import Batch
from largebatch.model.coupled_losses import nt_xent
from largebatch.optim import build_optimizer
from largebatch.run import Run, RunOptions, Value, from_command_line

from .config import Config
from .data import sources
from .model import build_model


def main(config: Config, options: RunOptions) -> None:
    run = Run(config, options)
    train_set, eval_set = run.load(sources)

    model: nn.Module = run.build(build_model)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)

    def encode(batch: Batch) -> dict[str, torch.Tensor]:
        """Projections of the views of each sample, normalized to length 1, shape (batch, views, size)."""
        pixels = batch["pixel_values"]
        _, projections = model(normalize_pixels(pixels.flatten(0, 1), config.data, run.dtype))
        features = normalize(projections.to(run.dtype), dim=-1).view(*pixels.shape[:2], -1)
        return {"views": features, "scale": features.new_full((), 1 / config.loss.temperature)}

    def represent(batch: Batch) -> dict[str, torch.Tensor]:
        """Representations of whole images, normalized to length 1, shape (batch, width); and labels."""
        representations, _ = model(normalize_pixels(batch["pixel_values"], config.data, run.dtype))
        return {"features": normalize(representations.to(run.dtype), dim=-1), "labels": batch["labels"]}

    def evaluate() -> None:
        """Measure how often the nearest training images, each of which votes with its label, are right."""
        among = config.neighbors
        bank: dict[str, torch.Tensor] = {}

        def fill_bank() -> None:
            bank.update(run.rows(train_set, among.bank_samples or config.data.num_train_samples, represent))

        def evaluate_batch(batch: Batch) -> dict[str, Value]:
            features = represent(batch)["features"]
            similarities, nearest = (features @ bank["features"].T).topk(among.count)
            votes = features.new_zeros(len(features), config.data.num_classes)
            votes.scatter_add_(1, bank["labels"][nearest], (similarities / among.temperature).exp())
            return {"knn_accuracy": (votes.argmax(dim=-1) == batch["labels"]).float()}

        run.evaluate(eval_set, evaluate_batch, before=fill_bank)

    for step in run.steps(train_set):
        # The loss compares each sample with all others of the global batch: one call for all micro-batches.
        step.couple(encode, nt_xent)
        run.update(step)
        if run.should_evaluate:
            evaluate()
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
