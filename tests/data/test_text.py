"""Text: one stream of tokens, cut into blocks, each token predicted once."""

import json
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Olmo2Config, Qwen2Config

import tasks
from chat_templates import chat_tokenizer, word_tokenizer
from largebatch.config import load_config
from largebatch.data.text import TokenBlocks
from largebatch.data.token_stream import Part, TokenStream
from largebatch.data.tokenizer import load_tokenizer
from largebatch.errors import DataError, UserError
from paths import PYDOC
from small_data import load_with, of_file, rows_in

text_sources = tasks.sources("causal_lm")

DOCUMENTS = ["alpha beta", "", "gamma", "beta " * 40, "Ünï"]


@pytest.fixture
def opened(tmp_path):
    """From documents, and other fields of the data, to both sets."""

    def open_sources(documents=DOCUMENTS, *words, **data):
        section = rows_in(tmp_path / "text.jsonl", [{"text": document} for document in documents])
        section |= {"tokenizer": "bytes", "block_size": 8, "num_train_samples": 2}
        return text_sources(load_with(PYDOC, section | data, *words))

    return open_sources


def test_pydoc_blocks_are_the_text_cut_in_order():
    from pydoc_data.topics import topics

    train, evaluation = text_sources(load_config(PYDOC))
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    batch = train.fetch(np.array([0, 3199]), 0)
    assert bytes(batch["input_ids"].flatten().tolist()) == text[:128] + text[3199 * 128 : 3200 * 128]
    assert bytes(batch["labels"][0].tolist()) == text[1:129]
    first_held_out = evaluation.fetch(np.array([0]), None)["input_ids"]
    assert bytes(first_held_out[0].tolist()) == text[3200 * 128 : 3201 * 128]


def test_every_token_is_predicted_once():
    stream = TokenStream.in_memory(np.arange(1001))
    blocks = TokenBlocks(stream, block_size=10, num_samples=101)
    labels = blocks.fetch(np.arange(len(blocks)), 0)["labels"]
    assert labels.flatten().tolist() == list(range(1, 1001))


def test_positions_begin_anew_with_each_document_and_each_block(opened):
    documents = ["abc", "", "de", "f" * 9]
    train, _ = opened(documents)
    assert "position_ids" not in train.fetch(np.array([0]), 0)
    train, evaluation = opened(documents, attention="document")
    batch = train.fetch(np.array([1, 0]), 0)
    assert [bytes(row) for row in batch["input_ids"].tolist()] == [b"fffffff".rjust(8, b"f"), b"abc\0\0de\0"]
    assert batch["position_ids"].tolist() == [[*range(8)], [0, 1, 2, 3, 0, 0, 1, 2]]
    assert bytes(batch["labels"][1].tolist()) == b"bc\0\0de\0f"
    assert torch.equal(evaluation.fetch(np.array([0]), None)["position_ids"], batch["position_ids"][1:])


def test_stream_over_many_parts():
    """Over borders of parts, one of which is empty."""
    starts = np.cumsum([0, 28, 4, 50, 0, 160])
    stream = TokenStream([Part(stop - start, partial(np.arange, start, stop)) for start, stop in pairwise(starts)])
    assert len(stream) == 242
    for start in range(len(stream) - 13):
        assert stream.read(start, start + 13).tolist() == list(range(start, start + 13))


@pytest.fixture
def tokenizer(tmp_path):
    """Of whole words, in a local folder."""
    words = ["[UNK]", "<eos>", "alpha", "beta", "gamma"]
    word_tokenizer(words, eos_token="<eos>").save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def test_pretrained_tokenizer(opened, tokenizer):
    train, _ = opened(tokenizer=tokenizer, block_size=4)
    assert train.fetch(np.array([0, 1]), 0)["input_ids"].tolist() == [[2, 3, 1, 1], [4, 1, 3, 3]]


def test_a_model_without_a_tokenizer(opened, tmp_path):
    """`transformers` makes an empty one of its configuration."""
    folder = tmp_path / "model"
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8)).save_pretrained(folder)
    with pytest.raises(DataError, match=r"data\.tokenizer: '.*model' has no tokenizer"):
        opened(tokenizer=str(folder))


def test_a_tokenizer_that_is_damaged(opened, tokenizer, tmp_path):
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.tokenizer: '.*tokenizer' could not be loaded"):
        opened(tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("tokenizer_class", "config", "is_refused"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, None, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, None, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "qwen2"}, True),
        ({"tokenizer_class": "CohereTokenizer"}, {"model_type": "olmo2"}, False),
    ],
)
def test_a_class_that_splits_text_differently_from_its_file(tokenizer_class, config, is_refused, opened, tmp_path):
    """`transformers` rebuilds some classes from the vocabulary alone, and for some models ignores the named class."""
    folder = tmp_path / "tokenizer"
    chat_tokenizer(None, merged=("Ġ2", "20")).save_pretrained(folder)
    given = folder / "tokenizer_config.json"
    given.write_text(json.dumps(json.loads(given.read_text()) | tokenizer_class))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    data = {"tokenizer": str(folder), "block_size": 4}
    if not is_refused:
        opened(DOCUMENTS, "--model.vocab_size=400", **data)
        read = load_tokenizer(str(folder))
        assert [read.misread_beside(kind()) for kind in (Qwen2Config, Olmo2Config)] == ["Qwen2Tokenizer", None]
        return
    with pytest.raises(DataError, match=r"transformers reads '.*' as \w+, which splits text differently"):
        opened(**data)
    kept = tmp_path / "kept"
    AutoTokenizer.from_pretrained(folder).save_pretrained(kept)
    opened(DOCUMENTS, "--model.vocab_size=400", **data | {"tokenizer": str(kept)})


def test_an_end_within_a_document(opened, tokenizer, tmp_path):
    documents = [*DOCUMENTS, "beta <eos> beta"]
    told = opened(documents, tokenizer=tokenizer)[0].remark
    assert "<eos> in 1 document (the first is row 5)" in told
    # Other formats have no zero bytes.
    parquet.write_table(pyarrow.table({"text": ["a" * 20, "a\0b"]}), tmp_path / "zero.parquet")
    assert "(the first is row 1)" in opened(**of_file(tmp_path / "zero.parquet", "parquet"))[0].remark


def test_vocabulary_must_hold_the_tokenizer(opened, tokenizer):
    with pytest.raises(DataError, match="vocab_size: 4 is below the 5 tokens"):
        opened(DOCUMENTS, "--model.vocab_size=4", tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"tokenizer": "./nowhere"}, "data.tokenizer: there is no folder './nowhere'"),
        ({"text_column": "body"}, "data.text_column: no column 'body'; the data has 'text'"),
    ],
)
def test_data_that_cannot_be_used(data, told, opened):
    with pytest.raises(UserError, match=told):
        opened(**data)


@pytest.mark.parametrize("recipe", ["llama31_8b_c4", "gpt2_124m"])
def test_the_example_has_positions_too(recipe):
    """Memory is estimated from it: of Megatron's files as of text from the hub."""
    example_batch = tasks.module("causal_lm", "model").example_batch
    config = load_config(PYDOC.with_name(f"{recipe}.json"), ["--data.attention=document"])
    assert example_batch(config).keys() == {"input_ids", "targets", "position_ids"}
