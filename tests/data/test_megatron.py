"""Megatron's files, as its own documentation describes them, written here byte by byte."""

import os
import struct

import numpy as np
import pytest

import tasks
from largebatch.data.megatron import open_megatron
from largebatch.errors import DataError
from megatron_files import SEQUENCES, write
from paths import BERT, PYDOC
from small_data import load_with


def opened(prefix, vocab_size=256):
    return open_megatron([str(prefix)], "data.train", vocab_size)


@pytest.mark.parametrize("kind", ["B", "h", "H", "i", "q"])
def test_tokens(tmp_path, kind):
    stream = opened(write(tmp_path / "corpus", kind))
    assert stream.read(0, len(stream)).tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255, 0]


@pytest.mark.parametrize("name", ["corpus[1]", "corpu*"])
def test_a_prefix_that_could_be_a_glob_is_itself(tmp_path, name):
    write(tmp_path / "corpus1", sequences=[[1]], documents=[0, 1])
    assert len(opened(write(tmp_path / name, sequences=[[2, 3]], documents=[0, 1]))) == 2


def test_tokens_beyond_the_vocabulary_are_refused_when_they_are_read(tmp_path):
    stream = opened(write(tmp_path / "corpus"), 255)
    assert stream.read(0, 10)[-1] == 14
    with pytest.raises(DataError, match=r"the data has token 255, but data\.tokenizer has only 255; write the"):
        stream.read(0, 11)
    with pytest.raises(DataError, match="token -3"):
        opened(write(tmp_path / "negative", "b", [[1, -3]], [0, 1])).read(0, 2)


def patched(place, kind, value):
    """Another number in the index."""

    def patch(index, _):
        content = bytearray(index.read_bytes())
        struct.pack_into(kind, content, place, value)
        index.write_bytes(content)

    return patch


def written(**other):
    return lambda index, _: write(index.with_suffix(""), **other)


# A header of 34 bytes, sizes, pointers, and documents.
DAMAGES = {
    "no index": (lambda index, _: index.unlink(), r"data\.train: there is no .*corpus\.idx .*without \.bin or \.idx"),
    "no tokens": (lambda _, tokens: tokens.unlink(), r"data\.train: there is no .*corpus\.bin"),
    "pointer of Git LFS": (
        lambda _, tokens: tokens.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"),
        r"data\.train: .*corpus\.bin only points to a file in Git LFS; run `git lfs pull`",
    ),
    "older": (patched(0, "<8s", b"TNTIDX\0\0"), r"corpus\.idx is not an index of Megatron's format"),
    "short header": (lambda index, _: os.truncate(index, 20), "is not an index of Megatron's format"),
    "floats": (patched(17, "<B", 7), "has version 1 and type code 7, not 1 and one of"),
    "cut index": (lambda index, _: os.truncate(index, index.stat().st_size - 8), "do not fit each other"),
    "cut tokens": (lambda _, tokens: os.truncate(tokens, 22), "do not fit each other"),
    "more sequences than there can be": (patched(18, "<Q", 2**63), "do not fit each other"),
    "size": (patched(34 + 4, "<i", -1), "do not fit each other"),
    "pointer": (patched(34 + 4 * len(SEQUENCES) + 8 * 2, "<q", 9), "do not fit each other"),
    "documents in another order": (written(documents=[0, 3, 1, 5]), "do not fit each other"),
    "end missing": (written(documents=[0, 1, 3]), "do not fit each other"),
    "empty": (written(sequences=[], documents=[0]), "do not fit each other, or are damaged or empty"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_cannot_be_used(tmp_path, name):
    damage, words = DAMAGES[name]
    prefix = tmp_path / "corpus"
    write(prefix)
    damage(prefix.with_suffix(".idx"), prefix.with_suffix(".bin"))
    with pytest.raises(DataError, match=words):
        opened(prefix)


def sources_of(prefix, recipe=PYDOC, **changes):
    data = {"source": "megatron", "train": prefix, "eval": prefix, "tokenizer": "bytes", "block_size": 8}
    data |= {"num_train_samples": 2, "num_eval_samples": 1} | changes
    return tasks.sources(recipe.parent.name)(load_with(recipe, data))


@pytest.mark.parametrize(("recipe", "first"), [(PYDOC, 10), (BERT, 9)])
def test_a_recipe_reads_them(recipe, first, tmp_path):
    prefix = write(tmp_path / "corpus", sequences=[list(range(1, 41))], documents=[0, 1])
    train, evaluation = sources_of(prefix, recipe)
    assert (len(train), train.num_available, len(evaluation)) == (2, 4, 1)
    batch = train.fetch(np.array([1]), 0)
    predicted = batch["labels"] != -100
    assert batch["labels"][predicted].tolist() == [first + int(place) for place in predicted[0].nonzero()]


@pytest.mark.parametrize(
    ("sequences", "documents"),
    [
        ([b"abcd\0", b"xyz\0"], [0, 1, 2]),
        # Of two sequences, the first of which ends otherwise.
        ([b"abc", b"d\0", b"xyz\0"], [0, 2, 3]),
        ([b"", b"abcd\0", b"xyz\0"], [0, 1, 2, 3]),
    ],
)
def test_documents_that_have_ends_are_kept_apart(sequences, documents, tmp_path):
    prefix = write(tmp_path / "corpus", sequences=sequences, documents=documents)
    train, _ = sources_of(prefix, attention="document", block_size=4)
    assert train.fetch(np.array([1]), 0)["position_ids"].tolist() == [[0, 0, 1, 2]]


@pytest.mark.parametrize(
    ("sequences", "documents", "told"),
    [
        ([b"abcd!", b"xyz\0"], [0, 1, 2], "1 of 2"),
        ([b"abcd\0", b"x!", b"y!", b"z\0", b""], [0, 1, 2, 3, 4, 5], "2 of 4"),
        # Of two sequences, the first of which has an end; and one alone.
        ([b"ab\0", b"cd", b"xyz\0"], [0, 2, 3], "1 of 2"),
        ([b"abcd\0xyz!"], [0, 1], "1 of 1"),
    ],
)
def test_documents_without_ends_are_not_kept_apart(sequences, documents, told, tmp_path):
    good = write(tmp_path / "good", sequences=[b"abcdefgh\0"], documents=[0, 1])
    bad = write(tmp_path / "corpus", sequences=sequences, documents=documents)
    for files in ({"train": bad}, {"train": [good, bad]}, {"eval": bad}):
        with pytest.raises(DataError, match=rf"data\.attention: {told} compared documents of .*corpus do not end with"):
            sources_of(good, attention="document", block_size=4, **files)
