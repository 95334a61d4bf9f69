"""Two random views of each image, for contrastive learning (Chen et al. 2020, arXiv 2002.05709, appendix A).

A view depends only on (seed, epoch, sample, number of the view).
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from largebatch.config.data import DigitsData
from largebatch.data.crops import Crop, Pixels, crop_box, random_box
from largebatch.data.images import Augmentation, HubImageSource, TensorImages, digits, evaluation_source, open_images
from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import Preparation
from largebatch.data.source import Batch, Sources
from largebatch.words import counted

from .config import Config, Views

NUM_VIEWS = 2


def sources(config: Config, preparation: Preparation) -> Sources:
    """The training images in two views, and the evaluation images.

    Batches for training are {"pixel_values": uint8 (batch, views, channels, height, width), "labels": int64 (batch,)};
    those for evaluation, of either set, are whole images or center crops, of shape (batch, channels, height, width).

    Raises:
        DataError: The data cannot be loaded.
    """
    draw = partial(random_views, config)
    if isinstance(config.data, DigitsData):
        images, held_out = digits(config.data)
        return DigitViews(images.pixels, images.labels, draw), held_out
    train, labeled = open_images(config.data, preparation)
    evaluation = evaluation_source(train, labeled, config.data, config.evaluation)
    num_voting = len(np.unique(train.labels[: config.neighbors.bank_samples]))
    if num_voting < (num_known := len(np.unique(train.labels))):
        told = f"neighbors.bank_samples reaches {num_voting} of {counted(num_known, 'class')} of training"
        evaluation.remark = "; ".join(filter(None, [evaluation.remark, told]))
    return HubImageSource(train, config.data, draw), evaluation


@dataclass(eq=False)
class DigitViews(TensorImages):
    """Views of single-channel images in memory."""

    draw: Augmentation

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        batch = super().fetch(indices, epoch)
        if epoch is not None:
            pixels = batch["pixel_values"][:, 0].numpy()
            numbered = zip(pixels, indices.tolist(), strict=True)
            views = [self.draw(Image.fromarray(each), epoch, index).pixels for each, index in numbered]
            # Views have three equal channels.
            batch["pixel_values"] = torch.from_numpy(np.stack(views)[:, :, :1])
        return batch


def random_views(config: Config, image: Image.Image, epoch: int, index: int) -> Crop:
    """The views of sample `index` in `epoch`: uint8, shape (views, 3, size, size)."""
    # Decoded once, and whole: a view must not depend on the scale at which another one decodes the image.
    image.load()
    generators = [
        np.random.default_rng(derive_seed(config.seed, "view", epoch, index, number)) for number in range(NUM_VIEWS)
    ]
    views = [random_view(image, config.data.image_size, config.views, random) for random in generators]
    return Crop(np.stack(views))


def random_view(image: Image.Image, size: int, views: Views, random: np.random.Generator) -> Pixels:
    """One view of a decoded image, uint8 of shape (3, size, size): a resized crop, which may be flipped, distorted
    in color and blurred."""
    pixels = crop_box(image, random_box(image, views.min_area, random), size)
    view = Image.fromarray(pixels.transpose(1, 2, 0))
    if views.flip and random.random() < 0.5:
        view = ImageOps.mirror(view)
    if views.color_strength:
        view = distort_colors(view, views.color_strength, random)
    if random.random() < views.blur:
        # Pillow approximates a Gaussian by three box blurs.
        view = view.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))
    return np.ascontiguousarray(np.asarray(view).transpose(2, 0, 1))


def distort_colors(image: Image.Image, strength: float, random: np.random.Generator) -> Image.Image:
    """The color distortion of Chen et al. 2020, appendix A: jitter in 80 % of the cases, then gray in 20 %."""
    if random.random() < 0.8:
        changes = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, None)
        for number in random.permutation(len(changes)):
            change = changes[number]
            if change is None:
                image = turn_hue(image, random.uniform(-0.2, 0.2) * strength)
            else:
                most = 0.8 * strength
                image = change(image).enhance(random.uniform(max(0.0, 1 - most), 1 + most))
    return image.convert("L").convert("RGB") if random.random() < 0.2 else image


def turn_hue(image: Image.Image, turn: float) -> Image.Image:
    """Rotate every hue on the color wheel by the fraction `turn` of a whole turn."""
    hue, saturation, value = image.convert("HSV").split()
    distance = round(turn * 256)
    turned = hue.point(lambda each: (each + distance) % 256)
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")
