"""Images: digits, and encoded images through `datasets` from local files."""

import io

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from largebatch.config import load_config
from largebatch.data.images import centre_crop, image_sources, inception_crop, normalise
from largebatch.errors import DataError
from paths import DIGITS, IMAGENET


def jpeg(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def gradient_image(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards: a pixel's colour tells where it was."""
    x = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    y = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    return Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=-1).round().astype(np.uint8))


@pytest.fixture
def parquet(tmp_path):
    """Twelve JPEG images of different sizes and colours, as on the hub."""
    rows = [
        {"image": {"bytes": jpeg(np.full((40 + n, 60, 3), 20 * n, np.uint8)), "path": None}, "label": n % 3}
        for n in range(12)
    ]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)})
    file = tmp_path / "data.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(file)
    return file


def hub_config(file, *overrides: str):
    files = f'{{"train": "{file}", "eval": "{file}"}}'
    words = [
        "--data.path=parquet",
        f"--data.data_files={files}",
        "--data.num_train_samples=12",
        "--data.num_eval_samples=12",
    ]
    words += [
        "--data.num_classes=3",
        "--data.image_size=16",
        "--batch.global_batch_size=4",
        "--batch.micro_batch_size=4",
    ]
    return load_config(IMAGENET, [*words, *overrides])


def test_digits_are_all_there_once_enlarged():
    train, evaluation = image_sources(load_config(DIGITS))
    assert (len(train), len(evaluation)) == (1437, 360)
    batch = train.fetch(np.arange(1437), 0)
    assert batch["pixel_values"].shape == (1437, 1, 32, 32)
    # Sample 0 of the training set is digit 1 of the file: digit 0 is held out.
    original = load_digits().images[1]
    assert np.array_equal(batch["pixel_values"][0, 0, ::4, ::4].numpy(), np.round(original * 255 / 16))
    held_out = evaluation.fetch(np.arange(360), None)["labels"]
    assert torch.equal(held_out, torch.from_numpy(load_digits().target[::5]))


def test_normalised_digits_have_mean_0_and_deviation_1():
    config = load_config(DIGITS)
    train, evaluation = image_sources(config)
    pixels = [train.fetch(np.arange(1437), 0)["pixel_values"], evaluation.fetch(np.arange(360), None)["pixel_values"]]
    values = normalise(torch.cat(pixels), config.data)
    assert values.mean().item() == pytest.approx(0, abs=2e-3)
    assert values.std().item() == pytest.approx(1, abs=2e-3)


def test_hub_images_come_in_the_order_asked_for(parquet):
    train, evaluation = image_sources(hub_config(parquet))
    for source, epoch in ((train, 0), (evaluation, None)):
        batch = source.fetch(np.array([7, 0, 3]), epoch)
        assert batch["labels"].tolist() == [1, 0, 0]
        assert batch["pixel_values"].shape == (3, 3, 16, 16)
        assert batch["pixel_values"].dtype == torch.uint8
        assert batch["pixel_values"].float().mean(dim=(1, 2, 3)).tolist() == pytest.approx([140, 0, 60], abs=2)


def test_parts_of_files_by_their_splits(parquet):
    words = ["--data.train_split=train[4:]", "--data.eval_split=validation[:3]"]
    train, evaluation = image_sources(hub_config(parquet, *words))
    assert (len(train), len(evaluation)) == (8, 3)
    assert train.fetch(np.array([0]), None)["labels"].tolist() == [4 % 3]


def test_augmentation_depends_on_seed_epoch_and_sample_alone(tmp_path):
    picture = np.asarray(gradient_image(64, 48))
    rows = [{"image": {"bytes": jpeg(picture), "path": None}, "label": 0} for _ in range(4)]
    file = tmp_path / "data.parquet"
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_list(rows, features=features).to_parquet(file)
    sizes = ["--data.num_train_samples=4", "--data.num_eval_samples=4"]
    train, evaluation = image_sources(hub_config(file, *sizes))
    other_seed, _ = image_sources(hub_config(file, *sizes, "--seed=1"))

    def pixels(source, indices, epoch):
        return source.fetch(np.array(indices), epoch)["pixel_values"]

    alone = pixels(train, [2], 5)[0]
    assert torch.equal(alone, pixels(train, [3, 2, 0], 5)[1])
    assert not torch.equal(alone, pixels(train, [2], 6)[0])
    assert not torch.equal(alone, pixels(train, [1], 5)[0])
    assert not torch.equal(alone, pixels(other_seed, [2], 5)[0])
    assert torch.equal(pixels(evaluation, [0], None), pixels(evaluation, [1], None))


def test_centre_crop_keeps_seven_eighths_of_the_shorter_side():
    pixels = centre_crop(gradient_image(200, 100), 50)
    # Of the height of 100, rows 6.25 to 93.75; of the width of 200, columns 56.25 to 143.75.
    assert pixels.shape == (3, 50, 50)
    assert pixels[0, 0, [0, -1]] == pytest.approx([255 * 57 / 200, 255 * 143 / 200], abs=2)
    assert pixels[1, [0, -1], 0] == pytest.approx([255 * 7 / 100, 255 * 93 / 100], abs=3)


def test_draft_decoding_crops_the_same_place():
    """A large JPEG is decoded at a smaller scale; the crop's box must be scaled with it."""
    large = Image.open(io.BytesIO(jpeg(np.asarray(gradient_image(1600, 1200)))))
    exact = centre_crop(gradient_image(1600, 1200), 64)
    drafted = centre_crop(large, 64)
    assert large.size[0] < 1600
    assert np.abs(exact.astype(int) - drafted.astype(int)).max() <= 4


def test_inception_crops_cover_8_to_100_percent_and_flip_half():
    image = gradient_image(160, 120)
    areas, ratios, flips = [], [], 0
    for seed in range(400):
        crop = inception_crop(image, 32, np.random.default_rng(seed)).astype(float)
        flipped = crop[0, 0, 0] > crop[0, 0, -1]
        flips += flipped
        # The colours span (1 - 1/32) of the crop's width and height.
        width = abs(crop[0, 0, -1] - crop[0, 0, 0]) / 255 * 160 * 32 / 31
        height = (crop[1, -1, 0] - crop[1, 0, 0]) / 255 * 120 * 32 / 31
        areas.append(width * height / (160 * 120))
        ratios.append(width / height)
    assert 0.05 < min(areas) < 0.15
    assert 0.8 < max(areas) < 1.05
    assert 0.65 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.5
    assert 160 < flips < 240


def test_grayscale_and_transparent_images_become_rgb():
    assert centre_crop(Image.new("L", (20, 20), 100), 8)[:, 0, 0].tolist() == [100, 100, 100]
    assert centre_crop(Image.new("RGBA", (20, 20), (10, 20, 30, 0)), 8).shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--data.data_files.train=/nowhere/*.parquet"], "data.data_files.train: no file matches '/nowhere"),
        (["--data.data_files=null", "--data.path=./nowhere"], "data.path: there is no folder './nowhere'"),
        (["--data.image_column=picture"], "data.image_column: no column 'picture'; the data has image, label"),
        (["--data.label_column=y"], "data.label_column: no column 'y'"),
        (["--data.path=parkuet"], "data.path: 'parkuet' could not be loaded"),
    ],
)
def test_data_that_cannot_be_opened(parquet, overrides, words):
    with pytest.raises(DataError) as caught:
        image_sources(hub_config(parquet, *overrides))
    assert words in str(caught.value)


def test_labels_out_of_range_and_broken_images(parquet, tmp_path):
    train, _ = image_sources(hub_config(parquet, "--data.num_classes=2"))
    with pytest.raises(DataError, match="num_classes: 2, but the data has the label 2"):
        train.fetch(np.array([2]), 0)
    file = tmp_path / "broken.parquet"
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = [{"image": {"bytes": b"not an image", "path": None}, "label": 0}]
    datasets.Dataset.from_list(rows, features=features).to_parquet(file)
    train, _ = image_sources(hub_config(file))
    with pytest.raises(DataError, match="the image of sample 0 cannot be decoded"):
        train.fetch(np.array([0]), 0)


def test_a_local_folder_of_images(tmp_path):
    """`imagefolder` layout, the usual form of a local ImageNet."""
    for split in ("train", "validation"):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (30, 30), (50 * label, 0, 0)).save(folder / "one.png")
    words = ["--data.data_files=null", f"--data.path={tmp_path}"]
    train, evaluation = image_sources(hub_config("unused", *words))
    assert (len(train), len(evaluation)) == (2, 2)
    assert evaluation.fetch(np.array([0, 1]), None)["labels"].tolist() == [0, 1]


@pytest.mark.parametrize(("side", "first"), [(32, 0), (16, 1)])
def test_centre_crop_of_images_as_small_as_the_crop(side, first):
    """32 pixels stay as they are; 16 lose an eighth, as they would after enlarging."""
    image = gradient_image(side, side)
    red = centre_crop(image, 32)[0, 0].astype(float)
    assert red[0] == pytest.approx(255 * first / (side - 1), abs=12)
    assert (red[-1] - red[0]) == pytest.approx(255 if side == 32 else 255 * 13 / 15, abs=12)
