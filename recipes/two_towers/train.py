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

from largebatch.data.images import normalize_pixels
from largebatch.data.source import Batch
from largebatch.model.coupled_losses import info_nce, sigmoid_loss
from largebatch.optim import build_optimizer
from largebatch.run import CoupledLoss, Run, RunOptions, Value, from_command_line

from .config import Config, Images
from .data import prompts_of, sources
from .model import build_model
from .retrieval import are_named, class_vectors, recalls

LOSSES: dict[str, CoupledLoss] = {
    "clip": info_nce,
    "one_way": partial(info_nce, both_ways=False),
    "sigmoid": sigmoid_loss,
}


def main(config: Config, options: RunOptions) -> None:
    run = Run(config, options)
    train_set, eval_set, *labeled = run.load(sources)

    model: nn.Module = run.build(build_model)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)
    prompts = prompts_of(config)
    # Without labeled images of their own, classes are those of the pairs: digits.
    digits_have_names = config.zero_shot is not None and not labeled

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

    def encode_pairs(batch: Batch) -> dict[str, torch.Tensor]:
        encoded = encode(batch)
        return {"first": encoded["first"], "second": encoded["second"], "ids": batch["ids"][:, :2]}

    def encode_prompts(batch: Batch) -> dict[str, torch.Tensor]:
        return {"vectors": model(input_ids=batch["input_ids"])["features"].squeeze(1)}

    def encode_classes() -> None:
        assert config.zero_shot is not None
        vectors = run.rows(prompts, len(prompts), encode_prompts)["vectors"]
        everything["classes"] = class_vectors(vectors, len(config.zero_shot.class_names))

    def encode_everything() -> None:
        everything.update(run.rows(eval_set, config.evaluation.samples_of(len(eval_set)), encode_pairs))
        if digits_have_names:
            encode_classes()

    def compare(batch: Batch) -> dict[str, Value]:
        """Whether the other one of a pair is among the nearest of all evaluation pairs, and a digit's name its own."""
        pairs = encode_pairs(batch)
        found: dict[str, Value] = {**recalls(pairs, everything)}
        if digits_have_names:
            found["zero_shot_accuracy"] = are_named(pairs["first"], batch["labels"], everything["classes"])
        return found

    def classify(batch: Batch) -> dict[str, Value]:
        """Whether a labeled image is nearest to the name of its class."""
        assert isinstance(config.data, Images)
        pixels = normalize_pixels(batch["pixel_values"], config.data, run.dtype)
        vectors = model(pixel_values=pixels)["features"].squeeze(1)
        return {"accuracy": are_named(vectors, batch["labels"], everything["classes"])}

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
            run.evaluate(eval_set, compare, before=encode_everything)
        if labeled and run.should_evaluate_on("zero_shot"):
            run.evaluate(labeled[0], classify, "zero_shot", before=encode_classes)
        everything.clear()  # not kept on the device while training
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
