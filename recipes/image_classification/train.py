"""Image classification with large batches, after "Accurate, Large Minibatch SGD" (Goyal et al. 2017, arXiv 1706.02677).

resnet_digits.json          a small ResNet on scikit-learn's digits: a laptop's CPU, under a minute, 98 % accuracy
resnet_cifar10.json         ResNet-18 on CIFAR-10: one GPU, 95.3 % accuracy in the literature
resnet50_imagenet_256.json  ResNet-50 on ImageNet at batch 256, the paper's baseline: 8 GPUs, 76.4 % accuracy
resnet50_imagenet_8k.json   the same at batch 8,192: 256 GPUs, 76.3 % accuracy (the paper's 23.74 +- 0.09 % error);
                            fewer GPUs accumulate gradients and get the same result
resnet50_imagenet_32k.json  the same at batch 32,768, with LARS: 64 to 512 GPUs
vit_digits.json             a small Vision Transformer on the digits, with AdamW: a laptop's CPU, 96 % accuracy
vit_s16_imagenet.json       ViT-S/16 on ImageNet at batch 4,096, with AdamW: 8 GPUs or more

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/image_classification/train.py \
        --config recipes/image_classification/resnet_digits.json
"""

import torch
from torch.nn.functional import cross_entropy
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from largebatch.config import ImageClassificationConfig
from largebatch.config.models import Vit
from largebatch.data.images import image_sources, model_input
from largebatch.data.mixup import mixed_cross_entropy
from largebatch.data.source import Batch
from largebatch.initialization.attention import freeze_key_biases
from largebatch.initialization.residual import set_batch_norm_momentum, small_classifier, zero_last_norm_of_blocks
from largebatch.models.small_image_resnet import SmallImageResNet
from largebatch.optim import build_optimizer
from largebatch.run import Run, Value, parse_command_line, user_errors


def build_model(config: ImageClassificationConfig) -> ResNetForImageClassification | ViTForImageClassification:
    """The model that the config describes, with its initial weights."""
    return build_vit(config) if isinstance(config.model, Vit) else build_resnet(config)


def build_resnet(config: ImageClassificationConfig) -> ResNetForImageClassification:
    """A ResNet that starts as in Goyal et al. 2017, section 5.1."""
    model_class = SmallImageResNet if config.model.stem == "small_images" else ResNetForImageClassification
    model = model_class(
        ResNetConfig(
            num_channels=config.data.num_channels,
            embedding_size=config.model.embedding_size,
            hidden_sizes=config.model.hidden_sizes,
            depths=config.model.depths,
            layer_type=config.model.layer_type,
            num_labels=config.data.num_classes,
        )
    )
    zero_last_norm_of_blocks(model)
    small_classifier(model)
    set_batch_norm_momentum(model)
    return model


def build_vit(config: ImageClassificationConfig) -> ViTForImageClassification:
    """A Vision Transformer (Dosovitskiy et al. 2021, arXiv 2010.11929), with the initial weights of `transformers`."""
    model = ViTForImageClassification(
        ViTConfig(
            image_size=config.data.image_size,
            patch_size=config.model.patch_size,
            num_channels=config.data.num_channels,
            hidden_size=config.model.hidden_size,
            intermediate_size=4 * config.model.hidden_size,
            num_hidden_layers=config.model.num_layers,
            num_attention_heads=config.model.num_heads,
            hidden_dropout_prob=config.model.dropout,
            attention_probs_dropout_prob=config.model.dropout,
            layer_norm_eps=1e-6,
            num_labels=config.data.num_classes,
        )
    )
    freeze_key_biases(model)
    return model


def main() -> None:
    config, options = parse_command_line(ImageClassificationConfig)
    run = Run(config, options)
    train_set, eval_set = run.load(image_sources)

    model = run.build(build_model)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)

    def logits_of(batch: Batch) -> torch.Tensor:
        return model(pixel_values=model_input(batch, config.data, run.dtype)).logits.to(run.dtype)

    def evaluate_batch(batch: Batch) -> dict[str, Value]:
        logits, labels = logits_of(batch), batch["labels"]
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
    with user_errors():
        main()
