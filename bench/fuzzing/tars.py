"""Tars of images in WebDataset's layout: their index, and the images that training reads."""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

import tasks
from fuzzing.cases import Case
from fuzzing.mutations import TEXTS, change_bytes, cut, insert, replace_by_kind
from largebatch.__main__ import main as largebatch
from largebatch.config import load_config
from largebatch.data.preparation import Preparation
from largebatch.run.command_line import user_errors
from largebatch.system.endings import OwnEnding

RECIPE = "recipes/image_classification/resnet_cifar10.json"


def write(random: Random, file: Path) -> None:
    """A tar of six pictures and their labels, of which some may be out of the ordinary."""
    formats = random.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
    with tarfile.open(file, "w", format=formats) as tar:
        for number in range(6):
            picture = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), 40 * number, np.uint8)).save(picture, "PNG")
            label = random.choice(TEXTS) if random.random() < 0.02 else str(number % 3)
            for ending, content in (("png", picture.getvalue()), ("cls", label.encode(errors="replace")[:1000])):
                member = tarfile.TarInfo(f"{number:03d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def prepare_and_read(words: Sequence[str]) -> int:
    """The index of all samples, and the samples."""
    code = largebatch(["prepare", RECIPE, *words, "--workers=1"])
    if code == 0:
        with user_errors(OwnEnding()):
            config = load_config(Path(RECIPE), words)
            for source in tasks.module("image_classification", "data").sources(config, Preparation()):
                source.fetch(np.arange(len(source)), 0)
    return code


def case(random: Random, folder: Path) -> Case:
    """Two tars, of which one may be damaged."""
    files = [folder / "train.tar", folder / "eval.tar"]
    for file in files:
        write(random, file)
    for file in random.sample(files, random.randrange(3)):
        random.choice((change_bytes, change_bytes, cut, insert, replace_by_kind))(random, file)
    data = {"path": "webdataset", "data_files": {"train": "train.tar", "eval": "eval.tar"}, "image_column": "png"}
    data |= {"label_column": "cls", "train_split": "train", "eval_split": "validation"}
    words = [f"--data.{name}={json.dumps(value)}" for name, value in data.items()]
    words += ["--data.num_train_samples=6", "--data.num_eval_samples=6"]
    words += ['--batch={"global_batch_size": 2, "micro_batch_size": 2}']
    return Case(words, folder, prepare_and_read)
