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


def test_images_smaller_than_the_crop_lose_an_eighth_as_they_would_after_enlarging():
    red = center_crop(gradient_image(16, 16), 32)[0, 0].astype(float)
    assert red[[0, -1]] == pytest.approx([255 / 15, 255 * 14 / 15], abs=12)


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

    def integers(self, end, size=1):
        value = np.array(self.draws.pop(0))
        assert value.size == size
        assert (value < end).all()
        return value

    def random(self):
        return self.draws.pop(0)


@pytest.mark.parametrize(("top", "left"), [(0, 0), (4, 4), (8, 3), (1, 8)])
def test_a_padded_crop_is_the_image_moved(top, left):
    """Rows top - 4 to top + 28 of the image and columns likewise; black where there are none."""
    pixels = np.random.default_rng(0).integers(1, 256, size=(32, 32, 3), dtype=np.uint8)
    crop, mirrored = padded_crop(Image.fromarray(pixels), 32, Dealt((top, left), 0.7))
    padded = np.pad(pixels, ((4, 4), (4, 4), (0, 0)))
    assert np.array_equal(crop, padded[top : top + 32, left : left + 32].transpose(2, 0, 1))
    assert not mirrored
    assert padded_crop(Image.fromarray(pixels), 32, Dealt((top, left), 0.3)).mirrored


def test_an_inception_crop_by_hand():
    """A quarter of the area with the ratio 4/3 is 80 x 60 pixels, here from (30, 20) on. Cutting them out first and
    then resizing is the same but for the outermost pixels, whose means here reach over the edge of the crop."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, size=(120, 160, 3), dtype=np.uint8))
    draws = (0.25, np.log(4 / 3), 30, 20)
    dealt = Dealt(*draws, 0.9)
    crop, mirrored = inception_crop(image, 20, dealt)
    assert dealt.draws == []
    assert dealt.ranges == [(0.08, 1.0), (np.log(3 / 4), np.log(4 / 3))]
    cropped_then_resized = image.crop((30, 20, 110, 80)).resize((20, 20), Image.Resampling.BILINEAR)
    expected = np.asarray(cropped_then_resized).transpose(2, 0, 1)
    assert np.array_equal(crop[:, 1:-1, 1:-1], expected[:, 1:-1, 1:-1])
    assert not mirrored
    assert inception_crop(image, 20, Dealt(*draws, 0.4)).mirrored


def test_crops_that_do_not_fit_are_drawn_again_ten_times():
    image = gradient_image(40, 400)
    too_wide = [1.0, np.log(4 / 3)] * 10
    crop, _ = inception_crop(image, 40, Dealt(*too_wide, 0.5))
    # The largest centered box whose height is at most 4/3 of its width: rows 173 to 225 of 400.
    assert crop[1, [0, -1], 0].tolist() == pytest.approx([255 * 173 / 399, 255 * 225 / 399], abs=1)


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


def smooth_noise(width, height, random):
    """Noise of some 200 pixels' wavelength."""
    coarse = Image.fromarray(random.integers(0, 256, size=(height // 100, width // 100, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
