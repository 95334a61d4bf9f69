"""Whether a model keeps the pairs of a pack apart.

A pack is told by its positions, which begin at 0 with each pair. From these, and where no other mask is given,
`transformers` (`masking_utils.find_packed_sequence_indices`) makes the mask that lets a token attend to its own pair
only, whatever the implementation of attention and its window. Whether an architecture obeys is its own affair: some
count positions themselves, some make masks of their own, and convolutions and recurrences run from pair to pair. So
the model itself is asked.
"""

import torch
from transformers import PreTrainedModel

from largebatch.errors import UserError

LENGTHS = (7, 5, 1, 9)
# Relative to the largest logit. Other tokens in the other pairs must change nothing but, in mixtures of experts, the
# rounding; alone, a pair is computed in tensors of other shapes, which round differently in every layer.
OF_OTHER_PAIRS, OF_BEING_ALONE = 1e-6, 1e-4


def check_packing(model: PreTrainedModel) -> None:
    """Compare the logits of each pair in a small pack with those of other packs, and with those that it has alone.

    Raises:
        UserError: They differ, so that packing would train something else.
    """
    was_training = model.training
    model.eval()
    vocabulary = model.config.get_text_config().vocab_size
    pairs, others = (
        [torch.arange(first, first + 2 * length, 2) * 31 % vocabulary for length in LENGTHS] for first in (3, 4)
    )

    @torch.no_grad()
    def logits(*pack: torch.Tensor) -> list[torch.Tensor]:
        positions = torch.cat([torch.arange(len(pair)) for pair in pack])[None]
        rows: torch.Tensor = model(input_ids=torch.cat(pack)[None], position_ids=positions).logits[0]
        return list(torch.split(rows, [len(pair) for pair in pack]))

    packed = logits(*pairs)
    largest = max(float(rows.abs().max()) for rows in packed)
    for number, pair in enumerate(pairs):
        surrounded = logits(*others[:number], pair, *others[number + 1 :])[number]
        (alone,) = logits(pair)
        for expected, limit in ((surrounded, OF_OTHER_PAIRS), (alone, OF_BEING_ALONE)):
            difference = float((packed[number] - expected).abs().max()) / largest
            # Also where it is not a number.
            if not difference <= limit:
                raise UserError(
                    f"data.packing: {type(model).__name__} does not keep the pairs of a pack apart: they change each "
                    f"other's logits, by {difference:.1e} of the largest; write false"
                )
    model.train(was_training)
