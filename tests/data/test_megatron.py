"""Megatron's files, as its own documentation describes them, written here byte by byte."""

import json
import struct

import numpy as np
import pytest

import tasks
from largebatch.config import load_config
from largebatch.data.megatron import open_megatron
from largebatch.errors import DataError
from megatron_files import SEQUENCES, write
from paths import PYDOC

HEADER_BYTES = 34


@pytest.mark.parametrize("kind", ["B", "h", "H", "i", "q"])
def test_tokens_and_documents(tmp_path, kind):
    stream = open_megatron([write(tmp_path / "corpus", kind)], "data.train", 256)
    assert stream.read(0, len(stream)).tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255, 0]
    documents = [stream.read_document(number, 100).tolist() for number in range(stream.num_documents)]
    assert documents == [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14, 255, 0]]
    assert stream.lengths().tolist() == [3, 5, 4]


def test_tokens_beyond_the_vocabulary_are_refused_when_they_are_read(tmp_path):
    stream = open_megatron([write(tmp_path / "corpus")], "data.train", 255)
    assert stream.read(0, 10)[-1] == 14
    with pytest.raises(
        DataError, match=r"the data has token 255, but data\.tokenizer has only 255; write the tokenizer"
    ):
        stream.read(0, 11)
    with pytest.raises(DataError, match="token 255"):
        stream.read_document(2, 100)
    negative = open_megatron([write(tmp_path / "negative", "b", [[1, -3]], [0, 1])], "data.train", 255)
    with pytest.raises(DataError, match="token -3"):
        negative.read(0, 2)


def damage_of(name):
    def change(prefix):
        index = prefix.with_suffix(".idx")
        tokens = prefix.with_suffix(".bin")
        content = index.read_bytes()
        match name:
            case "no index":
                index.unlink()
            case "no tokens":
                tokens.unlink()
            case "older":
                index.write_bytes(b"TNTIDX\x00\x00" + content[8:])
            case "short header":
                index.write_bytes(content[:20])
            case "cut index":
                index.write_bytes(content[:-8])
            case "cut tokens":
                tokens.write_bytes(tokens.read_bytes()[:-2])
            case "other tokens":
                tokens.write_bytes(bytes(1000))
            case "floats":
                index.write_bytes(content[:17] + b"\x07" + content[18:])
            case "pointer" | "odd pointer" | "negative pointer":
                place = HEADER_BYTES + 4 * len(SEQUENCES) + 8 * 2
                value = {"pointer": 2**60, "odd pointer": 9, "negative pointer": -8}[name]
                index.write_bytes(content[:place] + struct.pack("<q", value) + content[place + 8 :])
            case "size":
                place = HEADER_BYTES + 4
                index.write_bytes(content[:place] + struct.pack("<i", -1) + content[place + 4 :])
            case "boundary far away" | "negative boundary" | "boundaries in another order":
                documents = {"b": [0, 10**9, 3, 5], "n": [0, -1, 3, 5]}.get(name[0], [0, 3, 1, 5])
                documents = [0, 3, 1, 5] if "order" in name else documents
                write(prefix, documents=documents)
            case "end missing":
                write(prefix, documents=[0, 1, 3])
            case "empty":
                write(prefix, sequences=[], documents=[0])

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("no index", r"data\.train: there is no .*corpus\.idx .*without \.bin or \.idx"),
        ("no tokens", r"data\.train: there is no .*corpus\.bin"),
        ("older", r"corpus\.idx is not an index of Megatron's format"),
        ("short header", r"is not an index of Megatron's format"),
        ("cut index", "do not fit each other"),
        ("cut tokens", "do not fit each other"),
        ("other tokens", "do not fit each other"),
        ("floats", "has version 1 and type code 7, not 1 and one of"),
        ("pointer", "do not fit each other"),
        ("odd pointer", "do not fit each other"),
        ("negative pointer", "do not fit each other"),
        ("size", "do not fit each other"),
        ("boundary far away", "do not fit each other"),
        ("negative boundary", "do not fit each other"),
        ("boundaries in another order", "do not fit each other"),
        ("end missing", "do not fit each other"),
        ("empty", "do not fit each other, or are damaged or empty"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, damage, words):
    prefix = tmp_path / "corpus"
    write(prefix)
    damage_of(damage)(prefix)
    with pytest.raises(DataError, match=words):
        open_megatron([str(prefix)], "data.train", 256)


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
def test_a_recipe_reads_them(tmp_path, task):
    prefix = write(tmp_path / "corpus", sequences=[list(range(1, 41))], documents=[0, 1])
    data = {"source": "megatron", "train": prefix, "eval": prefix, "tokenizer": "bytes", "block_size": 8}
    data |= {"num_train_samples": 4, "num_eval_samples": 2}
    recipe = PYDOC if task == "causal_lm" else PYDOC.parents[1] / "masked_lm/bert_pydoc.json"
    words = ["--data", json.dumps(data), '--batch={"global_batch_size": 2, "micro_batch_size": 1}']
    config = load_config(recipe, [*words, "--train.duration.epochs=20"])
    train, evaluation = tasks.sources(task)(config)
    assert (len(train), train.num_available, len(evaluation)) == (4, 4, 2)
    batch = train.fetch(np.array([1]), 0)
    if task == "causal_lm":
        assert batch["input_ids"].tolist() == [[*range(9, 17)]]
        assert batch["labels"].tolist() == [[*range(10, 18)]]
    else:
        predicted = batch["labels"] != -100
        assert batch["labels"][predicted].tolist() == [9 + int(place) for place in predicted[0].nonzero()]


def test_documents_without_tokens_predict_nothing(tmp_path):
    prefix = write(tmp_path / "corpus", sequences=[[5, 6, 0], [], [7, 8, 9, 0]], documents=[0, 1, 2, 3])
    train, _ = sources_of(prefix, samples="documents", num_train_samples=3, num_eval_samples=1)
    batch = train.fetch(np.array([0, 1, 2]), 0)
    assert batch["input_ids"].tolist() == [[5, 6, 0], [0, 0, 0], [7, 8, 9]]
    assert batch["labels"].tolist() == [[6, 0, -100], [-100, -100, -100], [8, 9, 0]]


def test_documents_are_kept_apart_only_if_they_have_ends(tmp_path):
    ended = write(tmp_path / "ended", sequences=[[5, 6, 7, 8, 0], [9, 10, 11, 0]], documents=[0, 1, 2])
    train, _ = sources_of(ended, attention="document", block_size=4)
    assert train.fetch(np.array([1]), 0)["position_ids"].tolist() == [[0, 0, 1, 2]]
    other = write(tmp_path / "other", sequences=[[5, 6, 7, 8, 3], [9, 10, 11, 0]], documents=[0, 1, 2])
    with pytest.raises(DataError, match=r"data\.attention: the first document of .* does not end with token 0"):
        sources_of(other, attention="document", block_size=4)


def sources_of(prefix, **changes):
    data = {"source": "megatron", "train": prefix, "eval": prefix, "tokenizer": "bytes", "block_size": 8}
    data |= {"num_train_samples": 2, "num_eval_samples": 1} | changes
    words = ["--data", json.dumps(data), '--batch={"global_batch_size": 1, "micro_batch_size": 1}']
    more = ['--train.duration={"steps": 9}', "--learning_rate.warmup=null"]
    return tasks.sources("causal_lm")(load_config(PYDOC, [*words, *more]))


def test_more_sequences_than_there_can_be(tmp_path):
    write(tmp_path / "corpus")
    index = (tmp_path / "corpus.idx").read_bytes()
    (tmp_path / "corpus.idx").write_bytes(index[:18] + struct.pack("<Q", 2**63) + index[26:])
    with pytest.raises(DataError, match="do not fit each other"):
        open_megatron([str(tmp_path / "corpus")], "data.train", 256)


def test_a_vocabulary_without_all_bytes_is_refused():
    config = load_config(PYDOC, ["--model.vocab_size=100"])
    with pytest.raises(DataError, match=r"model\.vocab_size: 100 is below the 256 tokens of 'bytes'"):
        tasks.sources("causal_lm")(config)
