"""Images: digits, and encoded images through `datasets` from local files."""

import base64
import errno
import json
import shutil
from functools import partial
from itertools import product
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow.parquet import write_table
from sklearn.datasets import load_digits

import tasks
from largebatch.config import load_config
from largebatch.data.columns import Use
from largebatch.data.parquet_types import check_types
from largebatch.data.preparation import Preparation
from largebatch.errors import DataError, StorageError, UserError
from largebatch.system.failures import kind_of
from paths import DIGITS, IMAGENET, SIMCLR
from pictures import gradient_image, jpeg, png, write_parquet
from small_data import assert_drawn_by_seed_epoch_and_sample

image_sources = tasks.sources("image_classification")
model_input = tasks.module("image_classification", "data").model_input


@pytest.fixture
def parquet(tmp_path):
    """Twelve JPEG images of different sizes and colors, as on the hub."""
    file = tmp_path / "data.parquet"
    pictures = [jpeg(np.full((40 + n, 60, 3), 20 * n, np.uint8)) for n in range(12)]
    write_parquet(file, pictures, [n % 3 for n in range(12)])
    return file


SMALL = ("--data.image_size=16", "--data.num_classes=3", "--batch.global_batch_size=4", "--batch.micro_batch_size=4")


def files_config(train, evaluation, *words, path="parquet"):
    files = json.dumps({"train": str(train), "eval": str(evaluation)})
    return load_config(IMAGENET, [f"--data.path={path}", f"--data.data_files={files}", *SMALL, *words])


def hub_config(file, *words):
    return files_config(file, file, *words)


def assert_refused(told, config):
    with pytest.raises(DataError, match=told):
        image_sources(config)


def open_folder(folder, allowed="everything"):
    """What is trained of images in a local folder, which is prepared."""
    config = load_config(IMAGENET, [f"--data.path={folder}", *SMALL])
    return image_sources(config, Preparation(allowed=allowed))


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


def test_hub_images_come_in_the_order_asked_for(parquet):
    train, evaluation = image_sources(hub_config(parquet))
    for source, epoch in ((train, 0), (evaluation, None)):
        batch = source.fetch(np.array([7, 0, 3]), epoch)
        assert batch["labels"].tolist() == [1, 0, 0]
        assert batch["pixel_values"].shape == (3, 3, 16, 16)
        assert batch["pixel_values"].dtype == torch.uint8
        assert batch["pixel_values"].float().mean(dim=(1, 2, 3)).tolist() == pytest.approx([140, 0, 60], abs=2)


@pytest.mark.parametrize("augmentation", ["inception_crop", "padded_crop"])
def test_augmentation_depends_on_seed_epoch_and_sample_alone(augmentation, tmp_path):
    file = tmp_path / "data.parquet"
    write_parquet(file, [jpeg(np.asarray(gradient_image(64, 48)))] * 4, [0] * 4)
    config = hub_config(file, f"--data.train_augmentation={augmentation}")
    train, evaluation = image_sources(config)
    other_seed, _ = image_sources(config.model_copy(update={"seed": 1}))

    def pixels(source, indices, epoch):
        return model_input(source.fetch(np.array(indices), epoch), config.data)

    assert_drawn_by_seed_epoch_and_sample(partial(pixels, train), partial(pixels, other_seed))
    assert torch.equal(pixels(evaluation, [0], None), pixels(evaluation, [1], None))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("--data.image_column=picture", "data.image_column: no column 'picture'; the data has 'image', 'label'"),
        ("--data.label_column=y", "data.label_column: no column 'y'"),
        ("--data.label_column=image", "data.label_column: the column 'image' has struct"),
    ],
)
def test_columns_that_are_not_there(word, told, parquet):
    assert_refused(told, hub_config(parquet, word))


PICTURE = png(np.full((8, 8, 3), 9, np.uint8))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"label": ["0", "1"]}, "data.label_column: the column 'label' has string; write one class"),
        ({"label": [[0, 1], [1]]}, "data.label_column: the column 'label' has list"),
        ({"label": [0, None]}, "data.label_column: sample 1 of 'train' has the label null"),
        ({"label": [1.0, 0.7]}, "sample 1 of 'train' has the label 0.7"),
        ({"label": [0, 3]}, "sample 1 of 'train' has the label 3; .* correct data.num_classes 3"),
        ({"image": [PICTURE, None]}, "data.image_column: sample 1 of 'train' has no image"),
        ({"image": [{"bytes": PICTURE, "path": None}, {"bytes": None, "path": None}]}, "sample 1 of 'train' has no"),
        # Pillow would start Ghostscript.
        ({"image": [EPS] * 2}, "the image of sample 0 cannot be decoded: it is not one of JPEG, PNG, "),
        ({"image": [{"data": PICTURE, "mode": 16}] * 2}, "sample 0 of 'train' has no image"),
        (
            {"image": [base64.b64encode(PICTURE).decode()] * 2},
            "the image of sample 0 cannot be decoded: .*No such file.*write paths of files",
        ),
        (
            {"image": [[[0, 255], [255, 0]]] * 2},
            "data.image_column: the column 'image' has list<.*; write the bytes or",
        ),
    ],
)
def test_columns_of_other_kinds_are_refused_before_training(columns, told, tmp_path):
    table = pyarrow.table({"image": [PICTURE] * 2, "label": [0, 1]} | columns)
    write_table(table, tmp_path / "data.parquet")
    assert_refused(told, hub_config(tmp_path / "data.parquet"))


@pytest.mark.parametrize("labels", [[2, 0], [2.0, 0.0], [True, False], pyarrow.array([2, 0], "uint8")])
def test_numbers_that_are_classes(labels, tmp_path):
    (tmp_path / "picture.png").write_bytes(PICTURE)
    for number, image in enumerate((PICTURE, {"bytes": PICTURE, "path": None}, str(tmp_path / "picture.png"))):
        file = tmp_path / f"{number}.parquet"
        write_table(pyarrow.table({"image": [image] * 2, "label": labels}), file)
        batch = image_sources(hub_config(file))[0].fetch(np.array([1, 0]), None)
        assert batch["labels"].tolist() == [0, int(labels[0])]
        assert batch["pixel_values"].unique().tolist() == [9]


def table_of_paths(folder, kind, rows):
    """The recipe's words for a table with the path of an image in each row."""
    (folder / "one.png").write_bytes(PICTURE)
    (folder / f"data.{kind}").write_text(rows.replace("IMAGE", str(folder / "one.png")))
    return hub_config(folder / f"data.{kind}", f"--data.path={kind}")


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("csv", "image,label\nIMAGE,2\nIMAGE,0"),
        ("csv", "image;split;label\nIMAGE;NA;2.0\nIMAGE;;00"),
        ("csv", "image,label\nIMAGE, 2 \nIMAGE,False"),
        ("json", '{"image": "IMAGE", "label": 2}\n{"image": "IMAGE", "label": 0.0}'),
        ("json", '{"image": "IMAGE", "label": "2"}\n{"image": "IMAGE", "label": false}'),
    ],
)
def test_classes_in_a_table_of_paths(kind, rows, tmp_path):
    batch = image_sources(table_of_paths(tmp_path, kind, rows))[0].fetch(np.array([1, 0]), None)
    assert batch["labels"].tolist() == [0, 2]
    assert batch["pixel_values"].unique().tolist() == [9]


@pytest.mark.parametrize(
    ("kind", "rows", "told"),
    [
        ("csv", "image,label\nIMAGE,1\nIMAGE,0.5", "sample 1 of 'train' has the label \"0.5\""),
        ("csv", "image,label\nIMAGE,1\nIMAGE,1_0", "sample 1 of 'train' has the label \"1_0\""),
        ("csv", "image,label\nIMAGE,1\nIMAGE,", "sample 1 of 'train' has the label \"\""),
        ("csv", "image,label\nIMAGE,1\n,1", "sample 1 of 'train' has no image in the column 'image'"),
        ("json", '{"image": "IMAGE", "label": null}', "sample 0 of 'train' has the label null"),
        ("json", '{"image": "IMAGE", "label": [1]}', r"sample 0 of 'train' has the label \"\[1\]\""),
        (
            "csv",
            "image,label\nhttps://x.org/1.jpg,1",
            r"sample 0 cannot be .*, or write paths of files, relative to /.*; URLs and base64",
        ),
    ],
)
def test_what_is_no_class_in_a_table_of_paths(kind, rows, told, tmp_path):
    assert_refused(told, table_of_paths(tmp_path, kind, rows))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "x"), StorageError),
        (OSError(errno.ENOSPC, "x"), StorageError),
        (OSError(errno.EACCES, "x"), UserError),
        (OSError(errno.ECONNRESET, "x"), DataError),
        (ImportError("x"), DataError),
    ],
)
def test_a_data_set_that_cannot_be_opened_now(error, kind, parquet, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset_builder", Mock(side_effect=error))
    with pytest.raises(UserError, match="x") as caught:
        image_sources(hub_config(parquet))
    assert type(caught.value) is kind
    assert ("needs a package: x" in str(caught.value)) == isinstance(error, ImportError)


def test_an_image_that_cannot_be_read_now_is_not_called_broken(parquet, monkeypatch):
    train, _ = image_sources(hub_config(parquet))
    monkeypatch.setattr(Image, "open", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(OSError, match="Stale file handle") as caught:
        train.fetch(np.array([0]), 0)
    assert kind_of(caught.value) == "files"


def test_broken_images(tmp_path):
    noise = png(np.random.default_rng(0).integers(256, size=(200, 200, 3), dtype=np.uint8))
    # Behind the first part of its pixels, where Pillow raises a SyntaxError.
    start, _, rest = noise.rpartition(b"IDAT")
    file = tmp_path / "broken.parquet"
    write_parquet(file, [noise, b"not an image", start, start + bytes(4) + rest], [0] * 4)
    train, _ = image_sources(hub_config(file))
    for index in (1, 2, 3):
        with pytest.raises(DataError, match=f"the image of sample {index} cannot be decoded"):
            train.fetch(np.array([index]), 0)


def write_pictures(folder, *names):
    for split, name in product(("train", "val"), names):
        file = folder / split / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 30)).save(file)


def test_a_local_folder_of_images(tmp_path):
    """`imagefolder` layout, the usual form of a local ImageNet; images stay where they are."""
    write_pictures(tmp_path, "cat/one.png", "dog/one.png")
    train, evaluation = open_folder(tmp_path, allowed="small")
    assert (len(train), len(evaluation)) == (2, 2)
    assert evaluation.fetch(np.array([0, 1]), None)["labels"].tolist() == [0, 1]
    assert evaluation.images.rows[0]["image"] == {"bytes": None, "path": str(tmp_path / "val/cat/one.png")}


def test_folders_in_folders_are_no_classes(tmp_path):
    """`datasets` would take the innermost ones for classes: cats and dogs of a year for one."""
    write_pictures(tmp_path, "cat/2023/1.png", "cat/2024/1.png", "dog/2023/1.png", "dog/2024/1.png")
    told = r"the classes of 'train' would be the innermost folders, as .*cat/2023 and .*dog/2024; write folders of the"
    with pytest.raises(DataError, match=told):
        open_folder(tmp_path)
    assert_refused(told, files_config(tmp_path / "train/**", tmp_path / "val/**", path="imagefolder"))
    # Whoever writes the depth knows the classes.
    train, _ = image_sources(files_config(tmp_path / "train/*/*/*", tmp_path / "val/*/*/*", path="imagefolder"))
    assert len(train) == 4
    write_pictures(tmp_path, "cat/two.png")
    told = r"'train' have no class: they are in one folder, or .*; write folders of"
    with pytest.raises(DataError, match=told):
        open_folder(tmp_path)
    # `datasets` has a class for each folder of these, and no image of one.
    write_pictures(tmp_path / "flat", "1.png")
    with pytest.raises(DataError, match=told):
        open_folder(tmp_path / "flat")
    assert_refused(told, files_config(tmp_path / "flat/train/**", tmp_path / "flat/val/**", path="imagefolder"))


def test_images_in_a_zip_are_refused(tmp_path):
    """`datasets` would give all of them the label of the folder that the zip is in."""
    write_pictures(tmp_path, "cat/1.png", "dog/1.png")
    folder = tmp_path / "zipped"
    for split in ("train", "val"):
        shutil.make_archive(folder / split, "zip", tmp_path / split)
    told = r"images in .*/train\.zip would get other classes, or none; unpack it"
    assert_refused(told, files_config(folder / "train.zip", folder / "val.zip", path="imagefolder"))
    with pytest.raises(DataError, match=told):
        open_folder(folder)


def test_labels_of_a_table_may_lie_in_any_folders(tmp_path, capsys):
    write_pictures(tmp_path, "ab/cd/0.png", "ef/gh/0.png")
    for split in ("train", "val"):
        (tmp_path / split / "metadata.csv").write_text("file_name,label\nab/cd/0.png,1\nef/gh/0.png,0\n")
    train, _ = open_folder(tmp_path)
    assert train.fetch(np.array([0, 1]), None)["labels"].tolist() == [1, 0]
    assert capsys.readouterr().out == ""


def test_preparing_names_classes_and_files_that_are_no_images(tmp_path, capsys):
    """And so does a run that is the first to read them."""
    write_pictures(tmp_path, "10/one.png", "2/one.png")
    (tmp_path / "train/10/0.HEIC").write_bytes(b"ftypheic")
    told = "1 file that nothing reads: .heic\n"
    for allowed, said in (("small", told), ("small", ""), ("everything", f"{told}2 classes of data.num_classes 3: ")):
        open_folder(tmp_path, allowed=allowed)
        assert capsys.readouterr().out.partition("0 10")[0] == said


def test_classes_beyond_the_recipe_s_are_named(tmp_path):
    write_pictures(tmp_path, *(f"{name}/1.png" for name in ("ant", "bee", "cat", "dog")))
    with pytest.raises(
        DataError, match=r"the label 3 of the classes ant, bee, cat, dog; .* correct data\.num_classes 3"
    ):
        open_folder(tmp_path)


def written_apart(folder, train, evaluation):
    write_pictures(folder, *(f"{name}/1.png" for name in {*train, *evaluation}))
    for split, names in (("train", train), ("val", evaluation)):
        for other in {*train, *evaluation}.difference(names):
            (folder / split / other / "1.png").unlink()
    return load_config(IMAGENET, [f"--data.path={folder}", *SMALL])


def test_classes_that_training_or_the_evaluation_lacks_are_told(tmp_path):
    _, evaluation = image_sources(written_apart(tmp_path, ["ant", "cat"], ["cat", "dog"]))
    told = "evaluation has 1 class that training has no image of: dog"
    assert evaluation.remark == told
    # A folder's images are sorted by class, and the first of them are the neighbors.
    for number, also in ((2, ""), (1, "; neighbors.bank_samples reaches 1 of 2 classes of training")):
        words = [f"--data.path={tmp_path}", *SMALL, f"--neighbors.bank_samples={number}", "--neighbors.count=1"]
        config = load_config(SIMCLR.with_name("simclr_resnet50_4k.json"), [*words, "--data.num_train_samples=4"])
        _, evaluation = tasks.sources("contrastive")(config)
        assert evaluation.remark == told + also


def test_classes_after_max_samples_are_those_of_the_evaluation(tmp_path):
    """Its first two images have one class; those of training, which has three, have two."""
    written_apart(tmp_path, ["ant", "bee", "cat"], ["cat", "dog"])
    shutil.copy(tmp_path / "val/cat/1.png", tmp_path / "val/cat/2.png")
    words = [f"--data.path={tmp_path}", *SMALL, "--data.num_classes=4", "--evaluation.max_samples=2"]
    _, evaluation = image_sources(load_config(IMAGENET, words))
    assert evaluation.remark.endswith(": dog; evaluation.max_samples reaches 1 of 2 classes")


def test_classes_after_max_samples_are_told(parquet):
    """Of twelve labels, 0, 1, 2, 0, and so on."""
    for number, told in ((2, "evaluation.max_samples reaches 2 of 3 classes"), (3, None)):
        _, evaluation = image_sources(hub_config(parquet, f"--evaluation.max_samples={number}"))
        assert evaluation.remark == told


def test_images_that_a_table_does_not_list_are_named(tmp_path, capsys):
    write_pictures(tmp_path, "a.png", "b.png", "c.png")
    for split in ("train", "val"):
        (tmp_path / split / "metadata.csv").write_text("file_name,label\na.png,1\nb.png,0\n")
    open_folder(tmp_path)
    assert "2 images that nothing reads: the metadata does not list all\n" in capsys.readouterr().out


@pytest.mark.parametrize("link", ["train", "train/dog"])
def test_a_folder_that_is_a_link_is_read_or_refused(link, tmp_path):
    """`datasets` would read the others, and nothing looks into hidden folders."""
    write_pictures(tmp_path, "cat/1.png", "dog/1.png")
    (tmp_path / ".venv/lib").mkdir(parents=True)
    (tmp_path / ".venv/lib64").symlink_to("lib")
    (tmp_path / ".hidden").symlink_to(".venv")
    open_folder(tmp_path)
    (tmp_path / link).rename(tmp_path / "elsewhere")
    (tmp_path / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"^data.path: {tmp_path / link} is a link to a folder, whose files may"):
        open_folder(tmp_path)
    train, _ = image_sources(files_config(tmp_path / "train", tmp_path / "val", path="imagefolder"))
    assert len(train) == 2


def test_classes_are_numbered_alike_in_all_files(tmp_path):
    for split, names in (("train", ["bird", "cat", "dog"]), ("val", ["cat", "dog"])):
        kind = datasets.Features({"image": datasets.Value("binary"), "label": datasets.ClassLabel(names=names)})
        rows = {"image": [b"1", b"2"], "label": [0, 1]}
        datasets.Dataset.from_dict(rows, kind).to_parquet(tmp_path / f"{split}.parquet")
    assert_refused(
        r"the classes of 'label' are .* in .*; number them alike in all files",
        files_config(tmp_path / "train.parquet", tmp_path / "val.parquet"),
    )
    # Whoever reads other columns is not concerned.
    check_types(tmp_path.glob("*.parquet"), {"image": Use("text_column")})


def test_mirroring_on_the_device_is_mirroring_each_image_on_the_host(tmp_path):
    """Bit for bit what a loader would do image by image in floats, with the mirroring that each image was dealt."""
    noise = np.random.default_rng(0).integers(0, 256, size=(12, 40, 50, 3), dtype=np.uint8)
    write_parquet(tmp_path / "data.parquet", [png(picture) for picture in noise], [0] * 12)
    config = hub_config(tmp_path / "data.parquet")
    train, evaluation = image_sources(config)
    batch = train.fetch(np.arange(12), 3)
    assert 0 < batch["mirrored"].sum() < 12
    mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (config.data.mean, config.data.std))
    pixels = batch["pixel_values"].numpy().astype(np.float32)
    mirrored = batch["mirrored"].numpy()
    pixels[mirrored] = pixels[mirrored, :, :, ::-1]
    expected = (pixels - mean * np.float32(255)) / (std * np.float32(255))
    assert np.array_equal(model_input(batch, config.data).numpy(), expected)
    # Batches have the same tensors, also one of which nothing is mirrored.
    assert "mirrored" in train.fetch(np.flatnonzero(~mirrored)[:1], 3)
    assert "mirrored" not in evaluation.fetch(np.arange(12), None)
