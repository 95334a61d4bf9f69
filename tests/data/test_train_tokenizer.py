"""A tokenizer from documents: any text comes back from it, and recipes can train with it."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

import tasks
from largebatch.config import load_config
from largebatch.tools.command_line import main
from paths import ADDITION, BERT, PYDOC

masked_sources = tasks.module("masked_lm", "data").sources
text_sources = tasks.module("causal_lm", "data").sources

TEXTS = ["the cat sat on the mat", "", "the other cat", "Ünï the 猫"] * 30


@pytest.fixture
def words(tmp_path):
    """A data section whose tokenizer is still to be made."""
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, None]))
    section = {
        "source": "datasets",
        "path": "json",
        "data_files": {"train": str(file), "eval": str(file)},
        "tokenizer": str(tmp_path / "tokenizer"),
        "block_size": 8,
        "num_train_samples": 40,
        "num_eval_samples": 4,
    }
    constant = ("--learning_rate.warmup=null", '--learning_rate.decay={"name": "constant"}')
    short = ('--batch={"global_batch_size": 2, "micro_batch_size": 1}', '--train.duration={"steps": 60}')
    return ("--data", json.dumps(section), *constant, *short)


def train(words, *more, recipe=PYDOC, vocab_size=270):
    return main(["train-tokenizer", str(recipe), "--vocab-size", str(vocab_size), *words, *more])


def test_any_text_comes_back_from_it(words, tmp_path, capsys):
    assert train(words, "--out", str(tmp_path / "tokenizer")) == 0
    assert capsys.readouterr().out.startswith("270 tokens; write data.tokenizer ")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for text in (*TEXTS[:4], "what it has never seen: ß€🙂\t\n  two  blanks", " leading"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # What is frequent is joined.
    assert len(tokenizer(" the")["input_ids"]) == 1
    assert len(tokenizer(" zqx")["input_ids"]) == 4


def test_the_same_documents_give_the_same_tokenizer(words, tmp_path):
    for name in ("one", "two"):
        assert train(words, "--out", str(tmp_path / name)) == 0
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()


def test_recipes_train_with_it(words, tmp_path):
    """As one stream of all documents, and with its mask."""
    assert train(words, "--out", str(tmp_path / "tokenizer")) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    source, _ = text_sources(load_config(PYDOC, (*words, "--model.vocab_size=270")))
    tokens = source.fetch(np.arange(20), 0)["input_ids"].flatten().tolist()
    whole = "<|endoftext|>".join(TEXTS)
    assert whole.startswith(tokenizer.decode(tokens))
    masked, _ = masked_sources(load_config(BERT, (*words, "--model.vocab_size=270", "--data.mask_fraction=0.5")))
    batch = masked.fetch(np.arange(40), 0)
    mask, end = tokenizer.mask_token_id, tokenizer.eos_token_id
    assert (batch["input_ids"] == mask).any()
    assert not (batch["labels"] == end).any()


def test_fewer_tokens_than_asked_for_are_told(words, tmp_path, capsys):
    """The words have no more than so many pairs to join."""
    assert train(words, "--out", str(tmp_path / "tokenizer"), vocab_size=5000) == 0
    number = len(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    assert 270 < number < 300
    assert capsys.readouterr().out.startswith(f"{number} tokens; ")


@pytest.mark.parametrize(
    ("more", "vocab_size", "message"),
    [
        (
            ("--out=new",),
            257,
            "--vocab-size: 257 is less than the 256 bytes and two special tokens",
        ),
        (("--out=there",), 270, "--out: there exists, and would be overwritten"),
        (("--out=new", "--data.text_column=body"), 270, "data.text_column: no column 'body'; the data has text"),
    ],
)
def test_what_it_refuses(more, vocab_size, message, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert train(words, *more, vocab_size=vocab_size) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("recipe", "what"), [(PYDOC, '"pydoc" of causal_lm has no documents'), (ADDITION, '"addition" of sft')]
)
def test_recipes_without_documents(recipe, what, tmp_path, capsys):
    assert train((), "--out", str(tmp_path / "new"), recipe=recipe) == 2
    assert f"error: data.source: {what}" in capsys.readouterr().err
