"""The experiments: recipes, batch sizes, and rules for how the learning rate follows them."""

from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]

WARMUP = "--learning_rate.warmup="
SCALING = "--learning_rate.scaling="


@dataclass(frozen=True)
class Ordering:
    """A paper's finding that one rule's result is lower than another's at a batch size.

    Args:
        lower, higher: Rules.
        batch: Samples per step.
        source: The place in the paper, with its numbers.
    """

    lower: str
    higher: str
    batch: int
    source: str


@dataclass(frozen=True)
class Experiment:
    """Runs of one recipe.

    Args:
        recipe: Its JSON.
        overrides: The overrides of the recipe in every run.
        metric: The metric of the recipe's evaluations.
        is_error: Whether it is an accuracy or a recall, of which the error, 1 - metric, is taken.
        last: Over how many of the last evaluations the median is taken.
        diverged: The result of a run whose loss is not finite: that of guessing.
        reference: The batch size that the base learning rate is tuned at.
        base_lrs: Among which.
        batches: Batch sizes; the reference is the first.
        rules: Overrides of each rule, by its name. At the reference they are all the same.
        orderings: The findings that are tested.
    """

    recipe: Path
    overrides: tuple[str, ...]
    metric: str
    is_error: bool
    last: int
    diverged: float
    reference: int
    base_lrs: tuple[float, ...]
    batches: tuple[int, ...]
    rules: dict[str, tuple[str, ...]]
    orderings: tuple[Ordering, ...]


GRADUAL = '{"duration": {"epochs": 5}, "start": "base_lr"}'
CONSTANT = '{"duration": {"epochs": 5}, "start": "base_lr", "shape": "constant"}'
GOYAL_RULES = {
    "linear, gradual warmup": (SCALING + "linear", WARMUP + GRADUAL),
    "linear, no warmup": (SCALING + "linear", WARMUP + "null"),
    "linear, constant warmup": (SCALING + "linear", WARMUP + CONSTANT),
    "square root, gradual warmup": (SCALING + "sqrt", WARMUP + GRADUAL),
    "unscaled": (SCALING + "none", WARMUP + "null"),
}
"""The rules of Goyal et al. 2017, tables 1 and 2a."""


def goyal_orderings(batch: int) -> tuple[Ordering, ...]:
    """The orderings of Goyal et al. 2017 at 32 times the reference: top-1 errors of ResNet-50, in percent."""
    gradual, none, constant, sqrt, unscaled = GOYAL_RULES
    return (
        Ordering(gradual, none, batch, "23.74 against 24.84, table 1"),
        Ordering(gradual, constant, batch, "23.74 against 25.88, table 1"),
        Ordering(none, constant, batch, "24.84 against 25.88, table 1"),
        Ordering(gradual, sqrt, batch, "23.74 against 26.22, table 2a"),
        Ordering(gradual, unscaled, batch, "23.74 against 41.67, table 2a"),
    )


ADAM_RULES = {
    "square root": (SCALING + "sqrt",),
    "linear": (SCALING + "linear",),
    "unscaled": (SCALING + "none",),
}
RECALL_DIGITS = Experiment(
    recipe=ROOT / "recipes/two_towers/clip_digits.json",
    overrides=(
        "--model.image.num_layers=2",
        "--model.text.num_layers=1",
        "--batch.micro_batch_size=64",
        '--train.duration={"epochs": 16}',
        '--learning_rate.warmup={"duration": {"epochs": 1}, "start": "zero"}',
        "--evaluation.every=null",
    ),
    metric="recall@1",
    is_error=True,
    last=1,
    diverged=0.9,  # ten names
    reference=64,
    base_lrs=(0.0005, 0.001, 0.002, 0.004),
    batches=(64, 128, 256, 512),
    rules=ADAM_RULES,
    orderings=(),
)

EXPERIMENTS = {
    "goyal_digits": Experiment(
        recipe=ROOT / "recipes/image_classification/resnet_digits.json",
        overrides=(
            "--data.image_size=8",
            "--model.hidden_sizes=[16,32]",
            "--model.depths=[1,1]",
            "--batch.micro_batch_size=16",
            '--evaluation.every={"epochs": 1}',
        ),
        metric="accuracy",
        is_error=True,
        last=5,
        diverged=0.9,
        reference=16,
        base_lrs=(0.0125, 0.025, 0.05, 0.1, 0.2),
        batches=(16, 32, 64, 128, 256, 512),
        rules=GOYAL_RULES,
        orderings=(*goyal_orderings(256), *goyal_orderings(512)),
    ),
    # Batches of few tokens, whose gradients are mostly noise, and eight times as many steps.
    "adam_documents": Experiment(
        recipe=ROOT / "recipes/causal_lm/gpt_pydoc.json",
        overrides=(
            "--model.num_layers=2",
            "--model.hidden_size=64",
            "--model.num_heads=2",
            "--data.block_size=32",
            "--data.num_train_samples=12288",
            "--data.num_eval_samples=2048",
            "--batch.micro_batch_size=4",
            '--train.duration={"samples": 24576}',
            '--learning_rate.warmup={"duration": {"samples": 2048}, "start": "zero"}',
            "--evaluation.every=null",
        ),
        metric="loss",
        is_error=False,
        last=1,
        diverged=5.545,  # log 256, of guessing bytes
        reference=4,
        base_lrs=(0.001, 0.002, 0.004, 0.008, 0.016),
        batches=(4, 8, 16, 32, 64, 128),
        rules=ADAM_RULES,
        orderings=tuple(
            Ordering(lower, higher, batch, "the square-root rule for Adam, arXiv 2006.09092 and 2205.10287")
            for batch in (32, 128)
            for lower, higher in (("square root", "linear"), ("square root", "unscaled"))
        ),
    ),
    # Contrastive losses, for which the batch is also the number of negatives.
    "recall_pydoc": Experiment(
        recipe=ROOT / "recipes/two_towers/embed_pydoc.json",
        overrides=(
            "--model.num_layers=1",
            "--data.max_tokens=64",
            "--batch.micro_batch_size=32",
            '--train.duration={"epochs": 12}',
            '--learning_rate.warmup={"duration": {"epochs": 1}, "start": "zero"}',
            "--evaluation.every=null",
        ),
        metric="recall@10",
        is_error=True,
        last=1,
        diverged=0.95,  # 10 of 200 paragraphs
        reference=32,
        base_lrs=(0.00025, 0.0005, 0.001, 0.002, 0.004),
        batches=(32, 64, 128, 256, 512),
        rules=ADAM_RULES,
        orderings=(),
    ),
    "recall_digits": RECALL_DIGITS,
    "recall_digits_fixed": replace(RECALL_DIGITS, overrides=(*RECALL_DIGITS.overrides, "--loss.learned=false")),
}
