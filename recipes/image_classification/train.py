"""Image classification with large batches, after "Accurate, Large Minibatch SGD" (Goyal et al. 2017, arXiv 1706.02677).

resnet_digits.json          a small ResNet on scikit-learn's digits: a laptop's CPU, under a minute, 98 % accuracy
resnet_cifar10.json         ResNet-18 on CIFAR-10: one GPU
resnet50_imagenet_256.json  ResNet-50 on ImageNet at batch 256, the paper's baseline: 8 GPUs, 76.4 % accuracy
resnet50_imagenet_8k.json   the same at batch 8,192: 256 GPUs, 76.3 % accuracy (the paper's 23.74 +- 0.09 % error);
                            fewer GPUs accumulate gradients and get the same result
resnet50_imagenet_32k.json  the same at batch 32,768, with LARS and the settings of the MLPerf reference: 64 to 256 GPUs
vit_digits.json             a small Vision Transformer on the digits, with AdamW: a laptop's CPU, 96 % accuracy
vit_s16_imagenet.json       ViT-S/16 on ImageNet at batch 4,096, with AdamW: 8 GPUs or more

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/image_classification/train.py \
        --config recipes/image_classification/resnet_digits.json
"""

from largebatch.task_folders import load_package

__package__ = load_package(__file__)  # so that a script can import the modules of its folder (PEP 366)

import torch
from torch.nn.functional import cross_entropy

from largebatch.data.images import HubImageSource
from largebatch.data.source import Batch
from largebatch.optim import build_optimizer
from largebatch.run import Run, RunOptions, Value, from_command_line

from .config import Config
from .data import model_input, sources
from .mixup import mixed_cross_entropy
from .model import build_model, name_classes


def main(config: Config, options: RunOptions) -> None:
    run = Run(config, options)
    train_set, eval_set = run.load(sources)

    model = run.build(build_model)
    if isinstance(eval_set, HubImageSource):
        name_classes(model, eval_set.images.class_names)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)

    def logits_of(batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = model(pixel_values=model_input(batch, config.data, run.dtype)).logits
        return logits.to(run.dtype)

    def evaluate_batch(batch: Batch) -> dict[str, Value]:
        logits = logits_of(batch)
        labels = batch["labels"]
        return {
            "loss": cross_entropy(logits, labels, reduction="none"),
            "accuracy": (logits.argmax(dim=-1) == labels).float(),
        }

    for step in run.steps(train_set):
        for batch in step.micro_batches():
            # A sum: the library divides by the whole global batch.
            step.backward(mixed_cross_entropy(logits_of(batch), batch, config.loss.label_smoothing).sum())
        run.update(step)
        if run.should_evaluate:
            run.evaluate(eval_set, evaluate_batch)
    run.finish()


if __name__ == "__main__":
    with from_command_line(Config) as (config, options):
        main(config, options)
