"""Masked language modeling (Devlin et al. 2019, arXiv 1810.04805, section 3.1): blocks of text with tokens hidden.

Which tokens of a block are predicted, and what replaces them in the input, depends only on (seed, epoch, sample) or, in
evaluation, on the sample alone, so that runs with other seeds are measured alike. Every block predicts the same number
of tokens, so that all samples weigh the same in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from largebatch.data.mixture import open_mixed
from largebatch.data.order import Indices, derive_seed
from largebatch.data.preparation import Preparation
from largebatch.data.source import Batch, Sources
from largebatch.data.text import IGNORE_INDEX, TokenBlocks, tokenized_samples
from largebatch.data.tokenizer import check_vocabulary, load_tokenizer
from largebatch.errors import DataError

from .config import Config, MaskedHubText, MaskedMegatronText, MaskedPydoc

MASKED = 0.8  # fractions of the predicted tokens; the rest stay unchanged
REPLACED = 0.1
EVALUATION_SEED = 0


def sources(config: Config, preparation: Preparation) -> Sources:
    """The training and evaluation samples.

    Batches are {"input_ids": int64 (batch, block_size), "labels": int64 (batch, block_size)}. Labels are the tokens at
    predicted positions, and `IGNORE_INDEX` elsewhere.

    Raises:
        DataError: The data or its tokenizer cannot be loaded, the tokenizer has no mask, or the model has too few
            embeddings.
    """
    return open_mixed(config.data, config.seed, partial(_open, config, preparation))


def _open(
    config: Config, preparation: Preparation, data: MaskedPydoc | MaskedHubText | MaskedMegatronText, seed: int
) -> Sources:
    name = data.tokenizer
    tokenizer = load_tokenizer(name)
    mask = tokenizer.mask_token
    if mask is None:
        raise DataError(
            f"data.tokenizer: {name!r} has no mask token; write the tokenizer of a masked language model, such "
            "as google-bert/bert-base-uncased"
        )
    check_vocabulary(config.model.vocab_size, max(tokenizer.vocab_size, mask + 1), f"{name!r} with its mask")
    train, evaluation = tokenized_samples(data, tokenizer, preparation)
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), [*tokenizer.special_tokens, mask])
    masked = partial(MaskedBlocks, num_targets=data.tokens_per_sample, mask=mask, ordinary=ordinary)
    return masked(**vars(train), seed=seed), masked(**vars(evaluation), seed=EVALUATION_SEED)


@dataclass(eq=False, kw_only=True)
class MaskedBlocks(TokenBlocks):
    """Blocks of tokens with some of them hidden.

    80 % of the predicted tokens are hidden by the mask token, 10 % are replaced by random tokens and 10 % stay
    unchanged, drawn independently. Special tokens are neither predicted nor drawn.
    """

    num_targets: int  # tokens that each sample predicts
    mask: int  # the token that hides others
    ordinary: NDArray[np.int64]  # all tokens that may be predicted or drawn, in increasing order
    seed: int  # for training, the run's, or that of the source in a mixture

    def fetch(self, indices: Indices, epoch: int | None) -> Batch:
        """The masked samples; in evaluation the same tokens are hidden every time."""
        tokens = super().fetch(indices, epoch)["input_ids"].numpy()
        rows = [self._mask(row, epoch, int(index)) for row, index in zip(tokens, indices, strict=True)]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return {"input_ids": inputs, "labels": labels}

    def _mask(self, tokens: NDArray[np.int64], epoch: int | None, index: int) -> Sequence[NDArray[np.int64]]:
        """Inputs and labels of a sample, both of shape (block_size,)."""
        when = "evaluation" if epoch is None else epoch
        random = np.random.default_rng(derive_seed(self.seed, "mask", when, index))
        candidates = np.flatnonzero(np.isin(tokens, self.ordinary))
        if len(candidates) < self.num_targets:
            raise DataError(
                f"data: block {index} has {len(candidates)} tokens besides special ones, but {self.num_targets} must "
                "be predicted; remove empty documents from the data, or write a smaller data.mask_fraction"
            )
        targets = random.choice(candidates, self.num_targets, replace=False)
        inputs = tokens.copy()
        labels = np.full_like(tokens, IGNORE_INDEX)
        labels[targets] = tokens[targets]
        masking_draw = random.random(self.num_targets)
        drawn = random.choice(self.ordinary, self.num_targets)
        inputs[targets[masking_draw < MASKED]] = self.mask
        replaced = (masking_draw >= MASKED) & (masking_draw < MASKED + REPLACED)
        inputs[targets[replaced]] = drawn[replaced]
        return inputs, labels
