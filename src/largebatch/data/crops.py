"""Crops of encoded images, in the loader's process; mirroring and normalizing are done on the device."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from largebatch.data.viewer import finished

Pixels = NDArray[np.uint8]
Box = tuple[float, float, float, float]  # left, top, right and bottom, in pixels

EVALUATION_CROP = 0.875  # the center crop's side over the shorter side of the image: 224 of 256


class Crop(NamedTuple):
    """A part of an image: pixels of shape (3, size, size), and whether they are still to be mirrored left to right, if
    some are."""

    pixels: Pixels
    mirrored: bool | None = None


def center_crop(image: Image.Image, size: int, part: float = EVALUATION_CROP) -> Pixels:
    """The central square of an image, `part` of its shorter side, resized to shape (3, size, size).

    If the shorter side is already `size`, as with CIFAR, the square is the whole of it.
    """
    shorter = min(image.size)
    side = shorter if shorter == size else shorter * part
    left = (image.width - side) / 2
    top = (image.height - side) / 2
    return crop_box(image, (left, top, left + side, top + side), size)


def inception_crop(image: Image.Image, size: int, random: np.random.Generator) -> Crop:
    """A random crop of 8 to 100 % of the area with an aspect ratio between 3/4 and 4/3, mirrored half the time.

    Szegedy et al. 2015 (arXiv 1409.4842), section 6, as in Goyal et al. 2017, section 5.1.
    """
    box = random_box(image, 0.08, random)
    return Crop(crop_box(image, box, size), mirrored=random.random() < 0.5)


def padded_crop(image: Image.Image, size: int, random: np.random.Generator) -> Crop:
    """The evaluation's crop, moved by up to an eighth of its side in each direction, mirrored half the time.

    A 32 x 32 image is padded with 4 black pixels on each side, and a random 32 x 32 crop is taken (He et al. 2016,
    arXiv 1512.03385, section 4.2).
    """
    padding = size // 8
    padded = np.pad(center_crop(image, size), ((0, 0), (padding, padding), (padding, padding)))
    top, left = random.integers(2 * padding + 1, size=2)
    return Crop(padded[:, top : top + size, left : left + size], mirrored=random.random() < 0.5)


def random_box(image: Image.Image, min_area: float, random: np.random.Generator) -> Box:
    """A random box of at least `min_area` of an image's area with an aspect ratio between 3/4 and 4/3.

    After ten boxes that do not fit, it falls back to the largest centered box of such a ratio, as torchvision does.
    """
    for _ in range(10):
        area = image.width * image.height * random.uniform(min_area, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        width = round(math.sqrt(area * ratio))
        height = round(math.sqrt(area / ratio))
        if 0 < width <= image.width and 0 < height <= image.height:
            left = int(random.integers(image.width - width + 1))
            top = int(random.integers(image.height - height + 1))
            return left, top, left + width, top + height
    width = min(image.width, round(image.height * 4 / 3))
    height = min(image.height, round(image.width * 4 / 3))
    left = (image.width - width) // 2
    top = (image.height - height) // 2
    return left, top, left + width, top + height


def crop_box(image: Image.Image, box: Box, size: int) -> Pixels:
    """Decode, crop and resize an image of mode L, RGB or CMYK in one pass to shape (3, size, size), as viewers show it.

    A JPEG is decoded, in place, at the smallest scale that still holds the crop. The box is of the image as it is
    stored, and the crop is then turned upright.
    """
    full_width, full_height = image.size
    shorter = min(box[2] - box[0], box[3] - box[1])
    if shorter >= 2 * size:
        image.draft("RGB", (int(full_width * size / shorter), int(full_height * size / shorter)))
    scale_x = image.width / full_width
    scale_y = image.height / full_height
    scaled = (box[0] * scale_x, box[1] * scale_y, box[2] * scale_x, box[3] * scale_y)
    resized = image.resize((size, size), Image.Resampling.BILINEAR, box=scaled)
    return np.asarray(finished(resized), dtype=np.uint8).transpose(2, 0, 1)
