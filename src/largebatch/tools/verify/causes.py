"""The likely cause of differences, as far as it follows from which combinations differ."""

from collections.abc import Callable, Mapping, Sequence

from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.verify.verification import Combination, Row, Verification


def _steps_pieces(each: Combination) -> bool:
    """Whether the optimizer steps parts of parameters, or, as under ZeRO even on one process, several as one."""
    steps = STRATEGIES[each.strategy].steps
    return steps == "flat pieces of several parameters" or (steps == "rows of parameters" and each.world_size > 1)


_CAUSES: Mapping[str, Callable[[Combination, int], bool]] = {
    "only other micro-batch sizes differ: something is a mean over the micro-batch instead of a sum, or depends on "
    "which samples share one": lambda each, usual: each.micro_batch_size != usual,
    "only where parameters are sharded or flattened do they differ: the optimizer takes a norm, a mean or a maximum of "
    "such a piece for that of a parameter": lambda each, _: _steps_pieces(each),
    "only several processes differ: something depends on the rank or the number of processes, such as a process's "
    "share of the data, a random draw, or a mean over its own samples": lambda each, _: each.world_size > 1,
}
ONLY_IN_BF16 = (
    "in fp32 the first of them agrees: something is computed in bf16 that depends on how the batch is divided, such as "
    "a sum over samples; compute it in run.dtype"
)


def likely_cause(rows: Sequence[Row], verification: Verification) -> str | None:
    """What all combinations that differ have in common, and none that agrees; None if it cannot be told.

    In bf16, the first of them is trained once more in fp32.

    Args:
        rows: The outcomes of all combinations.
        verification: What they are outcomes of.
    """
    # What a resumed run differs in is told where it is found.
    compared = [row for row in rows if not row.combination.resumes]
    differing = [row.combination for row in compared if row.verdict == "differs"]
    agreeing = [row.combination for row in compared if row.verdict == "agrees"]
    config = verification.config
    if differing and config.precision == "bf16" and verification.agrees_in_fp32(differing[0]):
        return ONLY_IN_BF16
    usual = config.batch.micro_batch_size
    for cause, applies in _CAUSES.items():
        common = all(applies(each, usual) for each in differing)
        if differing and agreeing and common and not any(applies(each, usual) for each in agreeing):
            return cause
    return None
