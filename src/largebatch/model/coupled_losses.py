"""Losses that compare each sample with all others of the global batch, for `Step.couple`.

Each returns the losses of the samples in a range, shape (rows,), and never holds more pairs than rows x vectors. `own`
is what the samples in the range are encoded as, and `everyone` what all are: vectors of length 1, each of shape
(samples, size) unless a loss says otherwise, and "scale", a scalar that multiplies their cosines: 1 / temperature.
"""

from collections.abc import Mapping

import torch
from torch.nn.functional import cross_entropy, logsigmoid

Encoded = Mapping[str, torch.Tensor]
"""By name: one row per sample, or a scalar that is trained, such as a temperature."""


def nt_xent(rows: slice, own: Encoded, everyone: Encoded) -> torch.Tensor:
    """The loss of finding each of a sample's two views among all other views by the other one, averaged over both.

    Chen et al. 2020, "SimCLR", arXiv 2002.05709, equation 1. "views" has shape (samples, 2, size).
    """
    numbers = torch.arange(2 * rows.start, 2 * rows.stop, device=everyone["views"].device)
    similarities = everyone["scale"] * own["views"].flatten(0, 1) @ everyone["views"].flatten(0, 1).T
    # A view is not to be found by itself.
    similarities = similarities.scatter(1, numbers.unsqueeze(1), -torch.inf)
    return cross_entropy(similarities, numbers ^ 1, reduction="none").view(-1, 2).mean(dim=1)


def info_nce(rows: slice, own: Encoded, everyone: Encoded, both_ways: bool = True) -> torch.Tensor:
    """The loss of finding a sample's "second" vector by its "first" one, among those of all samples.

    With `both_ways`, the mean with the loss of finding the first one by the second, as in CLIP (Radford et al. 2021,
    arXiv 2103.00020, figure 3). "negatives", shape (samples, negatives, size), are hard ones, which all samples must
    tell from their second one.

    "ids", shape (samples, 2 + negatives), may say what each vector is of. Two samples that share a first or second one,
    or have one's first as the other's second, are then neither right nor wrong for each other, and nor is a hard
    negative that is a sample's own first or second one.
    """
    numbers = torch.arange(rows.start, rows.stop, device=everyone["first"].device)
    ids = everyone.get("ids")

    def similarities(mine: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return everyone["scale"] * mine @ others.T

    def has(others: torch.Tensor) -> torch.Tensor:
        return (own["ids"][:, :1] == others) | (own["ids"][:, 1:2] == others)

    per_first = similarities(own["first"], everyone["second"])
    if ids is not None:
        is_same = has(ids[:, 0]) | has(ids[:, 1])
        is_same = is_same.scatter(1, numbers.unsqueeze(1), False)
        per_first = per_first.masked_fill(is_same, -torch.inf)
    if "negatives" in everyone:
        negatives = similarities(own["first"], everyone["negatives"].flatten(0, 1))
        if ids is not None:
            negatives = negatives.masked_fill(has(ids[:, 2:].flatten()), -torch.inf)
        per_first = torch.cat([per_first, negatives], dim=1)
    losses = cross_entropy(per_first, numbers, reduction="none")
    if not both_ways:
        return losses
    per_second = similarities(own["second"], everyone["first"])
    if ids is not None:
        per_second = per_second.masked_fill(is_same, -torch.inf)
    return (losses + cross_entropy(per_second, numbers, reduction="none")) / 2


def sigmoid_loss(rows: slice, own: Encoded, everyone: Encoded) -> torch.Tensor:
    """The loss of telling for each pair of a "first" and a "second" vector whether they are of one sample.

    Zhai et al. 2023, "SigLIP", arXiv 2303.15343, algorithm 1. "bias" is a scalar that is added to each pair.
    """
    numbers = torch.arange(rows.start, rows.stop, device=everyone["first"].device)
    pairs = everyone["scale"] * own["first"] @ everyone["second"].T + everyone["bias"]
    right = pairs.gather(1, numbers.unsqueeze(1)).squeeze(1)
    # -log sigmoid(x) is -log sigmoid(-x) - x.
    return -logsigmoid(-pairs).sum(dim=1) - right
