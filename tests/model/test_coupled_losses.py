"""Losses of some samples against all, in tiles, against plain loops over all pairs."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import normalize

from largebatch.model.coupled_losses import info_nce, nt_xent, sigmoid_loss

NUM_SAMPLES = 7
SCALE = 3.0
BIAS = -1.5
# Samples 1 and 4 have the same second vector, 0 and 3 the same first one, and 6's first one is 2's second one. Sample
# 2's hard negative is 5's second one, and 3's is 4's first one.
IDS = [[20, 0, 10], [21, 1, 11], [22, 2, 5], [20, 3, 24], [24, 1, 14], [25, 5, 15], [2, 6, 16]]


def of_nt_xent(features):
    """Chen et al. 2020, equation 1, view by view."""
    views = features.flatten(0, 1)
    losses = []
    for number, view in enumerate(views):
        terms = [math.exp(SCALE * view @ other) for other in views]
        losses.append(-math.log(terms[number ^ 1] / (sum(terms) - terms[number])))
    return [(losses[2 * n] + losses[2 * n + 1]) / 2 for n in range(NUM_SAMPLES)]


def of_info_nce(features, both_ways=True, ids=None):
    def is_same(n, m, k):
        if ids is None or (n == m and k == 1):
            return False
        return not {*ids[n][:2]}.isdisjoint(ids[m][:2] if k == 1 else [ids[m][k]])

    losses = []
    for n, (first, second, *_) in enumerate(features):
        there = {
            (m, k): math.exp(SCALE * first @ features[m, k])
            for m in range(NUM_SAMPLES)
            for k in range(1, features.shape[1])
            if not is_same(n, m, k)
        }
        loss = -math.log(there[n, 1] / sum(there.values()))
        if both_ways:
            back = {m: math.exp(SCALE * second @ features[m, 0]) for m in range(NUM_SAMPLES) if not is_same(n, m, 1)}
            loss = (loss - math.log(back[n] / sum(back.values()))) / 2
        losses.append(loss)
    return losses


def of_sigmoid(features):
    losses = []
    for n in range(NUM_SAMPLES):
        logits = [float(SCALE * features[n, 0] @ features[m, 1] + BIAS) for m in range(NUM_SAMPLES)]
        logits[n] = -logits[n]
        losses.append(sum(math.log(1 + math.exp(logit)) for logit in logits))
    return losses


def encoded(num_vectors, **ids):
    generator = torch.Generator().manual_seed(num_vectors)
    vectors = normalize(torch.randn(NUM_SAMPLES, num_vectors, 4, dtype=torch.float64, generator=generator), dim=-1)
    result = {"views": vectors, "first": vectors[:, 0], "second": vectors[:, 1], **ids}
    if num_vectors > 2:
        result["negatives"] = vectors[:, 2:]
    return result | {"scale": torch.tensor(SCALE).double(), "bias": torch.tensor(BIAS).double()}


@pytest.mark.parametrize(
    ("loss", "expected", "everything"),
    [
        (nt_xent, of_nt_xent, encoded(2)),
        (info_nce, of_info_nce, encoded(2)),
        (info_nce, of_info_nce, encoded(4)),
        (info_nce, partial(of_info_nce, ids=IDS), encoded(3, ids=torch.tensor(IDS))),
        (
            partial(info_nce, both_ways=False),
            partial(of_info_nce, both_ways=False, ids=IDS),
            encoded(3, ids=torch.tensor(IDS)),
        ),
        (sigmoid_loss, of_sigmoid, encoded(2)),
    ],
)
@pytest.mark.parametrize("tile", [1, 3, 7])
def test_losses_in_tiles(loss, expected, everything, tile):
    losses = []
    for start in range(0, NUM_SAMPLES, tile):
        rows = slice(start, min(start + tile, NUM_SAMPLES))
        own = {name: values[rows] if values.ndim else values for name, values in everything.items()}
        losses.append(loss(rows, own, everything))
    torch.testing.assert_close(
        torch.cat(losses), torch.tensor(expected(everything["views"]), dtype=torch.float64), rtol=1e-12, atol=0
    )
