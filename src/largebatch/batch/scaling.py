"""Scaling rules: how the learning rate and Adam's moments, tuned at one batch size, change for another."""

import math
from typing import Literal

ScalingRule = Literal["linear", "sqrt", "none"]


def scaling_factor(rule: ScalingRule, global_batch_size: int, reference_batch_size: int) -> float:
    """The factor of `base_lr` when the batch is k = global_batch_size / reference_batch_size times as large.

    - "linear": k. For SGD: Goyal et al. 2017 (arXiv 1706.02677), section 2.1.
    - "sqrt": the square root of k. For Adam: Krizhevsky 2014 (arXiv 1404.5997), Granziol et al. (arXiv 2006.09092).
    - "none": 1.
    """
    k = global_batch_size / reference_batch_size
    return {"linear": k, "sqrt": math.sqrt(k), "none": 1.0}[rule]


DecayRule = Literal["fixed", "timescale", "power_lines"]
# The power of the length that weight decay is divided by, and the source.
DECAY_LAWS = {"timescale": (1.0, "arXiv 2405.13698"), "power_lines": (0.473, "arXiv 2505.13738")}


def scaled_decay(rule: DecayRule, tuned: float, k: float, lr_factor: float, horizon: float) -> tuple[float, str]:
    """Weight decay for another batch, learning rate and length of the run, and how it is computed, in words.

    AdamW's weights are a moving average of its updates over the last 1 / (learning rate x weight decay) steps, its
    timescale (Wang and Aitchison 2024, arXiv 2405.13698).

    - "fixed": as tuned, without words.
    - "timescale": times k / (lr_factor x horizon), which keeps the timescale the same share of the run.
    - "power_lines": times k / (lr_factor x horizon ** 0.473). The best share was found to be 1.084 (tokens per
      parameter) ** -0.527 (Bergsma et al. 2025, "Power Lines", arXiv 2505.13738). On the same model, tokens per
      parameter grow as the horizon does, so the tuned share is multiplied by horizon ** -0.527.

    Args:
        rule: The rule.
        tuned: The weight decay that was tuned.
        k: The batch over the one that it was tuned at.
        lr_factor: The peak learning rate over the one that it was tuned at.
        horizon: The samples of the run over those of the run that it was tuned in.
    """
    if rule == "fixed":
        return tuned, ""
    power, source = DECAY_LAWS[rule]
    length = f"{horizon:.6g}" if power == 1 else f"{horizon:.6g} ** {power:g}"
    words = f"{tuned:.6g} x {k:.6g} / {lr_factor:.6g} / {length} (batch, rate, length), {source}"
    return tuned * k / (lr_factor * horizon**power), words


MomentRule = Literal["fixed", "half_life", "sde"]
Betas = tuple[float, float]


def scaled_average(rule: MomentRule, k: float, beta: float) -> float:
    """The decay rate of a running average for a batch k times as large; ValueError if the rule does not hold at k."""
    if rule == "half_life":
        return math.pow(beta, k)
    if rule == "fixed" or k == 1:
        return beta
    largest = 1 / (1 - beta)
    if k >= largest * (1 - 1e-9):
        raise ValueError(
            f"at {k:g} times the batch that they were tuned at, the beta {beta:g} would become 1 - {k:g} x (1 - "
            f"{beta:g}), which is not above 0: the rule holds well below {largest:.4g} times"
        )
    return 1 - k * (1 - beta)


def scaled_moments(rule: MomentRule, k: float, betas: Betas, eps: float) -> tuple[Betas, float]:
    """Adam's betas and eps for a batch k times as large as the one they were tuned at.

    - "fixed": unchanged.
    - "half_life": the second beta to the power k, so that its half-life in samples stays: Marek et al. 2025 (arXiv
      2507.07101).
    - "sde": 1 - k (1 - beta) for each beta, and eps / sqrt(k). With the square-root rule of the learning rate, Adam
      then approximates the same stochastic differential equation at any k that is small compared with 1 / (1 - beta):
      Malladi et al. 2022 (arXiv 2205.10287).

    Raises:
        ValueError: The rule does not hold at this k.
    """
    if rule == "fixed" or k == 1:
        return betas, eps
    second = scaled_average(rule, k, betas[1])
    if rule == "sde":
        return (scaled_average(rule, k, betas[0]), second), eps / math.sqrt(k)
    if betas[0] ** 2 >= math.sqrt(second):
        raise ValueError(
            f"at {k:g} times the batch that they were tuned at, the second beta becomes {betas[1]:g} ** {k:g} = "
            f"{second:.4g}, too small for the first, {betas[0]:g}: Adam needs beta1 ** 2 < sqrt(beta2) (Kingma and Ba "
            "2015, theorem 4.1)"
        )
    return (betas[0], second), eps
