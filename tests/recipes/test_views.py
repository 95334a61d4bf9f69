"""Two random views of each image."""

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter

import tasks
from largebatch.config import load_config
from largebatch.data.images import digits
from paths import SIMCLR
from pictures import gradient_image, jpeg, write_parquet

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
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 255, (12, 15, 3), dtype=np.uint8)) for _ in range(4)]
    file = str(tmp_path / "data.parquet")
    write_parquet(file, [jpeg(np.asarray(each.resize((600, 500)))) for each in noise], [0, 1, 0, 1])
    data = {"source": "datasets", "path": "parquet", "data_files": {"train": file, "eval": file}, "num_classes": 2}
    data |= {"num_train_samples": 4, "num_eval_samples": 4, "image_size": 16, "mean": [0.5] * 3, "std": [0.3] * 3}
    words = (f"--data={json.dumps(data)}", '--batch={"global_batch_size": 4, "micro_batch_size": 4}')
    words = (*words, "--neighbors={}", "--neighbors.count=1")
    return lambda *more: view_sources(load_config(SIMCLR, (*words, *more)))


def test_a_view_depends_on_seed_epoch_sample_and_view_alone(sources):
    train, _ = sources()
    other_seed, _ = sources("--seed=1")
    views = pixels(train, [2, 0])
    assert views.shape[:2] == (2, 2)
    assert views.dtype == torch.uint8
    assert torch.equal(views[0], pixels(train, [3, 1, 2])[2])
    assert not torch.equal(views[0, 0], views[0, 1])
    assert not torch.equal(views[0], pixels(train, [2], epoch=4)[0])
    assert not torch.equal(views[0], pixels(other_seed, [2])[0])
    assert not torch.equal(views[0], views[1])


def test_evaluation_sees_whole_images_of_either_set(sources):
    train, evaluation = sources()
    found = pixels(train, [1, 0], None)
    assert found.shape == pixels(evaluation, [1, 0], None).shape
    assert found.ndim == 4
    assert torch.equal(found, pixels(train, [1, 0], None))


def test_digits_are_seen_as_they_are_by_the_evaluation():
    config = load_config(SIMCLR)
    for mine, theirs in zip(view_sources(config), digits(config.data), strict=True):
        assert torch.equal(pixels(mine, [5, 9], None), pixels(theirs, [5, 9], None))


def test_crops_flips_and_blurs_are_as_many_as_configured():
    image = gradient_image(120, 120)
    areas = []
    flips = 0
    views = CROPS_ALONE.model_copy(update={"flip": True})
    for seed in range(300):
        view = random_view(image, 32, views, np.random.default_rng(seed)).astype(float)
        flips += view[0, 0, 0] > view[0, 0, -1]
        width = abs(view[0, 0, -1] - view[0, 0, 0])
        height = view[1, -1, 0] - view[1, 0, 0]
        areas.append(width * height / 255**2 * (32 / 31) ** 2)
    assert 0.45 < min(areas) < 0.56
    assert 0.9 < max(areas) < 1.06
    assert 120 < flips < 180
    whole = CROPS_ALONE.model_copy(update={"min_area": 1.0, "blur": 0.5})
    views = [random_view(NOISE, 32, whole, np.random.default_rng(seed)).astype(int) for seed in range(80)]
    roughness = [np.abs(np.diff(view)).mean() for view in views]
    smooth = sum(each < 0.8 * max(roughness) for each in roughness)
    assert 24 <= smooth <= 50


def test_hues_turn_by_parts_of_a_whole_turn():
    red = Image.new("RGB", (2, 2), (200, 0, 0))
    thirds = [np.asarray(turn_hue(red, turn))[0, 0] for turn in (0.0, 1 / 3, -1 / 3, 1.0)]
    assert [int(color.argmax()) for color in thirds] == [0, 1, 2, 0]
    assert np.abs(thirds[1].astype(int) - [0, 200, 0]).max() <= 6


class AtOneEnd:
    """Draws the lowest or the highest number of each range, permutes nothing, and has these chances."""

    def __init__(self, end, *chances):
        self.end = end
        self.chances = list(chances)

    def uniform(self, *ends):
        return ends[self.end]

    def permutation(self, count):
        return range(count)

    def random(self):
        return self.chances.pop(0)


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
