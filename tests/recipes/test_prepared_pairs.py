"""Pairs of prompts and answers: their tokens are prepared once, and a job that may not make them says so."""

import math
import os
import shutil
import signal
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import numpy as np
import pandas
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
    predicted = batch["labels"][7]
    assert bytes(predicted[predicted >= 0].tolist()) == b"8\0"


@pytest.mark.parametrize("place", ["rows", "encoder"])
def test_a_process_that_is_killed_for_memory(place, config, tmp_path, monkeypatch):
    """Of those that read rows, and of those that tokenize them."""
    # Each of two processes has a file.
    shutil.copy(tmp_path / "pairs.jsonl", tmp_path / "more.jsonl")
    parent = os.getpid()
    encoder = tasks.module("sft", "data").PairEncoder
    killed = (encoder, "__call__") if place == "encoder" else (text_rows, "rows_of")
    original = getattr(*killed)

    def end(*arguments):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    monkeypatch.setattr(*killed, end)
    with pytest.raises(DataError, match=r"data was killed, perhaps for lack of memory; write fewer --workers"):
        open_with(config)


def test_columns_of_parquet_are_as_python_writes_them(tmp_path):
    """A whole number beside a missing one is a decimal in pandas, and in its file."""
    columns = {
        "text": ["00001", "NA", " é"],
        "whole": [7, -1, 10**18],
        "missing": [1, None, 3],
        "decimal": [0.5, 3e5, 0.1],
    }
    others = {"is": [True] * 3, "time": [datetime(2024, 1, 5, tzinfo=UTC)] * 3}
    file = tmp_path / "rows.parquet"
    pandas.DataFrame(columns | others).to_parquet(file)
    data = of_file(file, "parquet", 3)
    texts = texts_of(section(data, "{text}|{whole}|{missing}|{decimal}|", "{text}"))
    assert texts == ["00001|7|1.0|0.5|00001", "NA|-1||300000.0|NA", " é|1000000000000000000|3.0|0.1| é"]
    for name in others:
        with pytest.raises(DataError, match=f"the column '{name}' has .*, neither text nor a number"):
            open_with(section(data, f"{{{name}}}", "{text}"))


def test_other_numbers_of_parquet_and_sparks_layout(tmp_path):
    """Folders of parts, beside files that are none of the data's; what only folders are named is no column."""
    folder = tmp_path / "spark" / "lang=de"
    folder.mkdir(parents=True)
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.parquet.crc").write_bytes(b"crc")
    for number in range(2):
        amounts = [Decimal("0.50"), Decimal(f"1{number}.00")]
        columns = {
            "single": pyarrow.array([0.1, 2], pyarrow.float32()),
            "nan": pyarrow.array([math.nan, 1.5]),
            "amount": pyarrow.array(amounts, pyarrow.decimal128(10, 2)),
            "rate": pyarrow.array([Decimal("0E-9"), Decimal("1E-9")], pyarrow.decimal128(12, 9)),
        }
        parquet.write_table(pyarrow.table(columns), folder / f"part-{number}.parquet")
    data = of_file(tmp_path / "spark/**/*.parquet", "parquet", 4)
    texts = texts_of(section(data, "{single}|{nan}|{rate}|", "{amount}"))
    first = "0.10000000149011612|nan|0.000000000|0.50"
    second = "2.0|1.5|0.000000001|"
    assert texts == [first, f"{second}10.00", first, f"{second}11.00"]
    with pytest.raises(DataError, match=r"data\.prompt: no column 'lang'; the data has single, nan"):
        open_with(section(data, "{lang}", "{amount}"))


def test_text_of_parquet_that_is_not_utf8_is_a_sentence(tmp_path):
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array([b"caf\xe9"]).view(pyarrow.string())}), file)
    with pytest.raises(DataError, match=r"^data: a text cannot be read: 'utf-8' codec can't decode byte 0xe9"):
        open_with(section(of_file(file, "parquet"), "{text}", "{text}"))
