"""Losses that compare each sample with all others of the global batch, for `Step.couple`.

Each returns the losses of the samples in a range, shape (rows,), and never holds more pairs than rows x samples. What
all samples are encoded as:

- "features", shape (samples, vectors, size): vectors of length 1;
- "scale", a scalar that multiplies their cosines, 1 / temperature; trained if the model returns it;
- what else a loss names.
"""

from collections.abc import Mapping

import torch
from torch.nn.functional import cross_entropy, logsigmoid


def nt_xent(rows: slice, everything: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of finding each of a sample's two views among all other views by the other one, averaged over both.

    Chen et al. 2020, "SimCLR", arXiv 2002.05709, equation 1.
    """
    features = everything["features"]
    views = features[rows].flatten(0, 1)
    numbers = torch.arange(2 * rows.start, 2 * rows.stop, device=features.device)
    similarities = everything["scale"] * views @ features.flatten(0, 1).T
    # A view is not to be found by itself.
    similarities = similarities.scatter(1, numbers.unsqueeze(1), -torch.inf)
    return cross_entropy(similarities, numbers ^ 1, reduction="none").view(-1, 2).mean(dim=1)


def info_nce(rows: slice, everything: Mapping[str, torch.Tensor], both_ways: bool = True) -> torch.Tensor:
    """The loss of finding a sample's second vector by its first one, among those of all samples.

    With `both_ways`, the mean with the loss of finding the first one by the second, as in CLIP (Radford et al. 2021,
    arXiv 2103.00020, figure 3). Further vectors are hard negatives, which all samples must tell from their second one.

    "ids", shape (samples, vectors), may say what each vector is of. Another sample with the same first or second one is
    then neither right nor wrong, and nor is a hard negative that is the same as a sample's second one.
    """
    features = everything["features"]
    numbers = torch.arange(rows.start, rows.stop, device=features.device)
    left_out, negatives_left_out = _the_same(rows, everything["ids"]) if "ids" in everything else (None, None)
    scaled = everything["scale"] * features[rows, :2]

    def similarities(way: int, others: torch.Tensor, without: torch.Tensor | None) -> torch.Tensor:
        found = scaled[:, way] @ others.T
        return found if without is None else found.masked_fill(without, -torch.inf)

    there = similarities(0, features[:, 1], left_out)
    if features.shape[1] > 2:
        negatives = similarities(0, features[:, 2:].flatten(0, 1), negatives_left_out)
        there = torch.cat([there, negatives], dim=1)
    losses = cross_entropy(there, numbers, reduction="none")
    if not both_ways:
        return losses
    back = similarities(1, features[:, 0], left_out)
    return (losses + cross_entropy(back, numbers, reduction="none")) / 2


def _the_same(rows: slice, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which other samples, and which hard negatives, are the same as each sample in the range."""
    own = ids[rows]
    samples = (own[:, :1] == ids[:, 0]) | (own[:, 1:2] == ids[:, 1])
    numbers = torch.arange(rows.start, rows.stop, device=ids.device)
    return samples.scatter(1, numbers.unsqueeze(1), False), own[:, 1:2] == ids[:, 2:].flatten()


def sigmoid_loss(rows: slice, everything: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of telling for each pair of a first and a second vector whether they are of one sample.

    Zhai et al. 2023, "SigLIP", arXiv 2303.15343, algorithm 1; "bias" is a scalar that is added to each pair.
    """
    features = everything["features"]
    numbers = torch.arange(rows.start, rows.stop, device=features.device)
    pairs = everything["scale"] * features[rows, 0] @ features[:, 1].T + everything["bias"]
    own = pairs.gather(1, numbers.unsqueeze(1)).squeeze(1)
    # -log sigmoid(x) is -log sigmoid(-x) - x.
    return -logsigmoid(-pairs).sum(dim=1) - own
