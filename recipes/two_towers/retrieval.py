"""What an evaluation of vectors measures: whether the right ones are the nearest."""

import torch
from torch.nn.functional import normalize

RANKS = (1, 10)
SIDES = ("first", "second")


def recalls(pairs: dict[str, torch.Tensor], among: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For each pair whether the other one of it is among the nearest, both ways.

    Args:
        pairs: Vectors of length 1, "first" and "second", each (pairs, size), and the "ids" of both, (pairs, 2).
        among: The same of all pairs.

    Returns:
        Ones and zeros of shape (pairs,): "recall@1" and "recall@10" of the second by the first, and "reverse_recall@…"
        of the first by the second.
    """
    # Another pair with the same image or text is as right.
    is_right = (pairs["ids"].unsqueeze(1) == among["ids"]).any(dim=2)
    found: dict[str, torch.Tensor] = {}
    for side, name in enumerate(("recall", "reverse_recall")):
        similarities = pairs[SIDES[side]] @ among[SIDES[1 - side]].T
        # A text does not find itself on the other side of another pair.
        is_itself = (pairs["ids"][:, side, None] == among["ids"][:, 1 - side]) & ~is_right
        similarities = similarities.masked_fill(is_itself, -torch.inf)
        nearest = similarities.topk(min(max(RANKS), len(among["ids"]))).indices
        is_found = is_right.gather(1, nearest)
        found |= {f"{name}@{rank}": is_found[:, :rank].any(dim=1).float() for rank in RANKS}
    return found


def class_vectors(prompts: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The mean vector of each class over its prompts, of length 1; prompts of a class follow each other."""
    return normalize(prompts.view(num_classes, -1, prompts.shape[1]).mean(dim=1), dim=-1)


def are_named(images: torch.Tensor, labels: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """One for each image that is nearest to its class, and zero for others."""
    return ((images @ classes.T).argmax(dim=1) == labels).float()
