"""Masked blocks: how many tokens, which ones, what the model sees in their places, and what all that depends on."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

import tasks
from chat_templates import word_tokenizer
from largebatch.config import load_config
from largebatch.data.text import IGNORE_INDEX, TokenBlocks
from largebatch.data.token_stream import TokenStream
from largebatch.errors import DataError
from largebatch.plan import resolve
from paths import BERT
from problems import problem_of
from small_data import assert_drawn_by_seed_epoch_and_sample, load_with, rows_in

MaskedBlocks = tasks.module("masked_lm", "data").MaskedBlocks
masked_sources = tasks.sources("masked_lm")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def hub_config(tmp_path, *words, mask="[MASK]", **data):
    """Short documents of random words, so that every block has several separators; some words are unknown, and w0 is a
    special token without a name.

    The tokenizer is as BERT's: with a separator, and no end-of-text token.
    """
    words_known = [*SPECIAL, *(f"w{number}" for number in range(40))]
    names = {"sep_token": "[SEP]", "cls_token": "[CLS]", "pad_token": "[PAD]", "mask_token": mask}
    tokenizer = word_tokenizer(words_known, **names)
    tokenizer.add_tokens([AddedToken("w0", special=True)], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    numbers = np.random.default_rng(0).integers(0, 40, size=(600, 3))
    section = rows_in(tmp_path / "text.jsonl", [{"text": "w{} w{} strange w{}".format(*each)} for each in numbers])
    section |= {"tokenizer": str(tmp_path / "tokenizer"), "block_size": 32, "num_train_samples": 80}
    return load_with(BERT, section | data, *words)


def everything(source, epoch=0):
    """Inputs, labels and original tokens of all samples."""
    indices = np.arange(len(source))
    batch = source.fetch(indices, epoch)
    return (
        batch["input_ids"].numpy(),
        batch["labels"].numpy(),
        TokenBlocks.fetch(source, indices, 0)["input_ids"].numpy(),
    )


def test_every_sample_predicts_the_same_number_of_its_own_tokens():
    train, _ = masked_sources(load_config(BERT, ("--data.mask_fraction=0.3",)))
    inputs, labels, tokens = everything(train)
    predicted = labels != IGNORE_INDEX
    assert (predicted.sum(axis=1) == 38).all()
    # The label stands where its token stood, and all other tokens are seen.
    assert (labels[predicted] == tokens[predicted]).all()
    assert (inputs[~predicted] == tokens[~predicted]).all()
    assert train.weight(train.fetch(np.array([5, 7, 8]), 2)) == 3 * 38


def test_four_fifths_masked_a_tenth_random_a_tenth_left():
    """Of 60,800 predicted bytes; one in 255 of the random ones is the byte that stood there."""
    train, _ = masked_sources(load_config(BERT))
    inputs, labels, tokens = everything(train)
    predicted = labels != IGNORE_INDEX
    seen = inputs[predicted]
    was = tokens[predicted]
    masked = seen == 256
    left = seen == was
    assert masked.mean() == pytest.approx(0.8, abs=0.008)
    assert left.mean() == pytest.approx(0.1 + 0.1 / 255, abs=0.006)
    # All bytes but the one between documents, about equally often.
    drawn = seen[~masked & ~left]
    assert {*drawn} == {*range(1, 256)}
    assert drawn.mean() == pytest.approx(128, abs=4)
    # Which one is drawn does not follow from the place in the block, nor does whether the place is predicted.
    assert predicted.mean(axis=0) == pytest.approx(19 / 128, abs=0.03)


def test_masks_depend_on_seed_epoch_and_sample_alone():
    def seen_and_predicted(source, indices, epoch):
        batch = source.fetch(np.array(indices), epoch)
        return torch.stack([batch["input_ids"], batch["labels"]], dim=1)

    train, evaluation = masked_sources(load_config(BERT))
    other_seed, evaluated_alike = masked_sources(load_config(BERT, ("--seed=1",)))
    assert_drawn_by_seed_epoch_and_sample(partial(seen_and_predicted, train), partial(seen_and_predicted, other_seed))
    evaluated = seen_and_predicted(evaluation, [7, 3], None)
    assert torch.equal(seen_and_predicted(evaluated_alike, [3, 7], None), evaluated[[1, 0]])


def test_special_tokens_are_neither_predicted_nor_drawn(tmp_path):
    train, evaluation = masked_sources(hub_config(tmp_path, "--model.vocab_size=45"))
    assert "[UNK] in 600 documents" in train.remark
    for source, epoch in ((train, 0), (train, 1), (evaluation, None)):
        inputs, labels, tokens = everything(source, epoch)
        predicted = labels != IGNORE_INDEX
        # Documents end with the separator, and the unknown word is in each of them.
        assert (np.isin(tokens, [1, 3]).sum(axis=1) >= 6).all()
        assert (predicted.sum(axis=1) == 5).all()
        assert labels[predicted].min() > len(SPECIAL)
        assert set(np.unique(inputs[predicted])) <= {4, *range(6, 45)}


def test_what_cannot_be_masked(tmp_path):
    with pytest.raises(DataError, match=r"data\.tokenizer: '.*' has no mask token; write the tokenizer of a masked"):
        masked_sources(hub_config(tmp_path, mask=None))
    train, _ = masked_sources(hub_config(tmp_path, mask="w1"))
    assert re.search(r"w1 in \d+ documents", train.remark)
    with pytest.raises(DataError, match=r"model\.vocab_size: 256 is below the 257 tokens of 'bytes' with its mask"):
        masked_sources(load_config(BERT, ("--model.vocab_size=256",)))
    blocks = TokenBlocks(TokenStream.in_memory(np.array([0, 7, 0, 0, 8, 9, 7, 0, 7])), 4, 2)
    masked = MaskedBlocks(**vars(blocks), num_targets=2, mask=20, ordinary=np.arange(1, 20), seed=0)
    assert (masked.fetch(np.array([1]), 0)["labels"] >= 0).sum() == 2
    with pytest.raises(DataError, match="block 0 has 1 tokens besides special ones, but 2 must be predicted"):
        masked.fetch(np.array([0]), 0)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--data.block_size=129", "data.block_size: 129 is more than the 128 positions of model.max_positions"),
        ("--data.mask_fraction=0.001", "mask_fraction 0.001 of block_size 128 is less than half a token"),
    ],
)
def test_recipes_that_are_refused(word, message):
    assert message in problem_of(word, recipe=BERT)


def test_durations_in_tokens_count_those_that_are_predicted():
    """19 of each of 64 blocks: 12,160 tokens are ten steps, in the checks before a run and in the plan."""
    words = ('--train.duration={"tokens": 12160}', "--evaluation.every=null")
    assert "warmup takes 40 steps, and the whole run 10" in problem_of(*words, recipe=BERT)
    plan = resolve(load_config(BERT, (*words, "--learning_rate.warmup=null")), 2)
    assert (plan.total_steps, plan.loss_weight_per_sample) == (10, 19)


def test_sources_of_a_mixture_have_masks_of_their_own(tmp_path):
    sizes = {"weight": 1, "num_train_samples": 80, "num_eval_samples": 1}
    sources = [{"name": "one", **sizes}, {"name": "two", "train_split": "train[:100%]", **sizes}]
    train, _ = masked_sources(hub_config(tmp_path, sources=sources, num_train_samples=160, num_eval_samples=2))
    one, two = (source.fetch(np.arange(20), 0)["labels"] for source in train.sources)
    assert ((one != IGNORE_INDEX) == (two != IGNORE_INDEX)).all(dim=1).sum() <= 2
