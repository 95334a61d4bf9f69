"""Tars of images in WebDataset's layout, and the index of them in the cache."""

import io
import json
import tarfile
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from fuzzing.cases import Case
from fuzzing.mutations import TEXTS, change_bytes, cut, insert, replace_by_kind


def write(random: Random, file: Path) -> None:
    """A tar of six pictures and their labels, of which some may be out of the ordinary."""
    formats = random.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
    with tarfile.open(file, "w", format=formats) as tar:
        for number in range(6):
            picture = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), 40 * number, np.uint8)).save(picture, "PNG")
            label = random.choice(TEXTS) if random.random() < 0.1 else str(number % 3)
            for ending, content in (("png", picture.getvalue()), ("cls", label.encode(errors="replace")[:1000])):
                member = tarfile.TarInfo(f"{number:03d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def case(random: Random, folder: Path) -> Case:
    """Two tars, of which one may be damaged."""
    files = [folder / "train.tar", folder / "eval.tar"]
    for file in files:
        write(random, file)
    for _ in range(random.randrange(3)):
        file = random.choice(files)
        if file.is_file():
            random.choice((change_bytes, change_bytes, cut, insert, replace_by_kind))(random, file)
    data = {"path": "webdataset", "data_files": {"train": "train.tar", "eval": "eval.tar"}, "image_column": "png"}
    data |= {"label_column": "cls", "train_split": "train", "eval_split": "validation"}
    words = [f"--data.{name}={json.dumps(value)}" for name, value in data.items()]
    words += ["--data.num_train_samples=6", "--data.num_eval_samples=6", "--workers=1"]
    recipe = "recipes/image_classification/resnet_cifar10.json"
    batch = '--batch={"global_batch_size": 2, "micro_batch_size": 2}'
    return Case(["prepare", recipe, batch, *words], folder)
