"""Contrastive learning of two towers, of images and texts or of texts alone, at any batch size.

clip_digits.json      a small CLIP on scikit-learn's digits and their names: a laptop's CPU, two minutes
embed_pydoc.json      a small text embedder on the Python reference's headings and paragraphs: a laptop's CPU

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/two_towers/train.py \
        --config recipes/two_towers/clip_digits.json
"""

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

from functools import partial

import torch
from torch import nn
from torch.nn.functional import normalize

from largebatch.data.images import normalize_pixels
from largebatch.data.source import Batch
from largebatch.model.coupled_losses import info_nce, sigmoid_loss
from largebatch.optim import build_optimizer
from largebatch.run import CoupledLoss, Run, RunOptions, Value, from_command_line

from .config import Config, Images
from .data import prompts_of, sources
from .model import build_model

LOSSES: dict[str, CoupledLoss] = {
    "clip": info_nce,
    "one_way": partial(info_nce, both_ways=False),
    "sigmoid": sigmoid_loss,
}
RANKS = (1, 10)
SIDES = ("first", "second")


def main(config: Config, options: RunOptions) -> None:
    run = Run(config, options)
    train_set, eval_set, *labeled = run.load(sources)

    model: nn.Module = run.build(build_model)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)
    prompts = prompts_of(config)

    def encode(batch: Batch) -> dict[str, torch.Tensor]:
        """The vectors of each pair, of length 1, and what the loss needs besides."""
        inputs = {"input_ids": batch["input_ids"], "mask": batch["mask"]}
        if isinstance(config.data, Images):
            inputs["pixel_values"] = normalize_pixels(batch["pixel_values"], config.data, run.dtype)
        encoded: dict[str, torch.Tensor] = model(**inputs)
        features = encoded.pop("features")
        encoded |= {"first": features[:, 0], "second": features[:, 1]}
        if config.vectors_per_sample > 2:
            encoded["negatives"] = features[:, 2:]
        if config.loss.duplicates == "left_out":
            encoded["ids"] = batch["ids"]
        return encoded

    # What an evaluation compares with: all pairs, and the names of all classes.
    everything: dict[str, torch.Tensor] = {}

    def encode_classes() -> None:
        def encode_prompts(batch: Batch) -> dict[str, torch.Tensor]:
            return {"vectors": model(input_ids=batch["input_ids"])["features"].squeeze(1)}

        assert config.zero_shot is not None
        vectors = run.rows(prompts, len(prompts), encode_prompts)["vectors"]
        of_classes = vectors.view(len(config.zero_shot.class_names), -1, vectors.shape[1])
        # The mean of each class's name over the templates.
        everything["classes"] = normalize(of_classes.mean(dim=1), dim=-1)

    def are_named(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Whether each image is nearest to the name of its class."""
        return ((images @ everything["classes"].T).argmax(dim=1) == labels).float()

    def evaluate() -> None:
        """Measure how often the other one of a pair is among the nearest of all evaluation pairs, both ways, and how
        often a digit is nearest to its name."""
        have_classes = config.zero_shot is not None and not labeled

        def row(batch: Batch) -> dict[str, torch.Tensor]:
            encoded = encode(batch)
            return {"first": encoded["first"], "second": encoded["second"], "ids": batch["ids"][:, :2]}

        def encode_everything() -> None:
            everything.update(run.rows(eval_set, config.evaluation.samples_of(len(eval_set)), row))
            if have_classes:
                encode_classes()

        def evaluate_batch(batch: Batch) -> dict[str, Value]:
            own = row(batch)
            found: dict[str, Value] = {}
            ids = everything["ids"]
            # Another pair with the same image or text is as right.
            is_right = (own["ids"].unsqueeze(1) == ids).any(dim=2)
            for side, name in enumerate(("recall", "reverse_recall")):
                similarities = own[SIDES[side]] @ everything[SIDES[1 - side]].T
                # A text does not find itself on the other side of another pair.
                is_itself = (own["ids"][:, side, None] == ids[:, 1 - side]) & ~is_right
                similarities = similarities.masked_fill(is_itself, -torch.inf)
                nearest = similarities.topk(min(max(RANKS), len(ids))).indices
                is_found = is_right.gather(1, nearest)
                found |= {f"{name}@{rank}": is_found[:, :rank].any(dim=1).float() for rank in RANKS}
            if have_classes:
                found["zero_shot_accuracy"] = are_named(own["first"], batch["labels"])
            return found

        run.evaluate(eval_set, evaluate_batch, before=encode_everything)
        everything.clear()  # not kept on the device while training

    def classify(batch: Batch) -> dict[str, Value]:
        """Measure how often a labeled image is nearest to the name of its class."""
        assert isinstance(config.data, Images)
        pixels = normalize_pixels(batch["pixel_values"], config.data, run.dtype)
        return {"accuracy": are_named(model(pixel_values=pixels)["features"].squeeze(1), batch["labels"])}

    def encode_and_log(batch: Batch) -> dict[str, torch.Tensor]:
        encoded = encode(batch)
        if config.loss.learned:
            run.log({name: encoded[name] for name in ("scale", "bias") if name in encoded})
        return encoded

    for step in run.steps(train_set):
        # The loss compares each pair with all others of the global batch: one call for all micro-batches.
        step.couple(encode_and_log, LOSSES[config.loss.name])
        run.update(step)
        if run.should_evaluate:
            evaluate()
        if labeled and run.should_evaluate_on("zero_shot"):
            run.evaluate(labeled[0], classify, "zero_shot", before=encode_classes)
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
