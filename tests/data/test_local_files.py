"""Which files `data_files` stands for, by os.walk and by hand: nothing is left out or read twice without a word."""

import json
import os
from pathlib import Path

import datasets
import pytest

from largebatch.data.columns import Use
from largebatch.data.hub import open_splits
from largebatch.data.local_files import found_files
from largebatch.data.preparation import Preparation
from largebatch.errors import DataError
from small_data import hub_text

ASKED_FOR = Preparation(allowed="everything")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def written(*names):
    """Files of one row, which is their name."""
    for name in map(Path, names):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_text(json.dumps({"text": str(name)}) + "\n")


def data_of(train, evaluation="held_out.jsonl", path="json", **more):
    written("held_out.jsonl")
    return hub_text(path, data_files={"train": train, "eval": evaluation}, **more)


def found(train, evaluation="held_out.jsonl", **more):
    return [str(file.path) for file in found_files(data_of(train, evaluation, **more))["train"]]


def assert_refused(told, train, *evaluation):
    with pytest.raises(DataError, match=told):
        found(train, *evaluation)


def read(train):
    return open_splits(data_of(train), ASKED_FOR)[0]["text"][:]


def test_a_folder_stands_for_all_of_its_files():
    """Those of linked folders, of names that only mean something to others, and with characters of globs."""
    written("more/1.jsonl", "data/b.jsonl", "data/a/x[1].jsonl", "data/_DSC1.jsonl", "data/year=2024/part-0.jsonl")
    Path("data/linked").symlink_to("../more")
    expected = ["_DSC1.jsonl", "a/x[1].jsonl", "b.jsonl", "linked/1.jsonl", "year=2024/part-0.jsonl"]
    assert found("data") == found("data/") == [f"data/{name}" for name in expected]
    assert read("data")[3] == "more/1.jsonl"


def test_what_a_glob_finds_is_what_is_read():
    """`datasets` itself would leave out linked folders, and those whose names begin with two underscores."""
    written("more/1.jsonl", "data/a/2.jsonl", "data/__b/3.jsonl")
    Path("data/linked").symlink_to("../more")
    assert read("data/**/*.jsonl") == ["data/__b/3.jsonl", "data/a/2.jsonl", "more/1.jsonl"]


def test_a_glob_does_not_pass_over_a_folder():
    written("data/0.jsonl", "data/old/1.jsonl")
    assert_refused(r"data/old, which 'data/\*' matches, is a folder; write a glob of the files", "data/*")
    assert found("data/*.jsonl") == ["data/0.jsonl"]
    written("data/empty/.gitkeep")
    assert found("data/**") == ["data/0.jsonl", "data/old/1.jsonl"]
    # Spark's folders have names of files.
    written("data/x.jsonl/part-0.json")
    assert_refused(r"data/x\.jsonl, which 'data/\*\*/\*\.jsonl' matches, is a folder", "data/**/*.jsonl")


def test_what_cannot_be_read_is_refused_by_name():
    written("data/0.jsonl")
    Path("data/1.jsonl").symlink_to("gone.jsonl")
    assert_refused(r"train: data/1\.jsonl cannot be read: No such file or directory; correct", "data")
    Path("data/1.jsonl").unlink()
    Path("data/1.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    assert_refused(r"data/1\.jsonl only points to a file in Git LFS; run `git lfs pull`", "data")
    Path("data/1.jsonl").unlink()
    os.mkfifo("data/1.jsonl")
    assert_refused(r"data/1\.jsonl is not a file; write the paths of files", "data")


def test_a_name_that_would_be_read_as_two_paths():
    """Even where there is a file with the first part of the name."""
    written("a", "a::b.jsonl")
    with pytest.raises(DataError, match=r"data_files\.train: a::b\.jsonl would be read as two paths; rename it"):
        read("a::b.jsonl")


def test_hidden_files_and_marks_are_no_data():
    written("data/part-0.jsonl", "data/_SUCCESS", "data/.part-0.jsonl.crc", "data/.git/x", "data/_committed_17")
    assert found("data") == ["data/part-0.jsonl"]
    written("parts/_part0", "parts/part1")
    assert found("parts") == ["parts/_part0", "parts/part1"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ["data/0.jsonl", "data/0.txt", "data/1.jsonl"],
            r"data/0\.txt is among files that end in '\.jsonl'; write a glob",
        ),
        (["data/_delta_log/0.jsonl", "data/0.jsonl"], "data/_delta_log is a folder that readers of tables leave out"),
        (["data/_SUCCESS"], "'data' is a folder without files"),
    ],
)
def test_a_folder_that_may_not_be_meant_is_refused(names, told):
    written(*names)
    assert_refused(rf"data\.data_files\.train: {told}", "data")


def test_a_folder_is_read_once():
    written("data/a/0.jsonl")
    Path("data/a/up").symlink_to("..")
    assert_refused(r"data and data/a/up are one folder; remove the link", "data")
    Path("data/a/up").unlink()
    Path("latest.jsonl").symlink_to("data/a/0.jsonl")
    for second in ("data/a/0.jsonl", "data/../data", str(Path("data").absolute()), "latest.jsonl"):
        assert_refused(r"data/a/0\.jsonl would be read 2 times", ["data", second])
    Path("data/latest.jsonl").symlink_to("a/0.jsonl")
    assert_refused(r"data/a/0\.jsonl would be read 2 times", "data")


def test_a_folder_that_cannot_be_listed(monkeypatch):
    written("data/a/0.jsonl", "data/1.jsonl")
    scan = os.scandir

    def refuse(path):
        if str(path) == "data/a":
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert_refused(r"data\.data_files\.train: data/a cannot be listed: Permission denied", "data")


def test_evaluation_does_not_read_what_a_folder_trains_on():
    written("data/train/0.jsonl", "data/eval/0.jsonl")
    Path("val").symlink_to("data/eval")
    for evaluation in ("data/eval", "data/eval/*.jsonl", str(Path("data/eval").absolute()), "data/../data/eval", "val"):
        assert_refused(r"data_files\.eval: .*data/eval/0\.jsonl is read for training, too", "data", evaluation)
    assert_refused(r"data_files\.eval: .*data/train/0\.jsonl is read for training, too", "data/train/*.jsonl", "data")
    assert found("data/train", "data/eval") == ["data/train/0.jsonl"]
    # Parts of the same files.
    split = {"train_split": "train[:50%]", "eval_split": "validation[50%:]"}
    assert found("data", "data", **split) == ["data/eval/0.jsonl", "data/train/0.jsonl"]


@pytest.mark.parametrize("path", ["", "none", "x" * 300, ["held_out.jsonl", "none"]])
def test_no_file(path):
    assert_refused(r"data\.data_files\.train: no file matches '.*write the path of files or of", path)


def test_a_folder_of_images_has_classes_and_any_endings(capsys):
    written("images/dog/about.txt", "images/cat/0.png", "images/dog/1.JPG", "val/cat/2.png")
    train, _ = open_splits(data_of("images", "val", "imagefolder"), ASKED_FOR)
    assert train["label"] == [0, 1]
    assert "1 file that nothing reads: .txt" in capsys.readouterr().out


def test_files_of_a_folder_that_datasets_passes_over_are_named(tmp_path, capsys):
    written("train.jsonl", "train-v1.jsonl", "validation.jsonl", "more.jsonl", "train2.csv")
    written("held_out.jsonl")
    train, _ = open_splits(hub_text(tmp_path), ASKED_FOR, {"text": Use("text_column")})
    assert len(train) == 2
    said = capsys.readouterr().out
    assert f"train: 2 files in {tmp_path}: train-v1.jsonl, train.jsonl\n" in said
    assert "1 file that nothing reads: .csv\n" in said
    # `more` and `held_out`.
    assert "2 files that nothing reads: .jsonl\n" in said


def test_a_name_with_brackets_is_a_name():
    written("train[1].jsonl", "train1.jsonl")
    assert found("train[1].jsonl") == ["train[1].jsonl"]
