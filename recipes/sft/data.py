"""Opens the data of fine-tuning: sums, or prompts with answers or conversations of any data set."""

from functools import partial

import datasets
import numpy as np

from largebatch.data.hub import open_splits
from largebatch.data.mixture import open_mixed
from largebatch.data.order import Permutation
from largebatch.data.preparation import Preparation
from largebatch.data.source import Sources
from largebatch.data.tokenizer import PretrainedTokenizer, Tokenizer, load_tokenizer
from largebatch.errors import DataError

from .chats import ChatEncoder
from .config import AdditionData, Config, HubPairs
from .encoding import Encoder, tokenize
from .model import configuration
from .pairs import PairSamples
from .prompts import PairEncoder


def sources(config: Config, preparation: Preparation) -> Sources:
    """The training and evaluation samples.

    Batches are {"input_ids": int64 (batch, tokens), "labels": int64 (batch, tokens)}. Labels are the inputs one token
    later, or `IGNORE_INDEX` in prompts and padding, which are not predicted. Packs also have "position_ids" of the same
    shape, which begin at 0 in each pair.

    Raises:
        DataError: The data or its tokenizer cannot be loaded or do not fit the model, or there are unusable pairs.
    """
    return open_mixed(config.data, config.seed, partial(_open, config, preparation))


def _open(config: Config, preparation: Preparation, data: AdditionData | HubPairs, _seed: int) -> Sources:
    tokenizer = load_tokenizer(data.tokenizer)
    encoder: Encoder
    if isinstance(data, HubPairs) and data.format == "messages":
        encoder = ChatEncoder(data, tokenizer)
    else:
        encoder = PairEncoder(data, tokenizer)
    splits = addition() if isinstance(data, AdditionData) else open_splits(data, preparation, encoder.uses)
    train, evaluation = (
        PairSamples(tokenize(data, rows, encoder, preparation), data, split)
        for rows, split in zip(splits, ("training", "evaluation"), strict=True)
    )
    # The model's own answers go on until a sample is full.
    is_filled = config.evaluation.answers is not None
    longest = data.block_size if is_filled else int(max(train.lengths.max(), evaluation.lengths.max()))
    _check_fits_the_model(config, tokenizer, longest)
    return train, evaluation


def _check_fits_the_model(config: Config, tokenizer: Tokenizer, longest: int) -> None:
    whole = configuration(config.model)
    model = whole.get_text_config()
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"data.tokenizer: it has {tokenizer.vocab_size} tokens, more than the model's vocabulary of "
            f"{model.vocab_size}; write the model's own tokenizer"
        )
    if isinstance(tokenizer, PretrainedTokenizer) and config.model.path not in (None, config.data.tokenizer):
        other = tokenizer.misread_beside(whole)
        if other is not None:
            raise DataError(
                "data.tokenizer: beside the model's config.json, where the run saves it, transformers reads it as "
                f"{other}, which splits text differently; write the model's own tokenizer"
            )
    given = f"data.block_size: samples have up to {longest} tokens to predict from"
    rope = getattr(model, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        name = "original_max_position_embeddings"
        original = rope.get(name, getattr(model, name, None))
        if original is not None and longest > original:
            raise DataError(
                f"{given}, but beyond {original} the model's positions depend on the longest pair of a batch, so a "
                f"pair's loss would on others; write {original}"
            )
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise DataError(f"{given}, but the model reads at most {positions}; write {positions}")


# --- sums ---------------------------------------------------------------------------------------------------------

NUM_SUMS = 10_000
NUM_HELD_OUT = 1_000


def addition() -> tuple[datasets.Dataset, datasets.Dataset]:
    """The sums of `AdditionData` as text, for training and for evaluation."""
    places = Permutation(NUM_SUMS, key=0)(np.arange(NUM_SUMS)).tolist()
    sums = [{"prompt": f"{place // 100}+{place % 100}=", "answer": f"{place // 100 + place % 100}"} for place in places]
    return datasets.Dataset.from_list(sums[:-NUM_HELD_OUT]), datasets.Dataset.from_list(sums[-NUM_HELD_OUT:])
