"""Text in every format that can be read, alone and mixed, against a plain loop over the documents."""

import bz2
import csv
import gzip
import io
import json
import lzma
import zipfile

import datasets
import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

import tasks
from largebatch.data import hub, preparation, prepared
from largebatch.data.preparation import NotPrepared
from megatron_files import write as write_megatron
from paths import PYDOC
from small_data import load_with, of_file

BLOCK = 8
DOCUMENTS = {
    "train": [f"Ünï {number} " + "abc " * (number % 7) for number in range(60)],
    "eval": [f"held out {number}" for number in range(20)],
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "HF_HOME", str(tmp_path / "cache"))


def json_lines(documents):
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


def write_csv(path, documents):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *([text] for text in documents)])


WRITERS = {
    "parquet": lambda path, documents: parquet.write_table(pyarrow.table({"text": documents}), path),
    "jsonl.zst": lambda path, documents: path.write_bytes(zstandard.compress(json_lines(documents))),
    "csv": write_csv,
    "txt": lambda path, documents: path.write_text("\n".join(documents), encoding="utf-8"),
    "megatron": lambda path, documents: write_megatron(
        path, "H", [[*text.encode(), 0] for text in documents], list(range(len(documents) + 1))
    ),
}
BUILDERS = {"jsonl.zst": "json", "txt": "text"}


def source(kind, folder):
    """Two training files and one evaluation file of a kind, and the fields that read them."""
    halves = {"train_1": DOCUMENTS["train"][:25], "train_2": DOCUMENTS["train"][25:], "eval": DOCUMENTS["eval"]}
    for name, documents in halves.items():
        WRITERS[kind](folder / name if kind == "megatron" else folder / f"{name}.{kind}", documents)
    if kind == "megatron":
        return {"source": "megatron", "train": f"{folder}/train_*", "eval": str(folder / "eval")}
    names = [f"{folder}/{name}.{kind}" for name in halves]
    return {"path": BUILDERS.get(kind, kind), "data_files": {"train": names[:2], "eval": f"{folder}/ev*.{kind}"}}


def blocks_of(split):
    """The samples, by hand."""
    tokens = b"".join(text.encode() + b"\0" for text in DOCUMENTS[split])
    return [list(tokens[start : start + BLOCK]) for start in range(0, len(tokens) - BLOCK, BLOCK)]


def sizes(sources=1):
    return {f"num_{split}_samples": sources * len(blocks_of(split)) for split in DOCUMENTS}


def config_of(**section):
    shared = {"source": "datasets", "tokenizer": "bytes", "block_size": BLOCK, **sizes()}
    return load_with(PYDOC, shared | section, "--batch.global_batch_size=24")


def opened(**section):
    return tasks.sources("causal_lm")(config_of(**section))


def zip_of(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.jsonl", content)
    return file.getvalue()


COMPRESSORS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
    "zip": zip_of,
}


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_what_compressed_files_hold_is_what_a_job_may_prepare(kind, tmp_path, monkeypatch):
    """A byte may hold a thousand; the files are not read to their ends."""
    row = json_lines(["x" * 2**18])
    large = tmp_path / f"large.jsonl.{kind}"
    small = tmp_path / f"small.jsonl.{kind}"
    large.write_bytes(COMPRESSORS[kind](row * 64))
    small.write_bytes(COMPRESSORS[kind](row))
    assert large.stat().st_size < 2**18
    monkeypatch.setattr(hub, "MAX_BYTES_IN_A_JOB", 2**21)
    monkeypatch.setattr(preparation, "MAX_BYTES_IN_A_JOB", 2**21)
    with monkeypatch.context() as unprepared:
        unprepared.setattr(datasets.DatasetBuilder, "download_and_prepare", None)
        with pytest.raises(NotPrepared, match=r"data\.prepare: (2|3|32)\.\d MiB would have to be prepared"):
            opened(**of_file(large, "json") | sizes())
    if kind != "zip":
        assert len(opened(**of_file(small, "json") | sizes())[0]) == sizes()["num_train_samples"]


def test_all_formats_in_one_mixture(tmp_path):
    num_kinds = len(WRITERS)
    sources = []
    for kind in WRITERS:
        (tmp_path / kind).mkdir()
        sources.append({"name": kind, "weight": 1, **sizes(), **source(kind, tmp_path / kind)})
    train, evaluation = opened(sources=sources, **sizes(num_kinds))
    # An evaluation index counts through the sources; a training index is a draw and a source.
    found = evaluation.fetch(np.arange(len(evaluation)), None)["input_ids"].tolist()
    assert found == blocks_of("eval") * num_kinds
    for number in range(num_kinds):
        draws = np.arange(len(blocks_of("train"))) * num_kinds + number
        found = train.fetch(draws, 0)["input_ids"].tolist()
        assert sorted(found) == sorted(blocks_of("train"))
        assert found != blocks_of("train")
