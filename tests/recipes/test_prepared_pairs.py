"""Pairs of prompts and answers: their tokens are prepared once, and a job that may not make them says so."""

import math
import os
import shutil
import signal
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import tasks
from largebatch.data import text_rows
from largebatch.data.preparation import NotPrepared, Preparation
from largebatch.errors import DataError
from paths import ADDITION
from small_data import load_with, of_file, rows_in

BY_THE_COMMAND = Preparation("largebatch prepare x", allowed="everything", num_workers=2)


def section(data, prompt, answer, **fields):
    """The recipe with pairs of a section of data."""
    shape = {"tokenizer": "bytes", "block_size": 64, "prompt": prompt, "answer": answer}
    return load_with(ADDITION, data | shape | fields)


@pytest.fixture
def config(tmp_path):
    rows_in(tmp_path / "pairs.jsonl", [{"q": f"{n}+1=", "a": f"{n + 1}"} for n in range(40)])
    return section(of_file(tmp_path / "*.jsonl", "json", 40), "{q}", "{a}", prepare="require")


def open_with(config, how=BY_THE_COMMAND):
    return tasks.sources("sft")(config, how)


def texts_of(config):
    """What is read of each pair."""
    train, _ = open_with(config)
    found = train.fetch(np.arange(len(train)), 0)["input_ids"].tolist()
    return [bytes(tokens).decode().rstrip("\0") for tokens in found]


def test_tokens_that_are_not_there_are_not_made_where_that_is_not_allowed(config):
    import datasets

    job = Preparation("largebatch prepare x")
    dry = replace(BY_THE_COMMAND, allowed="nothing")
    # The rows are there, but not their tokens.
    files = {"train": config.data.data_files.train, "validation": config.data.data_files.eval}
    datasets.load_dataset("json", data_files=files)
    for how in (job, dry):
        with pytest.raises(NotPrepared, match="run `largebatch prepare x`"):
            open_with(config, how)
    prepared, _ = open_with(config)
    train, _ = open_with(config, job)
    indices = np.arange(40)
    batch, expected = (source.fetch(indices, 0) for source in (train, prepared))
    assert all(batch[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("owner", "name"), [(text_rows, "rows_of"), (tasks.module("sft", "data").PairEncoder, "__call__")]
)
def test_a_process_that_is_killed_for_memory(owner, name, config, tmp_path, monkeypatch):
    """Of those that read rows, and of those that tokenize them."""
    # Each of two processes has a file.
    shutil.copy(tmp_path / "pairs.jsonl", tmp_path / "more.jsonl")
    parent = os.getpid()
    original = getattr(owner, name)

    def end(*arguments):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    monkeypatch.setattr(owner, name, end)
    with pytest.raises(DataError, match=r"data was killed, perhaps for lack of memory; write fewer --workers"):
        open_with(config)


def test_columns_of_parquet_are_as_python_writes_them(tmp_path):
    """As pandas writes them, a whole number beside a missing one is a decimal."""
    columns = {
        "text": ["00001", "NA", " é"],
        "whole": [7, -1, 10**18],
        "missing": [1.0, None, 3.0],
        "decimal": [0.5, 3e5, math.nan],
        "single": pyarrow.array([0.1, 2, 1.5], pyarrow.float32()),
        "rate": [Decimal("0E-9"), Decimal("1E-9"), None],
        "amount": [Decimal("0.50"), Decimal("10.00"), Decimal("11.00")],
    }
    others = {"is": [True] * 3, "time": [datetime(2024, 1, 5, tzinfo=UTC)] * 3}
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(columns | others), file)
    data = of_file(file, "parquet", 3)
    assert texts_of(section(data, "{text}|{whole}|{missing}|{decimal}|{single}|{rate}|", "{amount}")) == [
        "00001|7|1.0|0.5|0.10000000149011612|0.000000000|0.50",
        "NA|-1||300000.0|2.0|0.000000001|10.00",
        " é|1000000000000000000|3.0|nan|1.5||11.00",
    ]
    for name in others:
        with pytest.raises(DataError, match=f"the column '{name}' has .*, neither text nor a number"):
            open_with(section(data, f"{{{name}}}", "{text}"))


def test_what_only_folders_are_named_is_no_column(tmp_path):
    """In Spark's layout, in folders of parts."""
    folder = tmp_path / "spark" / "lang=de"
    folder.mkdir(parents=True)
    for number in range(2):
        parquet.write_table(pyarrow.table({"text": [f"{number}"]}), folder / f"part-{number}.parquet")
    data = of_file(tmp_path / "spark", "parquet", 2)
    assert texts_of(section(data, "{text}", "{text}")) == ["00", "11"]
    with pytest.raises(DataError, match=r"data\.prompt: no column 'lang'; the data has 'text'"):
        open_with(section(data, "{lang}", "{text}"))


def test_text_of_parquet_that_is_not_utf8_is_a_sentence(tmp_path):
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array([b"caf\xe9"]).view(pyarrow.string())}), file)
    with pytest.raises(DataError, match=r"^data: a text cannot be read: 'utf-8' codec can't decode byte 0xe9"):
        open_with(section(of_file(file, "parquet"), "{text}", "{text}"))
