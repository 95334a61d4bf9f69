"""Labeled images classified by the names of their classes, while captioned images are trained."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from test_two_towers import CLIP, encoded_names
from torch.nn.functional import normalize
from transformers import CLIPModel

import tasks
from jobs import train_in_job
from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.data.preparation import Preparation
from largebatch.errors import DataError
from largebatch.storage.files import read_json_lines
from largebatch.tools.local_jobs.small_runs import tiny_data_overrides
from paths import CLIP_DIGITS
from problems import problems_of
from small_data import of_file

NAMES = ("a red thing", "green", "blue", "more", "x", "something else")
TEMPLATES = ("{}", "zz {} zzzzzzzz")
SIZE = 32
# Of each class another number of images, so that accuracies tell classes apart.
LABELS = [label for label in range(len(NAMES)) for _ in range(label + 1)]


def noise(number):
    return np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), np.uint8)


@pytest.fixture
def words(tmp_path):
    """A recipe's words: 48 captioned images, and some to classify, in folders."""
    rows = ["image,caption"]
    for number in range(48):
        Image.fromarray(noise(number)).save(tmp_path / f"{number}.png")
        rows.append(f"{tmp_path / f'{number}.png'},number {number}")
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    for number, label in enumerate(LABELS):
        folder = tmp_path / f"labeled/{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(100 + number)).save(folder / f"{number:02}.png")
    data = of_file(tmp_path / "pairs.csv", "csv", 48)
    data |= {"image_size": SIZE, "mean": [0.5] * 3, "std": [0.25] * 3, "max_tokens": 32}
    images = {"path": "imagefolder", "files": str(tmp_path / "labeled")}
    zero_shot = {"class_names": NAMES, "templates": TEMPLATES, "images": images}
    return (
        *CLIP,
        f"--data={json.dumps(data)}",
        f"--zero_shot={json.dumps(zero_shot)}",
        '--evaluation.sets={"zero_shot": {"every": {"steps": 2}}}',
    )


@pytest.mark.slow
def test_labeled_images_are_classified_as_by_transformers(words, run_dir):
    train_in_job(CLIP_DIGITS, run_dir, *words)
    lines = read_json_lines(run_dir / "evaluations.jsonl")
    assert [line["step"] for line in lines if "zero_shot/accuracy" in line] == [2, 4]
    assert all("zero_shot_accuracy" not in line for line in lines)
    config = load_config(CLIP_DIGITS, words)
    model = CLIPModel.from_pretrained(run_dir / "model").eval()
    texts = encoded_names(model, config)
    pixels = np.stack([noise(100 + number) for number in range(len(LABELS))]).transpose(0, 3, 1, 2)
    with torch.no_grad():
        images = model.get_image_features(pixel_values=torch.tensor((pixels / 255 - 0.5) / 0.25).float()).pooler_output
    mean, first = (
        np.mean((images @ normalize(classes, dim=-1).T).argmax(dim=1).numpy() == LABELS)
        for classes in (texts.mean(dim=1), texts[:, 0])
    )
    # One template alone would say something else.
    assert lines[-1]["zero_shot/accuracy"] == pytest.approx(mean) != pytest.approx(first)


def test_the_whole_image_is_looked_at(words, tmp_path):
    """As of pairs, and not the center that `image_classification` takes."""
    framed = np.zeros((64, 64, 3), np.uint8)
    framed[3:-3, 3:-3] = 255
    Image.fromarray(framed).save(tmp_path / "labeled/0/00.png")
    *_, labeled = tasks.sources("two_towers")(load_config(CLIP_DIGITS, words), Preparation())
    pixels = labeled.fetch(np.array([0]), None)["pixel_values"]
    assert pixels[0, :, 0].max() < 50
    assert pixels[0, :, 16, 16].tolist() == [255] * 3


def test_a_class_without_a_name(words, tmp_path):
    (tmp_path / "labeled/9").mkdir()
    Image.fromarray(noise(9)).save(tmp_path / "labeled/9/0.png")
    with pytest.raises(DataError, match=r"zero_shot\.images: data\.label_column: sample 21 .* has the label 6"):
        tasks.sources("two_towers")(load_config(CLIP_DIGITS, words), Preparation())


def test_a_name_without_a_class(words, tmp_path):
    """The folders after the one that is not there would be numbered as those before them."""
    shutil.rmtree(tmp_path / "labeled/2")
    told = r"zero_shot\.images: they have 5 classes, but zero_shot\.class_names has 6; write one name for each"
    with pytest.raises(DataError, match=told):
        tasks.sources("two_towers")(load_config(CLIP_DIGITS, words), Preparation())


def test_images_that_cannot_be_read_are_named_by_prepare(words, tmp_path, capsys):
    (tmp_path / "labeled/2/04.png").write_bytes(b"nothing")
    assert main(["prepare", str(CLIP_DIGITS), *words, "--check"]) == 2
    told = capsys.readouterr()
    assert re.search(r"(?m)^zero_shot +21 samples found$", told.out)
    assert "1 sample cannot be read:\n  - zero_shot sample 4: the image of sample 4 cannot be decoded" in told.err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--evaluation.sets={}"], 'evaluation.sets: "zero_shot" and zero_shot.images go together'),
        (["--zero_shot=null"], 'evaluation.sets: "zero_shot" and zero_shot.images go together'),
        (["--zero_shot.images=null", "--evaluation.sets={}"], "zero_shot: this data has no classes; write zero_shot."),
        (['--data={"source": "digits", "max_tokens": 32}'], "zero_shot.images: digits have classes"),
    ],
)
def test_images_that_are_there_in_vain_or_missing(more, problem, words):
    problems = problems_of(*words, *more, recipe=CLIP_DIGITS)
    assert any(each.startswith(problem) for each in problems), problems


def test_a_recipe_with_classes_of_its_own_is_verified_on_digits(words):
    config = load_config(CLIP_DIGITS, words)
    assert load_config(CLIP_DIGITS, [*words, *tiny_data_overrides(config)]).zero_shot is None
