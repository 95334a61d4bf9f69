"""Scaling rules: the peak learning rate that a batch size needs, from the one that was tuned at another."""

import math
from typing import Literal

ScalingRule = Literal["linear", "sqrt", "none"]


def scaling_factor(rule: ScalingRule, global_batch_size: int, reference_batch_size: int) -> float:
    """What `base_lr` is multiplied by when the batch grows k = global_batch_size / reference_batch_size fold.

    - "linear": k. For SGD: Goyal et al. 2017 (arXiv 1706.02677), section 2.1.
    - "sqrt": the square root of k. For Adam: Krizhevsky 2014 (arXiv 1404.5997), Granziol et al. (arXiv 2006.09092).
    - "none": 1.
    """
    k = global_batch_size / reference_batch_size
    return {"linear": k, "sqrt": math.sqrt(k), "none": 1.0}[rule]
