"""Local folders as `data.path`: what is read is what their files hold, whatever is beside them or was read before."""

import os

import pyarrow
import pytest
from pyarrow import parquet

from largebatch.config.data import HubText
from largebatch.data.columns import Use
from largebatch.data.hub import open_splits
from largebatch.data.preparation import Preparation
from largebatch.errors import DataError

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


def read(folder):
    named = {"source": "datasets", "path": str(folder), "tokenizer": "bytes", "block_size": 1}
    section = HubText(**named, num_train_samples=1, num_eval_samples=1)
    train, _ = open_splits(section, Preparation(), {"a": Use("text_column")})
    return train["a"][:]


def test_types_in_a_readme_change_nothing(tmp_path):
    write(tmp_path, "007", TYPES)
    assert read(tmp_path) == ["007"]


def test_files_that_have_changed_are_read_again(tmp_path):
    write(tmp_path, "old")
    assert read(tmp_path) == ["old"]
    before = (tmp_path / "train.parquet").stat()
    write(tmp_path, "newer")
    # As `cp -p` and `rsync -t` leave it.
    os.utime(tmp_path / "train.parquet", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(tmp_path) == ["newer"]


def test_folders_of_one_name(tmp_path):
    write(tmp_path / "one/data", "first")
    write(tmp_path / "two/data", "second")
    assert [read(tmp_path / name / "data") for name in ("one", "two")] == [["first"], ["second"]]


def test_a_file_that_is_in_both_splits_by_its_name(tmp_path):
    for name in ("train", "dev", "train_dev"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"a": "{name}"}}\n')
    with pytest.raises(DataError, match=r"both have .*train_dev\.jsonl, because of its name; write data_files"):
        read(tmp_path)
