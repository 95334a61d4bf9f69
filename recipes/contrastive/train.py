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
from torch.nn.functional import cross_entropy, normalize

from largebatch.data.images import normalize_pixels
from largebatch.data.source import Batch
from largebatch.optim import build_optimizer
from largebatch.run import Run, RunOptions, Value, from_command_line

from .config import Config
from .data import NUM_VIEWS, sources
from .model import build_model


def nt_xent(features: torch.Tensor, temperature: float) -> torch.Tensor:
    """The loss of finding each view's other view among all views of the batch, averaged over each sample's views.

    Chen et al. 2020, equation 1. Features have length 1 and shape (samples, 2, size), losses have shape (samples,).
    """
    views = features.transpose(0, 1).flatten(0, 1)
    similarities = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    other_view = torch.arange(len(views), device=views.device).roll(len(features))
    return cross_entropy(similarities, other_view, reduction="none").view(NUM_VIEWS, -1).mean(dim=0)


def main(config: Config, options: RunOptions) -> None:
    run = Run(config, options)
    train_set, eval_set = run.load(sources)

    model: nn.Module = run.build(build_model)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)

    def features_of(batch: Batch) -> torch.Tensor:
        """Projections of all views of each sample, normalized to length 1; shape (batch, views, size)."""
        pixels = batch["pixel_values"]
        _, projections = model(normalize_pixels(pixels.flatten(0, 1), config.data, run.dtype))
        return normalize(projections.to(run.dtype), dim=-1).view(*pixels.shape[:2], -1)

    def represent(batch: Batch) -> dict[str, torch.Tensor]:
        """Representations of whole images, normalized to length 1, shape (batch, width); and labels."""
        representations, _ = model(normalize_pixels(batch["pixel_values"], config.data, run.dtype))
        return {"features": normalize(representations.to(run.dtype), dim=-1), "labels": batch["labels"]}

    def evaluate() -> None:
        """Measure how often the nearest training images, each of which votes with its label, are right."""
        among = config.neighbors
        bank = run.rows(train_set, among.bank_samples or config.data.num_train_samples, represent)

        def evaluate_batch(batch: Batch) -> dict[str, Value]:
            features = represent(batch)["features"]
            similarities, nearest = (features @ bank["features"].T).topk(among.count)
            votes = features.new_zeros(len(features), config.data.num_classes)
            votes.scatter_add_(1, bank["labels"][nearest], (similarities / among.temperature).exp())
            return {"knn_accuracy": (votes.argmax(dim=-1) == batch["labels"]).float()}

        run.evaluate(eval_set, evaluate_batch)

    for step in run.steps(train_set):
        # The loss couples all samples: a pass without gradients gathers the features of the whole global batch.
        features = step.gather(features_of)
        step.couple(nt_xent(features, config.loss.temperature).sum())
        for batch in step.micro_batches():
            # Each micro-batch again, with gradients: the features pass the loss's gradient on to the weights.
            step.backward_features(features_of(batch))
        run.update(step)
        if run.should_evaluate:
            evaluate()
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
