"""Tokens that are prepared once: equal to what a plain loop makes, whoever prepares them and however often it fails."""

import errno
import json
import os
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import CTRLTokenizer, PreTrainedTokenizerFast

from largebatch.data import prepared
from largebatch.data.preparation import Preparation
from largebatch.data.prepared import OtherPartsMissing, open_prepared, prepared_splits
from largebatch.data.token_stream import MAX_MAPS, Part, TokenStream, mapped
from largebatch.data.tokenizer import ByteTokenizer, PretrainedTokenizer
from largebatch.errors import DataError, StorageError
from largebatch.storage import files
from paths import PYDOC
from small_data import load_with, of_file, rows_in

ASKED_FOR = Preparation("largebatch prepare x", allowed="everything", num_workers=1)
BY_TWO = replace(ASKED_FOR, num_workers=2)


@pytest.fixture(autouse=True)
def small_shards(tmp_path, monkeypatch):
    """A few hundred bytes of text in each shard, in a cache of its own."""
    monkeypatch.setattr(prepared, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(prepared, "MIN_SHARD_BYTES", 300)
    monkeypatch.setattr(prepared, "BYTES_AT_ONCE", 100)


def documents_of(split):
    random = np.random.default_rng(len(split))
    texts = ["".join(map(chr, random.integers(97, 123, size))) for size in random.integers(0, 90, 120)]
    return [*texts[:50], None, "Ünï ✓", *texts[50:]]


def write_documents(file, texts):
    return rows_in(file, [{"text": text, "other": "x"} for text in texts])


@pytest.fixture
def section(tmp_path):
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "eval")}
    for split, file in files.items():
        section = write_documents(Path(file), documents_of(split))
    return section | {"data_files": files}


def data_of(section, **changes):
    return load_with(PYDOC, {"tokenizer": "bytes", "block_size": 8} | section | changes).data


def prepare(data, how=ASKED_FOR, tokenizer=None):
    return open_prepared(data, tokenizer or ByteTokenizer(), how)


def folders_of(data, tokenizer=None):
    """Those of the tokens for training and for evaluation."""
    return [split.folder for split in prepared_splits(data, tokenizer or ByteTokenizer(), Preparation())]


def folder_of(data):
    return folders_of(data)[0]


def times_of(paths):
    return {path: path.stat().st_mtime_ns for path in paths}


def bytes_of(stream):
    return bytes(stream.read(0, len(stream)).tolist())


def plain(split):
    """What the tokens are, by one line of code."""
    return b"".join((text or "").encode() + b"\0" for text in documents_of(split))


def in_parts(data):
    """The parts of an array, of which the last to end finds all."""
    for part in (2, 0):
        with pytest.raises(OtherPartsMissing):
            prepare(data, replace(ASKED_FOR, part=part, num_parts=3))
    return prepare(data, replace(ASKED_FOR, part=1, num_parts=3))


@pytest.mark.parametrize("way", ["in this process", "by two processes", "in parts"])
def test_the_tokens_are_those_of_a_plain_loop(section, way):
    data = data_of(section)
    how = BY_TWO if way == "by two processes" else ASKED_FOR
    streams = in_parts(data) if way == "in parts" else prepare(data, how)
    for split, stream in zip(("train", "eval"), streams, strict=True):
        assert bytes_of(stream) == plain(split)
    manifest = json.loads((folder_of(data) / "manifest.json").read_text())
    assert len(manifest["shards"]) > 10
    assert (manifest["documents"], manifest["tokens"]) == (122, len(plain("train")))
    assert not list(folder_of(data).glob(".*"))


def test_documents_without_text_are_counted(section, capsys):
    prepare(data_of(section))
    told = re.findall(r"tokens, (\d+) of (\d+) documents without text", capsys.readouterr().out)
    empty = [not text for split in ("train", "eval") for text in documents_of(split)]
    assert sum(int(number) for number, _ in told) == sum(empty) > 1
    assert all(0 < int(number) <= int(of) for number, of in told)


def test_what_is_prepared_is_neither_opened_nor_made_again(section, monkeypatch):
    data = data_of(section)
    prepare(data)
    before = times_of(folder_of(data).iterdir())
    monkeypatch.setattr(prepared, "open_splits", None)
    train, _ = prepare(data)
    assert bytes_of(train) == plain("train")
    assert times_of(folder_of(data).iterdir()) == before


def test_other_data_has_another_folder(section):
    data = data_of(section)
    others = [data_of(section, text_column="other"), data_of(section, train_split="train[:50%]")]
    folders = {folder_of(each) for each in (data, *others)}

    class Other(ByteTokenizer):
        fingerprint = "other"

    folders.add(folders_of(data, Other())[0])
    _, evaluation = folders_of(data)
    with Path(section["data_files"]["train"]).open("a") as file:
        file.write('{"text": "more"}')
    folders.add(folder_of(data))
    assert len(folders) == 5
    # Each split belongs to its own files.
    assert folders_of(data)[1] == evaluation
    # Neither samples nor processes are part of what is prepared.
    assert folder_of(data_of(section, block_size=4, num_train_samples=5, num_workers=2)) in folders
    train, _ = prepare(data)
    assert bytes_of(train) == plain("train") + b"more\0"


def test_shards_of_other_data_are_made_again(section):
    """Data on the hub may change between two calls, and its files are not here to be looked at."""
    data = data_of(section)
    prepare(data)
    folder = folder_of(data)
    (folder / "manifest.json").unlink()
    record = json.loads((folder / "00003.json").read_text())
    record["rows"][1] += 1
    (folder / "00003.json").write_text(json.dumps(record))
    (folder / "00003.tokens").write_bytes(b"x")
    train, _ = prepare(data)
    assert bytes_of(train) == plain("train")


def test_what_was_prepared_with_ends_of_documents_is_read(section):
    data = data_of(section)
    prepare(data)
    file = folder_of(data) / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["shards"][0]["files"]["ends"] = {"size": 8, "checksum": "0"}
    file.write_text(json.dumps(manifest))
    stream, _ = prepare(data, Preparation(verify_checksums=True))
    assert bytes_of(stream) == plain("train")


def test_damage_is_found(section):
    data = data_of(section)
    prepare(data)
    file = folder_of(data) / "00002.tokens"
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    prepare(data)
    with pytest.raises(DataError, match=r"00002\.tokens is damaged; remove its folder, and prepare the data again"):
        prepare(data, replace(ASKED_FOR, verify_checksums=True))
    file.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"00002\.tokens is damaged"):
        prepare(data)


@pytest.mark.parametrize(("num_writes", "how"), [(6, ASKED_FOR), (9, ASKED_FOR), (6, BY_TWO)])
def test_a_full_disk_is_told_and_work_goes_on_after_room_is_made(section, monkeypatch, num_writes, how):
    """In a file of tokens, or in the JSON of a shard."""
    data = data_of(section)
    write = files.os.write
    written = []

    def full(descriptor, content):
        if len(written) >= num_writes and full.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(len(content))
        return write(descriptor, content)

    full.is_full = True
    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(StorageError, match=r"cannot be written: .*No space left.*the same command tries again"):
        prepare(data, how)
    folder = folder_of(data)
    finished = times_of(folder.glob("*.json"))
    assert finished
    # Of two processes, the one that had room is ended in the middle of a file, which goes later.
    assert how is BY_TWO or not list(folder.glob(".*"))
    full.is_full = False
    train, _ = prepare(data)
    assert bytes_of(train) == plain("train")
    assert times_of(finished) == finished


def test_leftovers_of_a_killed_process_go_when_nobody_writes_them(section):
    data = data_of(section)
    folder = folder_of(data)
    folder.mkdir(parents=True)
    old = folder / ".00000.aaaa.tmp"
    new = folder / ".00000.bbbb.tmp"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    # As one that another process completes just now: it is listed, but gone.
    (folder / ".00000.cccc.tmp").symlink_to("gone")
    prepare(data)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(
    ("limit", "rule", "words"),
    [
        (0, None, r"data\.prepare: 0\.0 MiB would have to be prepared while this job's devices wait; run `largebatch"),
        (0, "allow", None),
        (2**30, "require", r"data\.prepare: 0\.0 MiB would have to be prepared.*or write \"allow\""),
    ],
)
def test_what_a_job_may_prepare(section, monkeypatch, limit, rule, words):
    monkeypatch.setattr("largebatch.data.preparation.MAX_BYTES_IN_A_JOB", limit)
    data = data_of(section, prepare=rule)
    by_a_job = Preparation("largebatch prepare x")
    if words:
        with pytest.raises(DataError, match=words):
            prepare(data, by_a_job)
        assert not folder_of(data).exists()
        prepare(data)
    assert bytes_of(prepare(data, by_a_job)[0]) == plain("train")


def prepare_parquet(folder, *row_groups):
    """Prepare a Parquet file with a column "text"."""
    tables = [pyarrow.table({"text": texts}) for texts in row_groups]
    with parquet.ParquetWriter(folder / "data.parquet", tables[-1].schema) as writer:
        for table in tables:
            writer.write_table(table.cast(writer.schema))
    return prepare(data_of(of_file(folder / "data.parquet", "parquet")))


def test_a_column_that_is_not_text(tmp_path):
    with pytest.raises(DataError, match=r"data\.text_column: the column 'text' has .*int64.*not text"):
        prepare_parquet(tmp_path, [1, 2])


def test_a_parquet_file_whose_first_row_group_is_empty(tmp_path):
    train, _ = prepare_parquet(tmp_path, [], ["one", "two"])
    assert bytes_of(train) == b"one\0two\0"


def test_documents_in_memory_are_bounded_however_their_lengths_vary(section):
    """Many short ones beside a few long ones: as many bytes at once as of documents of equal length."""
    texts = ["a" * (500 if number % 40 == 39 else 2) for number in range(400)]
    write_documents(Path(section["data_files"]["train"]), texts)
    asked = []

    class Watched(ByteTokenizer):
        def encode(self, documents):
            asked.append(documents)
            return super().encode(documents)

    stream, _ = prepare(data_of(section), tokenizer=Watched())
    assert bytes_of(stream) == b"".join(text.encode() + b"\0" for text in texts)
    assert max(sum(len(document or "") for document in documents) for documents in asked) <= 100 + 500


def test_a_readme_in_a_folder_is_not_data(tmp_path, section):
    data = data_of(section | {"data_files": None, "path": str(tmp_path)})
    before = folder_of(data)
    (tmp_path / "README.md").write_text("About.")
    assert folder_of(data) == before
    (tmp_path / "more.jsonl").write_text("{}")
    assert folder_of(data) != before


def test_the_last_shard_may_be_seen_before_the_manifest_is_written(section):
    """A task of an array has ended between the two; a job that may prepare nothing completes it."""
    data = data_of(section, prepare="require")
    prepare(data)
    for folder in folders_of(data):
        (folder / "manifest.json").unlink()
    stream, _ = prepare(data, Preparation())
    assert bytes_of(stream) == plain("train")


def test_damaged_tokens_of_the_same_size_are_refused_when_they_are_read(section):
    data = data_of(section)
    stream, _ = prepare(data)
    file = folder_of(data) / "00000.tokens"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(
        DataError, match=r"the data has token 65535, but data.tokenizer has only 256; .* if it is damaged"
    ):
        stream.read(0, 5)


def test_files_stay_open_up_to_a_number(tmp_path):
    paths = [tmp_path / f"{number}.tokens" for number in range(MAX_MAPS + 50)]
    for path in paths:
        path.write_bytes(b"\x01\x00")
    stream = TokenStream([Part(1, partial(mapped, path, "<u2")) for path in paths])
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert stream.read(0, len(paths)).tolist() == [1] * len(paths)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + MAX_MAPS


def test_text_that_is_not_utf8(tmp_path):
    with pytest.raises(DataError, match=r"data\.text_column: rows 0 to 0: .* correct or remove that text"):
        prepare_parquet(tmp_path, pyarrow.array([b"\xff\xfe"]).view(pyarrow.string()))


def test_a_slow_tokenizer_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "l": 1, "o": 2, "lo": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nl o\n")
    CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), eos_token="<unk>").save_pretrained(
        tmp_path
    )
    with pytest.raises(DataError, match="is a CTRLTokenizer, which is not a fast tokenizer"):
        PretrainedTokenizer(str(tmp_path))


def opened(folder, model, unk_token=None, special=()):
    """The tokenizer of a model, read from a folder."""
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([*special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token=unk_token)
    fast.save_pretrained(folder)
    return PretrainedTokenizer(str(folder))


def letters(unk_token):
    return models.BPE({"a": 0, "<end>": 1, "<unk>": 2}, [], unk_token=unk_token)


@pytest.mark.parametrize("named", [None, "<unk>"])
def test_a_tokenizer_that_leaves_out_what_it_does_not_know_is_refused(named, tmp_path):
    """Its model decides, and not what it is named."""
    with pytest.raises(DataError, match="leaves out characters that it does not know; use one with an unknown token"):
        opened(tmp_path, letters(None), named)
    assert opened(tmp_path, letters("<unk>"), "<unk>").encode(["aé"]) == [[0, 2, 1]]


def test_special_tokens_in_a_text(tmp_path):
    special = AddedToken("<word>", special=True, single_word=True), AddedToken('<|"|>', special=True)
    tokenizer = opened(tmp_path, letters("<unk>"), "<unk>", special)
    texts = ["a <word> a", "a<word>a", 'a<|"|>a', "a<end>", "a<en", ""]
    found = [tokenizer.special_token_in(text) for text in texts]
    assert found == ["<word>", None, '<|"|>', "<end>", None, None]
    read = [not {3, 4, 1}.isdisjoint(tokens) for *tokens, _ in tokenizer.encode(texts)]
    assert read == [token is not None for token in found]


def test_special_tokens_that_are_normalized(tmp_path):
    """They are read in other spellings, and only as the tokenizer normalizes them."""
    backend = Tokenizer(letters("<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<END>", normalized=True), AddedToken("<Stop>", normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path)
    tokenizer = PretrainedTokenizer(str(tmp_path))
    texts = ["a<eNd>a", "a<END>", "<Stop>", "<stop>", "<STOP>", "a"]
    found = [tokenizer.special_token_in(text) is not None for text in texts]
    assert found == [True, True, True, False, False, False]
    assert found == [not {1, 3, 4}.isdisjoint(tokens) for *tokens, _ in tokenizer.encode(texts)]


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("tokenizer_config.json", {"split_special_tokens": True}, "splits its special tokens; remove split_special"),
        ("tokenizer.json", {"model": {"dropout": 0.1}}, 'differently each time; write "dropout": null'),
    ],
)
def test_a_tokenizer_that_splits_texts_at_random_or_special_tokens_is_refused(file, change, told, tmp_path):
    opened(tmp_path, letters("<unk>"), "<unk>")
    content = json.loads((tmp_path / file).read_text())
    content |= {key: content[key] | value if isinstance(value, dict) else value for key, value in change.items()}
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(DataError, match=told):
        PretrainedTokenizer(str(tmp_path))


def test_a_token_that_only_the_configuration_names_special(tmp_path):
    backend = Tokenizer(letters("<unk>"))
    backend.add_tokens(["<stop>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"additional_special_tokens": ["<stop>"]}))
    tokenizer = PretrainedTokenizer(str(tmp_path))
    assert tokenizer.special_tokens[-1] == 3
    assert tokenizer.special_token_in("a<stop>") == "<stop>"


def test_a_tokenizer_that_fails_for_what_it_does_not_know_loses_nothing(tmp_path):
    assert opened(tmp_path, models.WordLevel({"a": 0, "<end>": 1}, unk_token="<unk>")).encode(["a"]) == [[0, 1]]


def written(tmp_path, changed, usual="a" * 40):
    """A section of 90 documents, and a tokenizer of "a" with special tokens: <end> is 1, <unk> 2 and <word> 3."""
    texts = [changed.get(row, usual) for row in range(90)]
    tokenizer = opened(tmp_path / "tokenizer", letters("<unk>"), "<unk>", [AddedToken("<word>", special=True)])
    return data_of(write_documents(tmp_path / "text.jsonl", texts)), tokenizer


def test_special_tokens_in_documents_are_told(tmp_path):
    texts = dict.fromkeys((20, 50, 51), "a<word>a<word>")
    data, tokenizer = written(tmp_path, texts | {60: "a<end>a", 70: "<unk>é", 80: None})
    # What is prepared is told again when it is opened.
    for how in (BY_TWO, Preparation(allowed="nothing")):
        train, evaluation = prepare(data, how, tokenizer)
        percent = f"{100 * 2 / (84 * 40 + 3 * 4 + 3 + 2 + 90):.3g}"
        told = "<word> in 3 documents (the first is row 20), <end> in 1 document (the first is row 60)"
        told += f", <unk> in 1 document (the first is row 70), {percent} % of tokens"
        assert train.remark == f"train: read as special tokens: {told}"
        assert evaluation.remark == f"validation: read as special tokens: {told}"
    assert prepare(written(tmp_path / "usual", {})[0], tokenizer=tokenizer)[0].remark is None


def test_a_tokenizer_that_does_not_know_the_text_is_refused(tmp_path):
    data, tokenizer = written(tmp_path, {}, "éa")
    # With their ends, a third of the tokens.
    told = prepare(data, tokenizer=tokenizer)[0].remark
    assert told.endswith("<unk> in 90 documents (the first is row 0), 33.3 % of tokens")
    data, tokenizer = written(tmp_path / "other", {5: "a"}, "éé")
    with pytest.raises(DataError, match=r"data\.tokenizer: it does not know the text of train: <unk> in 89 docum"):
        prepare(data, tokenizer=tokenizer)
