"""Crops: where they are taken from, and that decoding at a smaller scale takes them from the same place."""

import io

import numpy as np
import pytest
from PIL import Image

from largebatch.data.crops import center_crop, inception_crop, padded_crop
from pictures import gradient_image, jpeg


def test_center_crop_keeps_seven_eighths_of_the_shorter_side():
    pixels = center_crop(gradient_image(200, 100), 50)
    # Of the height of 100, rows 6.25 to 93.75; of the width of 200, columns 56.25 to 143.75.
    assert pixels.shape == (3, 50, 50)
    assert pixels[0, 0, [0, -1]] == pytest.approx([255 * 57 / 200, 255 * 143 / 200], abs=2)
    assert pixels[1, [0, -1], 0] == pytest.approx([255 * 7 / 100, 255 * 93 / 100], abs=3)


def test_draft_decoding_crops_the_same_place():
    """A large JPEG is decoded at a smaller scale; the crop's box must be scaled with it."""
    large = Image.open(io.BytesIO(jpeg(np.asarray(gradient_image(1600, 1200)))))
    exact = center_crop(gradient_image(1600, 1200), 64)
    drafted = center_crop(large, 64)
    assert large.size[0] < 1600
    assert np.abs(exact.astype(int) - drafted.astype(int)).max() <= 4


def test_inception_crops_cover_8_to_100_percent_and_flip_half():
    image = gradient_image(160, 120)
    areas = []
    ratios = []
    flips = 0
    for seed in range(400):
        pixels, mirrored = inception_crop(image, 32, np.random.default_rng(seed))
        crop = pixels.astype(float)
        flips += mirrored
        # That is left to the device.
        assert crop[0, 0, 0] < crop[0, 0, -1]
        # The colors span (1 - 1/32) of the crop's width and height.
        width = abs(crop[0, 0, -1] - crop[0, 0, 0]) / 255 * 160 * 32 / 31
        height = (crop[1, -1, 0] - crop[1, 0, 0]) / 255 * 120 * 32 / 31
        areas.append(width * height / (160 * 120))
        ratios.append(width / height)
    assert 0.05 < min(areas) < 0.15
    assert 0.8 < max(areas) < 1.05
    assert 0.65 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.5
    assert 160 < flips < 240


@pytest.mark.parametrize(("side", "first"), [(32, 0), (16, 1)])
def test_center_crop_of_images_as_small_as_the_crop(side, first):
    """32 pixels stay as they are; 16 lose an eighth, as they would after enlarging."""
    image = gradient_image(side, side)
    red = center_crop(image, 32)[0, 0].astype(float)
    assert red[0] == pytest.approx(255 * first / (side - 1), abs=12)
    assert (red[-1] - red[0]) == pytest.approx(255 if side == 32 else 255 * 13 / 15, abs=12)


class Dealt:
    """Draws that are known beforehand, in the place of a random generator."""

    def __init__(self, *draws):
        self.draws = list(draws)
        self.ranges = []

    def uniform(self, low, high):
        self.ranges.append((low, high))
        value = self.draws.pop(0)
        assert low <= value <= high
        return value

    def integers(self, end, size=None):
        value = self.draws.pop(0)
        assert np.all(np.array(value) < end)
        assert np.shape(value) == (() if size is None else (size,))
        return np.array(value)

    def random(self):
        return self.draws.pop(0)


@pytest.mark.parametrize(("top", "left"), [(0, 0), (4, 4), (8, 3), (1, 8)])
def test_a_padded_crop_is_the_image_moved(top, left):
    """Rows top - 4 to top + 28 of the image and columns likewise; black where there are none."""
    pixels = np.random.default_rng(0).integers(1, 256, size=(32, 32, 3), dtype=np.uint8)
    crop, mirrored = padded_crop(Image.fromarray(pixels), 32, Dealt((top, left), 0.7))
    expected = np.zeros((3, 32, 32), np.uint8)
    for row in range(32):
        for column in range(32):
            y = row + top - 4
            x = column + left - 4
            if 0 <= y < 32 and 0 <= x < 32:
                expected[:, row, column] = pixels[y, x]
    assert np.array_equal(crop, expected)
    assert not mirrored
    assert padded_crop(Image.fromarray(pixels), 32, Dealt((top, left), 0.3)).mirrored


def test_an_inception_crop_by_hand():
    """A quarter of the area with the ratio 4/3 is 80 x 60 pixels, here from (30, 20) on. Cutting them out first and
    then resizing is the same but for the outermost pixels, whose means here reach over the edge of the crop."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, size=(120, 160, 3), dtype=np.uint8))
    dealt = Dealt(0.25, np.log(4 / 3), 30, 20, 0.9)
    crop, mirrored = inception_crop(image, 20, dealt)
    assert dealt.draws == []
    assert dealt.ranges == [(0.08, 1.0), (np.log(3 / 4), np.log(4 / 3))]
    cropped_then_resized = image.crop((30, 20, 110, 80)).resize((20, 20), Image.Resampling.BILINEAR)
    expected = np.asarray(cropped_then_resized).transpose(2, 0, 1)
    assert np.array_equal(crop[:, 1:-1, 1:-1], expected[:, 1:-1, 1:-1])
    assert not mirrored


def test_crops_that_do_not_fit_are_drawn_again_ten_times():
    image = gradient_image(40, 400)
    too_wide = [1.0, np.log(4 / 3)] * 10
    crop, _ = inception_crop(image, 40, Dealt(*too_wide, 0.5))
    # The largest centered square: rows 180 to 219 of 400.
    assert crop[1, [0, -1], 0].tolist() == pytest.approx([255 * 180 / 399, 255 * 219 / 399], abs=1)


@pytest.mark.parametrize(("size", "scale", "on_average", "at_most"), [(96, 4, 0.5, 4), (64, 8, 2, 12)])
def test_one_pass_over_a_large_photograph_is_crop_and_then_resize(size, scale, on_average, at_most):
    """Decoding at a smaller scale, and resizing from a box, against Pillow's own steps one by one: decode whole, cut
    out, resize. They differ, in levels of 256, because detail is averaged in two steps; a place that is wrong by one
    decoded pixel differs more."""
    photograph = smooth_noise(1200, 900, np.random.default_rng(0))
    encoded = jpeg(photograph)
    dealt = (0.5, 0.0, 101, 57, 0.9)
    opened = Image.open(io.BytesIO(encoded))
    crop, _ = inception_crop(opened, size, Dealt(*dealt))
    assert opened.size[0] == 1200 // scale
    side = round(np.sqrt(0.5 * 1200 * 900))
    whole = Image.open(io.BytesIO(encoded)).convert("RGB").crop((101, 57, 101 + side, 57 + side))
    expected = np.asarray(whole.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    difference = np.abs(crop.astype(int) - expected)
    assert difference.mean() <= on_average
    assert difference.max() <= at_most


def smooth_noise(width: int, height: int, random: np.random.Generator) -> np.ndarray:
    """Noise of some 200 pixels' wavelength."""
    coarse = Image.fromarray(random.integers(0, 256, size=(height // 100, width // 100, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
