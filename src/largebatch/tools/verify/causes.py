"""The likely cause of differences, as far as it follows from which combinations differ."""

from collections.abc import Callable, Mapping, Sequence

from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.verify.verification import Combination, Row

_CAUSES: Mapping[str, Callable[[Combination, int], bool]] = {
    "only other micro-batch sizes differ: something is a mean over the micro-batch instead of a sum, or depends on "
    "which samples share one": lambda each, usual: each.micro_batch_size != usual,
    "only several processes with sharded state differ: the optimizer takes a norm, a mean or a maximum of a shard for "
    "that of a parameter": lambda each, _: each.world_size > 1 and STRATEGIES[each.strategy].shards != "nothing",
    "only several processes differ: something depends on the rank or the number of processes, such as a process's "
    "share of the data, a random draw, or a mean over its own samples": lambda each, _: each.world_size > 1,
}


def likely_cause(rows: Sequence[Row], micro_batch_size: int) -> str | None:
    """What all combinations that differ have in common, and none that agrees; None if it cannot be told.

    Args:
        rows: The outcomes of all combinations.
        micro_batch_size: That of the reference.
    """
    differing = [row.combination for row in rows if row.verdict == "differs"]
    agreeing = [row.combination for row in rows if row.verdict == "agrees"]
    for cause, applies in _CAUSES.items():
        common = all(applies(each, micro_batch_size) for each in differing)
        if differing and agreeing and common and not any(applies(each, micro_batch_size) for each in agreeing):
            return cause
    return None
