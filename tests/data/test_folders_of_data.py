"""Local folders as `data.path`: what is read is what their files hold, whatever is beside them or was read before."""

import re

import datasets
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from largebatch.data.columns import Use
from largebatch.data.hub import open_splits
from largebatch.data.preparation import Preparation
from largebatch.errors import DataError
from small_data import hub_text

CONFIGS = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: train*
  - split: validation
    path: validation*
---
"""
TYPES = """---
dataset_info:
  features:
  - name: a
    dtype: int64
  splits:
  - name: train
    num_examples: 1
  - name: validation
    num_examples: 1
---
"""


def write(folder, text, readme=CONFIGS):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(readme)
    for name in ("train", "validation"):
        parquet.write_table(pyarrow.table({"a": [text]}), folder / f"{name}.parquet")


def read(folder, **splits):
    train, _ = open_splits(hub_text(folder, **splits), Preparation(), {"a": Use("text_column")})
    return train["a"][:]


def test_types_in_a_readme_change_nothing(tmp_path):
    write(tmp_path, "007", TYPES)
    assert read(tmp_path) == ["007"]


def test_a_folder_whose_name_is_a_glob_of_another_is_refused(tmp_path):
    for name in ("data1", "data[1]"):
        write(tmp_path / name, name)
    with pytest.raises(DataError, match=r"data\.path: .*data\[1\] for a glob; rename it"):
        read(tmp_path / "data[1]")


def test_folders_of_one_name_and_of_that_of_a_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "beside")
    for place in ("one/data", "two/data", "parquet"):
        write(tmp_path / place, place)
        assert read(place) == [place]


def write_lines(folder, *names):
    for name in names:
        (folder / f"{name}.jsonl").write_text(f'{{"a": "{name}"}}\n{{"a": "{name} 2"}}\n')


def test_a_file_that_is_in_both_splits_by_its_name(tmp_path):
    write_lines(tmp_path, "train", "dev", "train_dev")
    with pytest.raises(DataError, match=r"train and validation both have .*train_dev\.jsonl; write data_files"):
        read(tmp_path)


@pytest.mark.parametrize("copy", ["train.jsonl.bak", "train.jsonl.gz"])
def test_backups_and_compressed_copies_are_refused(copy, tmp_path):
    write_lines(tmp_path, "train", "dev")
    (tmp_path / copy).write_bytes((tmp_path / "train.jsonl").read_bytes())
    told = rf"^data\.path: .*{re.escape(copy)} is among files that end in '\.jsonl'; write a glob"
    with pytest.raises(DataError, match=told):
        read(tmp_path)


def test_what_map_and_filter_leave_in_a_saved_folder_is_not_read(tmp_path):
    rows = datasets.Dataset.from_dict({"a": ["one", "two"]})
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path)
    saved = datasets.load_from_disk(tmp_path)
    saved.map(lambda row: {"a": row["a"].upper()})
    saved["train"].filter(lambda row: row["a"] == "two")
    assert len([*tmp_path.rglob("cache-*.arrow")]) == 3
    assert read(tmp_path) == read(tmp_path / "train", eval_split="train") == ["one", "two"]


@pytest.mark.parametrize(
    ("train", "evaluation", "rows", "held_out", "shared"),
    [
        ("train+test[:50%]", "test[50%:]", ["train", "train 2", "test"], ["test 2"], ""),
        ("train[:50%]", "train[50%:]+test", ["train"], ["train 2", "test", "test 2"], ""),
        ("train+test[:1]", "test[:2]", ["train", "train 2", "test"], ["test", "test 2"], "1 row of"),
        ("test[:100%]", "test[:2]", ["test", "test 2"], ["test", "test 2"], "2 rows of"),
        ("train[:1]+train[:2]", "train[1:]+train[1:]", ["train", "train", "train 2"], ["train 2"] * 2, "1 row of"),
        # The plan tells that.
        ("train", "train", ["train", "train 2"], ["train", "train 2"], ""),
    ],
)
def test_parts_of_one_split_have_its_files(train, evaluation, rows, held_out, shared, tmp_path, capsys):
    write_lines(tmp_path, "train", "test")
    section = hub_text(tmp_path, train_split=train, eval_split=evaluation)
    # The second time, the rows are in the cache.
    for _ in range(2):
        found = open_splits(section, Preparation(), {"a": Use("text_column")})
        assert [split["a"][:] for split in found] == [rows, held_out]
        told = re.findall("(.*) the data for both training and evaluation", capsys.readouterr().out)
        assert told == [shared] * bool(shared)


def test_a_split_whose_name_begins_as_another(tmp_path):
    write_lines(tmp_path, "full", "small")
    config = CONFIGS.replace("train*", "full.jsonl").replace("validation*", "small.jsonl")
    (tmp_path / "README.md").write_text(config.replace("validation", "train_small"))
    assert read(tmp_path, train_split="train", eval_split="train_small") == ["full", "full 2"]


def test_what_a_readme_says_of_how_files_are_read(tmp_path):
    """`datasets` gives images labels by their folders, unless it says otherwise."""
    for place in ("train/cat/1.png", "train/dog/2.png", "validation/cat/3.png"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(tmp_path / place)
    assert open_splits(hub_text(tmp_path), Preparation())[0].column_names == ["image", "label"]
    config = "---\nconfigs:\n- config_name: default\n  data_dir: .\n  drop_labels: true\n---\n"
    (tmp_path / "README.md").write_text(config)
    assert open_splits(hub_text(tmp_path), Preparation())[0].column_names == ["image"]
