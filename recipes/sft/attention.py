"""Checks that a model's tokens attend only to earlier tokens, and only to those of their own pair.

A pack is marked by its positions, which begin at 0 in each pair. From these, if no other mask is given, `transformers`
(`masking_utils.find_packed_sequence_indices`) makes the mask that lets a token attend only to its own pair, whatever
the implementation of attention and its window. Not every architecture uses it: some count positions themselves, some
make their own masks, and convolutions and recurrences cross from pair to pair. So the model itself is tested or, before
it has weights, a small twin, which can miss only what is in the weights or in layers that no setting names.
"""

import torch
from transformers import PreTrainedModel

from largebatch.errors import UserError

from .trial import trial

LENGTHS = (7, 5, 1, 9)
# Largest differences, relative to the largest logit. Changing other tokens may change only the rounding, in mixtures of
# experts; a pair alone is computed in tensors of different shapes, which round differently in every layer.
MAX_DIFFERENCE_FROM_OTHERS = 1e-6
MAX_DIFFERENCE_ALONE = 1e-4


def check_causal(model: PreTrainedModel) -> None:
    """Change the last of several tokens, and compare the logits of those before it.

    Raises:
        UserError: They change, so that the model would read the answers that it must predict; or it cannot be run.
    """
    with trial(model) as tested:
        tokens, others = (_tokens(tested, first, sum(LENGTHS)) for first in (3, 4))
        before = _logits(tested, tokens)
        after = _logits(tested, torch.cat([tokens[:-1], others[-1:]]))
        refused = (
            f"model: {type(model).__name__} is not a causal language model: it would read the answers that it must "
            "predict, because a token changes the logits of those before it; use another model"
        )
        _compare(before[:-1], after[:-1], MAX_DIFFERENCE_FROM_OTHERS, refused)


def check_packing(model: PreTrainedModel) -> None:
    """Compare the logits of each pair in a small pack with its logits in another pack, and with its logits alone.

    Raises:
        UserError: They differ, so that packing would train something else; or the model cannot be run.
    """
    refused = (
        f"data.packing: {type(model).__name__} does not keep the pairs of a pack apart: they change each other's "
        "logits; write false"
    )
    with trial(model) as tested:
        pairs, others = ([_tokens(tested, first, length) for length in LENGTHS] for first in (3, 4))
        packed = _logits_of_pack(tested, *pairs)
        for number, pair in enumerate(pairs):
            surrounded = _logits_of_pack(tested, *others[:number], pair, *others[number + 1 :])[number]
            (alone,) = _logits_of_pack(tested, pair)
            _compare(packed[number], surrounded, MAX_DIFFERENCE_FROM_OTHERS, refused)
            _compare(packed[number], alone, MAX_DIFFERENCE_ALONE, refused)


def _tokens(model: PreTrainedModel, first: int, length: int) -> torch.Tensor:
    """Tokens of the vocabulary that differ at every position for a different `first`."""
    vocabulary: int = model.config.get_text_config().vocab_size
    return (first + 31 * torch.arange(length)) % vocabulary


def _logits(model: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of one sample; shape (tokens, vocabulary). Training, too, gives positions or None."""
    logits: torch.Tensor = model(input_ids=tokens[None], position_ids=positions).logits[0]
    return logits


def _logits_of_pack(model: PreTrainedModel, *pack: torch.Tensor) -> list[torch.Tensor]:
    """The logits of each pair."""
    lengths = [len(pair) for pair in pack]
    positions = torch.cat([*map(torch.arange, lengths)])
    return list(torch.split(_logits(model, torch.cat(pack), positions[None]), lengths))


def _compare(found: torch.Tensor, expected: torch.Tensor, limit: float, refused: str) -> None:
    """Raise UserError if logits differ, relative to the largest one, by more than the limit."""
    difference = float((found - expected).abs().max() / expected.abs().max())
    # Also true if the difference is not a number.
    if not difference <= limit:
        raise UserError(f"{refused} (the largest difference is {difference:.1e} of the largest logit)")
