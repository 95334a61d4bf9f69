"""The likely cause of differences: what differs first, and which combinations do."""

from collections.abc import Mapping, Sequence, Set

from largebatch.plan.strategies import SINGLE, STRATEGIES, StrategyEntry
from largebatch.tools.verify.verification import Combination, Row, Verification


def symptom_of(beyond: Set[str]) -> str:
    """What differs first, or alone, where these differences are larger than rounding: one of `_CAUSES`."""
    if beyond <= {"evaluation"}:
        return "evaluation"
    if beyond <= {"loss", "first_loss", "evaluation"}:
        return "reported loss"
    return next((name for name in ("first_loss", "first_grad_norm", "update") if name in beyond), "later")


def _strategy(each: Combination) -> StrategyEntry:
    # A strategy's own configs begin with its name, as zero3_offload does.
    return STRATEGIES.get(each.strategy.partition("_")[0], SINGLE)


def _traits(each: Combination, usual: int) -> Mapping[str, bool]:
    """Whether a combination divides the batch unlike the reference, which has the usual micro-batch size: by trait."""
    strategy = _strategy(each)
    return {
        "other micro-batch": each.micro_batch_size != usual,
        # Of each process, in a step.
        "other number of micro-batches": each.micro_batch_size * each.world_size != usual,
        "several processes": each.world_size > 1,
        "another division": each.world_size > 1 or each.micro_batch_size != usual,
        # The optimizer steps parts of parameters, or, as under ZeRO even on one process, several as one.
        "pieces": strategy.steps == "flat pieces of several parameters"
        or (strategy.steps == "rows of parameters" and each.world_size > 1),
        "sharded weights": strategy.shards == "the optimizer and weights",
        "copies of weights": strategy.engine == "DeepSpeed",
    }


SCALED = "scaled first loss"
_HOOK = (
    "the first loss agrees, but not its gradient: a hook changes that of each micro-batch (clip with "
    "optimizer.clip_norm), or a part of the loss does not reach it as it should"
)
_LATER = (
    "the first step and its update agree, later ones do not: something that is kept from step to step (a buffer that "
    "`forward` updates, a cache of the source, an average in train.py) depends on the process or micro-batch"
)
_OF_STATISTICS = "(running statistics: by a forward pass of its own, or an evaluation in training mode)"
# By symptom, the earliest first: the cause if exactly the combinations with a trait show it, and otherwise.
_CAUSES: Mapping[str, Mapping[str, str]] = {
    # The first loss and its gradient are multiplied by one number.
    SCALED: {
        "other micro-batch": (
            "the first loss and its gradient differ by one factor for other micro-batch sizes only: the loss is a mean "
            "over the micro-batch, or divided by what is counted in it, instead of a sum, or the source's `weight` is"
        ),
        "other number of micro-batches": (
            "where a process has another number of micro-batches in a step, the first loss and its gradient differ by "
            "one factor: the loss is divided by that number"
        ),
        "several processes": (
            "several processes differ where one does not, by one factor in the first loss and its gradient: the loss "
            "is multiplied or divided by something that depends on them, such as their number"
        ),
        "another division": (
            "whatever divides the batch in another way differs, by one factor in the first loss and its gradient: the "
            "loss is multiplied or divided by something that depends on the process and the micro-batch"
        ),
    },
    "first_loss": {
        "other micro-batch": (
            "the first loss differs for other micro-batch sizes only: samples that share a micro-batch change each "
            "other (statistics over it, sorting, padding without a mask, other samples as negatives: see "
            "coupled_features); or random numbers are drawn for it (dropout: declare uses_dropout; torch.rand in "
            "train.py: draw them in `fetch`, from `derive_seed`); or a term that is no sum over samples, such as a "
            "penalty on weights, is added in each micro-batch (multiply it by what `weight` counts there); or, if the "
            "factors are about the ratio of the sizes, the loss is a mean over each micro-batch, whose weights are "
            "unequal, instead of a sum"
        ),
        "other number of micro-batches": (
            "where a process has another number of micro-batches in a step, the first loss differs: something counts "
            "micro-batches or calls of `fetch`, as a random generator does (count by `epoch` and `step.index`, and "
            "draw in `fetch`, from `derive_seed`), or keeps the first for later ones, as a cache does"
        ),
        "several processes": (
            "several processes differ where one does not, from the first loss on: data or noise depends on the process "
            "(draw both in `fetch`, from `derive_seed(seed, name, epoch, index)`, not in train.py; dropout from "
            "torch's default generator, which only the run may seed), or the loss is divided by something that does"
        ),
        "sharded weights": (
            "only where weights are sharded does the first loss differ: weights are used outside of the forward pass "
            "of their own layer, as by a penalty in train.py, where a process does not have all of them"
        ),
        "another division": (
            "whatever divides the batch in another way differs, from the first loss on: something is kept from one "
            "micro-batch to the next (a running average, a queue or a cache in train.py or the model: change it once "
            "per step, from sums over all processes; a random generator: draw in `fetch`, from `derive_seed`), or data "
            "or noise depends on the process and the micro-batch"
        ),
    },
    "first_grad_norm": {
        "other micro-batch": (
            "the first loss agrees, but for other micro-batch sizes not its gradient: samples that share a micro-batch "
            "change each other (statistics over it), which the starting weights hide from the loss, the model "
            "draws random numbers (dropout, noise), or a hook changes the gradient of each micro-batch"
        ),
        "several processes": (
            "the first loss agrees on several processes, but not its gradient: what `dist.all_gather` and "
            "`dist.all_reduce` return has none, or a branch, a `detach` or a hook depends on the rank"
        ),
        "another division": _HOOK,
        "otherwise": _HOOK,
    },
    "update": {
        "pieces": (
            "only where parameters are sharded or flattened does the first update differ: the optimizer takes a norm, "
            "a mean or a maximum of such a piece for that of a parameter"
        ),
        "copies of weights": (
            "only under ZeRO does the first update differ: train.py changes weights after run.update, such as by a "
            "clamp, and ZeRO overwrites them with copies of its own (do it in `forward`)"
        ),
        "several processes": (
            "loss and gradient of the first step agree on several processes, but not its update: the optimizer, or "
            f"train.py, changes weights by something that depends on the process {_OF_STATISTICS}"
        ),
        "otherwise": (
            "loss and gradient of the first step agree, but not its update: the optimizer, or train.py, changes "
            f"weights by something that depends on the process or the micro-batch {_OF_STATISTICS}"
        ),
    },
    "later": {
        "other number of micro-batches": (
            "where a process has another number of micro-batches in a step, weights or losses differ after the first "
            "step: something changes in each micro-batch (an average or a teacher in train.py, a buffer that `forward` "
            "updates, as spectral_norm does); change it once per step, after run.update"
        ),
        "other micro-batch": (
            "weights or losses differ for other micro-batch sizes only, after the first step: something depends on the "
            "micro-batch that the first samples do not show (the source's `weight`, padding without a mask), or that "
            "is kept from step to step (a buffer that `forward` updates)"
        ),
        "several processes": _LATER,
        "otherwise": _LATER,
    },
    "reported loss": {
        "otherwise": (
            "gradients and weights agree, only the reported loss does not: train.py changes its value "
            "(`dist.all_reduce`, a division); give step.backward the sum over this micro-batch alone, which is summed "
            "over processes there"
        ),
    },
    "evaluation": {
        "otherwise": (
            "only evaluations differ: their values are means over the micro-batch instead of one per sample, or depend "
            "on which samples share one, or random numbers are drawn in train.py (draw them in `fetch`, whose epoch is "
            "None in an evaluation) or by dropout (leave the model in evaluation mode)"
        ),
    },
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
    # The row of a resumed run explains its differences itself.
    compared = [
        row for row in rows if row.verdict in ("reference", "agrees", "differs") and not row.combination.resumes
    ]
    differing = [row for row in compared if row.verdict == "differs"]
    # One process that differs from itself is cause enough.
    if not differing or any(row.verdict == "differs" and not row.beyond for row in rows):
        return None
    if fault := verification.fault_of_samples():
        return fault
    config = verification.config
    if config.precision == "bf16" and verification.agrees_in_fp32(differing[0].combination):
        return ONLY_IN_BF16
    return "; or ".join(_fitting(compared, config.batch.micro_batch_size)) or None


def _fitting(rows: Sequence[Row], usual: int) -> list[str]:
    """The causes of the earliest symptom that apply to the combinations that differ, and to none that agrees."""
    symptoms = [symptom_of(row.beyond) if row.verdict == "differs" else "" for row in rows]
    earliest = next(each for each in _CAUSES if each in symptoms)
    # What differs only later, or in an evaluation alone, may be a consequence of the same cause.
    differ = [each == earliest for each in symptoms]
    if earliest == "first_loss" and all(row.is_scaled for row, each in zip(rows, differ, strict=True) if each):
        earliest = SCALED
    causes = _CAUSES[earliest]
    traits = [_traits(row.combination, usual) for row in rows]
    fitting = [cause for name, cause in causes.items() if differ == [each.get(name, False) for each in traits]]
    return fitting or [cause for name, cause in causes.items() if name == "otherwise"]
