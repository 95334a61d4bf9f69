"""The simple noise scale of gradients, tr(Sigma) / |G|^2, in samples (McCandlish et al. 2018, arXiv 1812.06162).

G is the gradient of the loss over all data, and Sigma the covariance of the gradient of one sample, so that the
gradient g of a global batch of B samples has the covariance Sigma / B. Both are estimated from g and its parts: g is
the sum of a_i = w_i g_i, where g_i is the gradient of the mean loss of a micro-batch, and w_i the micro-batch's share
of the weight of the global batch. Parts are independent, so the product of two of them has the expectation
w_i w_j |G|^2. With q = sum w_i^2, it follows, whatever the shares are and however noisy each part is, that

    (|g|^2 - sum |a_i|^2) / (1 - q)      has the expectation |G|^2, and
    (sum |a_i|^2 - q |g|^2) / (1 - q)    has the expectation tr Cov(g) = tr(Sigma) / B.

With equal shares, these are the estimates of the paper's appendix A.1. If the gradients of samples depend on their
weights, as those of long documents may differ from those of short ones, the noise scale is biased: to leading order, by
a fraction of at most 2 v (k + 1) / (k - 1) / sqrt(noise scale), for k micro-batches, where v is the standard deviation
of the weights of samples divided by their mean.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import covariance, fmean
from typing import Any

from largebatch.batch.student_t import student_t
from largebatch.words import counted, digits

WINDOW = 100
"""The number of latest measurements that a noise scale is averaged over, because it changes during training."""


def measure(squares: float, square_of_sum: float, squared_shares: float, size: int) -> dict[str, float]:
    """The estimates from one global batch, "squared_gradient" of |G|^2 and "trace" of tr(Sigma); both may be negative.

    Args:
        squares: The sum of |a_i|^2 over the parts.
        square_of_sum: |g|^2, of their sum.
        squared_shares: The sum of w_i^2, which is less than 1.
        size: B, in samples.
    """
    rest = 1 - squared_shares
    trace = size * (squares - squared_shares * square_of_sum) / rest
    return {"squared_gradient": (square_of_sum - squares) / rest, "trace": trace}


def is_measurement(line: Mapping[str, Any]) -> bool:
    """Whether a line that was read has the numbers of `measure`."""
    numbers = (line.get("squared_gradient"), line.get("trace"))
    return all(isinstance(number, float) and math.isfinite(number) for number in numbers)


def noise_scale(measurements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ratio of both means as "samples", its interval of 95 % confidence, and the number of "measurements".

    The interval is Fieller's (1954, J. R. Stat. Soc. B 16), from "low" to "high": all ratios r for which the mean of
    trace - r squared_gradient is not clearly another than 0, by Student's t. If the squared gradient is not clearly
    above 0, "high" is None: there is no upper end. If an estimate is not even positive, "not_measured" says so.
    """
    count = len(measurements)
    if count < 2:
        return {"not_measured": f"{counted(count, 'measurement')}; it takes 2, in steps of 2 or more micro-batches"}
    gradients = [each["squared_gradient"] for each in measurements]
    traces = [each["trace"] for each in measurements]
    gradient = fmean(gradients)
    trace = fmean(traces)
    if trace <= 0:
        return {"not_measured": f"the noise cannot be told from zero after {count} measurements"}
    # The interval is where a r^2 - 2 b r + c is at most 0.
    factor = student_t(count - 1) ** 2 / count
    a = gradient**2 - factor * covariance(gradients, gradients)
    b = gradient * trace - factor * covariance(gradients, traces)
    c = trace**2 - factor * covariance(traces, traces)
    to_root = b + math.sqrt(max(b * b - a * c, 0.0))
    low = c / to_root if c > 0 and to_root > 0 else 0.0
    if gradient <= 0:
        why = f"the squared gradient cannot be told from zero after {count} measurements"
        return {"not_measured": f"{why}; the noise scale is {digits(low)} samples or more"}
    return {"samples": trace / gradient, "low": low, "high": to_root / a if a > 0 else None, "measurements": count}
