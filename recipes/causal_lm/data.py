"""The training and evaluation samples of this folder's recipes."""

from largebatch.config.data import HubText, MegatronText, PydocData
from largebatch.data.mixture import open_mixed
from largebatch.data.preparation import Preparation
from largebatch.data.source import Sources
from largebatch.data.text import tokenized_samples
from largebatch.data.tokenizer import check_vocabulary, load_tokenizer

from .config import Config


def sources(config: Config, preparation: Preparation) -> Sources:
    """The training and evaluation samples.

    Batches are {"input_ids": int64 (batch, block_size), "labels": int64 (batch, block_size)}. Labels are the inputs one
    token later. If the documents of a block must not attend to each other, there are also "position_ids" of the same
    shape, which begin at 0 in each document.

    Raises:
        DataError: The data or its tokenizer cannot be loaded.
    """

    def opened(data: PydocData | HubText | MegatronText, _seed: int) -> Sources:
        tokenizer = load_tokenizer(data.tokenizer)
        check_vocabulary(config.model.vocab_size, tokenizer.vocab_size, repr(data.tokenizer))
        return tokenized_samples(data, tokenizer, preparation)

    return open_mixed(config.data, config.seed, opened)
