"""The config of this folder's recipes: labeled images, a ResNet or a Vision Transformer, and the loss."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from largebatch.config import RecipeConfig, check
from largebatch.config.data import DigitsData, HubImages, HubOrLocal
from largebatch.config.models import ResNet, TransformerWithDropout
from largebatch.config.sections import BelowOne, PositiveFloat, Section, Size


class ResNetWithStem(ResNet):
    """A residual network, as in `transformers` (`ResNetForImageClassification`)."""

    stem: Literal["large_images", "small_images"] = "large_images"
    """"large_images": a 7 x 7 convolution and max-pooling, each halving the image, as for ImageNet; "small_images": a
    3 x 3 convolution that keeps its size, as for CIFAR's 32 pixels."""


class Vit(TransformerWithDropout):
    """A Vision Transformer, as in `transformers` (`ViTForImageClassification`): a class token, learned positions, and
    GELU layers four times as wide as the residual stream."""

    architecture: Literal["vit"]
    patch_size: Size
    """Side in pixels of the squares that become tokens; divides `data.image_size`."""


class CrossEntropy(Section):
    """The training loss; evaluations use plain images and labels."""

    label_smoothing: BelowOne = 0.0
    """Fraction of each label that is spread over all classes (Szegedy et al. 2016, arXiv 1512.00567, section 7)."""
    mixup_alpha: PositiveFloat | None = None
    """Images and labels are mixed in pairs, weighted by a draw from Beta(alpha, alpha) (Zhang et al. 2018, arXiv
    1710.09412); null: no mixing. Pairs are consecutive samples, so `batch.micro_batch_size` must be even."""


class Config(RecipeConfig):
    """Image classification."""

    data: Annotated[DigitsData | HubImages, Field(discriminator="source")]
    model: Annotated[ResNetWithStem | Vit, Field(discriminator="architecture")]
    loss: CrossEntropy = CrossEntropy()

    @property
    def tokens_processed_per_sample(self) -> int | None:
        if not isinstance(self.model, Vit):
            return None
        # Patches, and the class token.
        return int((self.data.image_size // self.model.patch_size) ** 2 + 1)

    def tiny_data(self) -> dict[str, Any] | None:
        if not isinstance(self.data, HubOrLocal):
            return None
        # Of a size that leaves BatchNorm more than one position in the last stage of a ResNet.
        return {"data": {"source": "digits", "image_size": 64}}

    @check
    def _whole_patches(self) -> Iterator[str]:
        if isinstance(self.model, Vit) and self.data.image_size % self.model.patch_size:
            yield (
                f"model.patch_size: {self.model.patch_size} does not divide data.image_size {self.data.image_size}, so "
                f"a part of each image would be cut off; write a divisor of {self.data.image_size}, or change "
                "data.image_size"
            )

    @check
    def _whole_pairs(self) -> Iterator[str]:
        size = self.batch.micro_batch_size
        may_be = self.batch.finds_micro_batch_size
        if self.loss.mixup_alpha is not None and (may_be or size % 2):
            yield (
                f"batch.micro_batch_size: {size} {'may be' if may_be else 'is'} odd, but loss.mixup_alpha mixes "
                "samples in pairs, which micro-batches must not split; write an even number"
            )
