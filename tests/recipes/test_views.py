"""Two random views of each image."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter

import tasks
from largebatch.config import load_config
from paths import SIMCLR
from pictures import gradient_image, jpeg, write_parquet
from small_data import assert_drawn_by_seed_epoch_and_sample, load_with, of_file

Views = tasks.module("contrastive", "config").Views
distort_colors = tasks.module("contrastive", "data").distort_colors
random_view = tasks.module("contrastive", "data").random_view
turn_hue = tasks.module("contrastive", "data").turn_hue
view_sources = tasks.sources("contrastive")

CROPS_ALONE = Views(min_area=0.5, flip=False, color_strength=0.0, blur=0.0)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8))


def pixels(source, indices, epoch=3):
    return source.fetch(np.array(indices), epoch)["pixel_values"]


@pytest.fixture(params=["digits", "files"])
def sources(request, tmp_path):
    """From overrides to both sets, of the digits or of large JPEGs that could be decoded at a smaller scale."""
    if request.param == "digits":
        return lambda *words: view_sources(load_config(SIMCLR, words))
    file = tmp_path / "data.parquet"
    write_parquet(file, [jpeg(np.asarray(gradient_image(600, 500)))] * 4, [0, 1, 0, 1])
    data = of_file(file, "parquet", 4)
    data |= {"image_size": 16, "mean": [0.5] * 3, "std": [0.3] * 3, "num_classes": 2}
    return lambda *words: view_sources(load_with(SIMCLR, data, "--neighbors={}", "--neighbors.count=1", *words))


def test_a_view_depends_on_seed_epoch_sample_and_view_alone(sources):
    train, _ = sources()
    other_seed, _ = sources("--seed=1")
    assert_drawn_by_seed_epoch_and_sample(partial(pixels, train), partial(pixels, other_seed))
    (views,) = pixels(train, [2])
    assert views.dtype == torch.uint8
    assert not torch.equal(*views)


def test_evaluation_sees_whole_images_of_either_set(sources):
    train, evaluation = sources()
    found = pixels(train, [1, 0], None)
    assert found.shape == pixels(evaluation, [1, 0], None).shape
    assert found.ndim == 4
    assert torch.equal(found, pixels(train, [1, 0], None))


def test_hues_turn_by_parts_of_a_whole_turn():
    red = Image.new("RGB", (2, 2), (200, 0, 0))
    thirds = [np.asarray(turn_hue(red, turn))[0, 0] for turn in (0.0, 1 / 3, -1 / 3, 1.0)]
    assert [int(color.argmax()) for color in thirds] == [0, 1, 2, 0]
    assert np.abs(thirds[1].astype(int) - [0, 200, 0]).max() <= 6


class AtOneEnd:
    """Draws the lowest or the highest of real numbers, 0 of whole ones, permutes nothing, and has these chances."""

    def __init__(self, end, *chances):
        self.end = end
        self.chances = list(chances)

    def uniform(self, *ends):
        return ends[self.end]

    def integers(self, _):
        return 0

    def permutation(self, count):
        return range(count)

    def random(self):
        return self.chances.pop(0)


@pytest.mark.parametrize(("end", "box"), [(0, (0, 0, 64, 85)), (1, (0, 0, 120, 90))])
def test_crops_and_flips_are_as_configured(end, box):
    """Half of the area, three quarters as wide as high; or all of it, a third wider than high."""
    image = gradient_image(120, 90)
    views = CROPS_ALONE.model_copy(update={"flip": True, "blur": 0.5})
    found = random_view(image, 32, views, AtOneEnd(end, 0.6, 0.6))
    expected = np.asarray(image.crop(box).resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.abs(found - expected.astype(int)).max() <= 3
    assert np.array_equal(random_view(image, 32, views, AtOneEnd(end, 0.4, 0.6)), found[:, :, ::-1])


@pytest.mark.parametrize(("end", "factor", "turn"), [(0, 0.6, -0.1), (1, 1.4, 0.1)])
def test_colors_change_by_as_much_as_in_the_paper(end, factor, turn):
    """At strength 0.5 by 0.8 x 0.5 of brightness, contrast and saturation, and hues by 0.2 x 0.5 of a turn."""
    expected = NOISE
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        expected = enhance(expected).enhance(factor)
    expected = turn_hue(expected, turn)
    assert np.array_equal(distort_colors(NOISE, 0.5, AtOneEnd(end, 0.0, 0.9)), expected)


@pytest.mark.parametrize(("end", "radius"), [(0, 0.1), (1, 2.0)])
def test_blurs_are_as_wide_as_in_the_paper(end, radius):
    whole = CROPS_ALONE.model_copy(update={"min_area": 1.0, "blur": 0.5})
    found = random_view(NOISE, 32, whole, AtOneEnd(end, 0.4))
    assert np.array_equal(found.transpose(1, 2, 0), NOISE.filter(ImageFilter.GaussianBlur(radius)))


def test_colors_are_left_alone_gray_or_changed_as_often_as_in_the_paper():
    color = Image.new("RGB", (2, 2), (150, 90, 60))
    found = [np.asarray(distort_colors(color, 0.5, np.random.default_rng(n)))[0, 0].tolist() for n in range(500)]
    gray = sum(len(set(values)) == 1 for values in found)
    assert 70 < gray < 130
    # Of the others, one in five: 0.2 x 0.8 of all.
    assert 55 < sum(values == [150, 90, 60] for values in found) < 105
