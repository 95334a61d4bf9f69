"""The config of this folder's recipes: random views, a network with its projection head, loss and evaluation."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from largebatch.config import RecipeConfig, check
from largebatch.config.data import DigitsData, HubImages, HubOrLocal
from largebatch.config.models import Model, ResNet
from largebatch.config.sections import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
    Size,
)

CHANNELS_PER_GROUP = 16
WholeGroups = Annotated[Size, Field(multiple_of=CHANNELS_PER_GROUP)]


class Views(Section):
    """The random views of an image (Chen et al. 2020, appendix A): two are drawn for each image in every epoch."""

    min_area: PositiveFraction = 0.08
    """A view is a random crop of at least this fraction of the area, with an aspect ratio of 3/4 to 4/3."""
    flip: bool
    """Whether half of the views are flipped horizontally."""
    color_strength: Annotated[NonNegativeFloat, Field(le=2.5)]
    """Strength s of the color distortion: in 80 % of the views brightness, contrast and saturation change by up to
    0.8 s and hue by up to 0.2 s of a turn, at most half a turn, and 20 % are turned gray; 0 leaves colors unchanged."""
    blur: Fraction
    """Fraction of the views that get a Gaussian blur of 0.1 to 2 pixels; the paper's is 0.5."""


class ViewedImages(HubImages):
    """Labeled images through Hugging Face `datasets`; only the evaluation uses the labels."""

    train_augmentation: Literal["none"] = "none"
    """Always "none": in contrastive recipes the section `views` describes the random augmentation."""


class ConvNet(Model):
    """A small convolutional network whose loss does not depend on `micro_batch_size`: each layer is a 3 x 3 convolution
    of stride 2, GroupNorm over groups of 16 channels (Wu & He 2018, arXiv 1803.08494) and GELU; then the mean over
    positions."""

    architecture: Literal["convnet"]
    hidden_sizes: Annotated[list[WholeGroups], Field(min_length=1, max_length=64)]
    """Channels of each layer, multiples of 16."""


class Projection(Section):
    """The projection head on top of the network, whose outputs are contrasted (Chen et al. 2020, section 4.2)."""

    hidden_size: Size
    """Width of its hidden layer; in the paper it equals the network's output width."""
    output_size: Size
    """Width of its output; 128 in the paper."""
    activation: Literal["relu", "gelu"] = "relu"
    """Activation of the hidden layer; the paper uses ReLU, whose kink makes rounding visible earlier."""


class NtXent(Section):
    """The normalized temperature-scaled cross-entropy loss (Chen et al. 2020, equation 1)."""

    temperature: PositiveFloat
    """Divides the similarities; the paper's best values are 0.1 at 100 epochs, and 0.5 on CIFAR-10."""


class Neighbors(Section):
    """The evaluation: the nearest training images vote on labels (Wu et al. 2018, arXiv 1805.01978, section 3.4)."""

    count: PositiveInt = 20
    """Number of images that vote, each with the weight exp(cosine similarity / temperature)."""
    temperature: PositiveFloat = 0.07
    """Temperature of the votes' weights."""
    bank_samples: PositiveInt | None = None
    """Only this many training samples, from the first on, may vote; every process keeps their features. null: all."""


class Config(RecipeConfig):
    """Contrastive learning of images."""

    data: Annotated[DigitsData | ViewedImages, Field(discriminator="source")]
    views: Views
    model: Annotated[ResNet | ConvNet, Field(discriminator="architecture")]
    projection: Projection
    loss: NtXent
    neighbors: Neighbors = Neighbors()

    free_on_resume = ("neighbors",)

    @property
    def coupled_features(self) -> int:
        return 2 * self.projection.output_size

    def tiny_data(self) -> dict[str, Any] | None:
        if not isinstance(self.data, HubOrLocal):
            return None
        # Large enough to leave BatchNorm more than one position in the last stage of a ResNet.
        return {"data": {"source": "digits", "image_size": 64}, "neighbors.bank_samples": 64}

    @check
    def _enough_neighbors(self) -> Iterator[str]:
        num_samples = self.data.num_train_samples
        bank_samples = self.neighbors.bank_samples or num_samples
        if bank_samples > num_samples:
            yield (
                f"neighbors.bank_samples: {bank_samples} is more than the {num_samples} training samples; write at "
                f"most {num_samples}, or null for all"
            )
        elif self.neighbors.count > bank_samples:
            yield (
                f"neighbors.count: {self.neighbors.count} is more than the {bank_samples} samples that neighbors are "
                f"chosen from; write at most {bank_samples}"
            )
