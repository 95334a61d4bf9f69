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
from small_data import load_with, rows_in

BY_THE_COMMAND = Preparation("largebatch prepare x", allowed="everything", num_workers=2)


@pytest.fixture
def config(tmp_path):
    data = rows_in(tmp_path / "pairs.jsonl", [{"q": f"{n}+1=", "a": f"{n + 1}"} for n in range(40)])
    data |= {"prompt": "{q}", "answer": "{a}", "tokenizer": "bytes", "block_size": 16, "prepare": "require"}
    return load_with(ADDITION, data | {"num_train_samples": 40, "num_eval_samples": 8})


def open_with(config, how):
    return tasks.sources("sft")(config, how)


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
    prepared, _ = open_with(config, BY_THE_COMMAND)
    train, _ = open_with(config, job)
    indices = np.arange(40)
    batches = [source.fetch(indices, 0) for source in (prepared, train)]
    assert all(batches[0][name].equal(batches[1][name]) for name in ("input_ids", "labels"))
    predicted = batches[0]["labels"][7]
    assert bytes(predicted[predicted >= 0].tolist()) == b"8\0"


@pytest.mark.parametrize("place", ["rows", "encoder"])
def test_a_process_that_is_killed_for_memory(place, config, tmp_path, monkeypatch):
    """Of those that read rows, and of those that tokenize them."""
    files = [str(shutil.copy(config.data.data_files.train, tmp_path / name)) for name in ("1.jsonl", "2.jsonl")]
    both = config.data.data_files.model_copy(update={"train": files})
    config = config.model_copy(update={"data": config.data.model_copy(update={"data_files": both})})
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
        open_with(config, BY_THE_COMMAND)


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
    data = {"source": "datasets", "path": "parquet", "data_files": dict.fromkeys(["train", "eval"], str(file))}
    data |= {"answer": "{text}", "tokenizer": "bytes", "block_size": 64, "num_train_samples": 3, "num_eval_samples": 3}
    prompt = "{text}|{whole}|{missing}|{decimal}"
    train, _ = open_with(load_with(ADDITION, data | {"prompt": prompt}), BY_THE_COMMAND)
    found = train.fetch(np.arange(3), 0)
    prompts = [
        bytes(tokens[: 1 + int((labels >= 0).nonzero()[0])]).decode()
        for tokens, labels in zip(found["input_ids"].tolist(), found["labels"], strict=True)
    ]
    assert prompts == ["00001|7|1.0|0.5", "NA|-1||300000.0", " é|1000000000000000000|3.0|0.1"]
    for name in others:
        with pytest.raises(DataError, match=f"the column '{name}' has .*, neither text nor a number"):
            open_with(load_with(ADDITION, data | {"prompt": f"{{{name}}}"}), BY_THE_COMMAND)


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
    files = dict.fromkeys(["train", "eval"], str(tmp_path / "spark/**/*.parquet"))
    data = {"source": "datasets", "path": "parquet", "data_files": files, "tokenizer": "bytes", "block_size": 64}
    data |= {"prompt": "{single}|{nan}|{rate}|", "answer": "{amount}", "num_train_samples": 4, "num_eval_samples": 4}
    train, _ = open_with(load_with(ADDITION, data), BY_THE_COMMAND)
    found = train.fetch(np.arange(4), 0)["input_ids"].tolist()
    texts = [bytes(tokens).decode().rstrip("\0") for tokens in found]
    first = "0.10000000149011612|nan|0.000000000|0.50"
    second = "2.0|1.5|0.000000001|"
    assert texts == [first, f"{second}10.00", first, f"{second}11.00"]
    with pytest.raises(DataError, match=r"data\.prompt: no column 'lang'; the data has single, nan"):
        open_with(load_with(ADDITION, data | {"prompt": "{lang}"}), BY_THE_COMMAND)


def test_text_of_parquet_that_is_not_utf8_is_a_sentence(tmp_path):
    latin = pyarrow.array([b"caf\xe9"])
    text = pyarrow.Array.from_buffers(pyarrow.string(), 1, latin.buffers())
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": text}), file)
    data = {"source": "datasets", "path": "parquet", "data_files": dict.fromkeys(["train", "eval"], str(file))}
    data |= {"prompt": "{text}", "answer": "{text}", "tokenizer": "bytes", "block_size": 64, "num_train_samples": 1}
    with pytest.raises(DataError, match=r"^data: a text cannot be read: 'utf-8' codec can't decode byte 0xe9"):
        open_with(load_with(ADDITION, data | {"num_eval_samples": 1}), BY_THE_COMMAND)
