"""The likely cause of differences, as far as it follows from which combinations differ."""

from collections.abc import Callable, Mapping, Sequence

from largebatch.plan.strategies import find_strategy
from largebatch.tools.verify.verification import UNSEEDED, Combination, Row, Verification


def _steps_pieces(each: Combination) -> bool:
    """Whether the optimizer steps parts of parameters, or, as under ZeRO even on one process, several as one."""
    steps = find_strategy(each.strategy).steps
    return steps == "flat pieces of several parameters" or (steps == "rows of parameters" and each.world_size > 1)


_CAUSES: Mapping[str, Callable[[Combination, int], bool]] = {
    "only other micro-batch sizes differ: the loss, or the values of an evaluation, are means over the micro-batch "
    "instead of sums, or depend on which samples share one": lambda each, usual: each.micro_batch_size != usual,
    "only where parameters are sharded or flattened do they differ: the optimizer takes a norm, a mean or a maximum of "
    "such a piece for that of a parameter": lambda each, _: _steps_pieces(each),
    "several processes differ where one does not: data, augmentation or dropout depends on the process (draw data from "
    "`derive_seed(seed, name, epoch, index)`, and dropout from torch's default generator), or the loss is divided by "
    "something that does": lambda each, _: each.world_size > 1,
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
    compared = [
        row for row in rows if row.verdict in ("reference", "agrees", "differs") and not row.combination.resumes
    ]
    differing = [row for row in compared if row.verdict == "differs"]
    if not differing or UNSEEDED in (row.problem for row in differing):
        return None
    config = verification.config
    if config.precision == "bf16" and verification.agrees_in_fp32(differing[0].combination):
        return ONLY_IN_BF16
    usual = config.batch.micro_batch_size
    # What depends on the process may also show at other micro-batch sizes of one process.
    at_the_usual = [row for row in compared if row.combination.micro_batch_size == usual]
    return "; or ".join(_fitting(compared, usual) or _fitting(at_the_usual, usual)) or None


def _fitting(rows: Sequence[Row], usual: int) -> list[str]:
    """The causes that apply to the combinations that differ, of which there are some, and to none that agrees."""
    differ = [row.verdict == "differs" for row in rows]
    causes = [
        cause for cause, applies in _CAUSES.items() if differ == [applies(row.combination, usual) for row in rows]
    ]
    return causes if any(differ) else []
