"""The fields in which two configs would train differently."""

from collections.abc import Iterable, Mapping
from typing import Any

from largebatch.config.recipe import RecipeConfig, as_json, flatten

# Fields of the config that change speed, memory, or what is measured or kept, but never the training.
NOT_PART_OF_TRAINING = (
    "$schema",
    "data.num_workers",
    "data.prepare",
    "train.stop_after_steps",
    "train.rehearse_largest_batch",
    "evaluation",
    "checkpoint",
    "faults",
    "compute",
    "logging",
    "expected",
    "demonstration",
    "debug_model",
)


def differences(recorded: Mapping[str, Any], config: RecipeConfig) -> dict[str, tuple[Any, Any]]:
    """The fields whose change would train something else: their values in a recorded config, and now.

    A field that the recorded config lacks is of a later version, whose default is what was trained before.
    """
    theirs = flatten(recorded)
    mine = flatten(as_json(config))
    free = {*NOT_PART_OF_TRAINING, *config.free_on_resume}
    model = config.model
    # Synchronized BatchNorm depends on its product with the number of processes; see `run.resume`.
    per_micro_batch = model.uses_batch_norm and not model.synchronizes_batch_norm
    if not (per_micro_batch or model.uses_dropout):
        free.add("batch.micro_batch_size")
    # Text was blocks or documents, and is always blocks now.
    if theirs.get("data.samples") == "blocks" and "data.samples" not in mine:
        free.add("data.samples")
    given = flatten(config.model_dump(mode="json", by_alias=True, exclude_defaults=True))
    known = theirs.keys() | given.keys()
    return {
        name: (theirs.get(name), mine.get(name))
        for name in sorted(theirs.keys() | mine.keys())
        if theirs.get(name) != mine.get(name) and is_within(name, known) and not is_within(name, free)
    }


def is_within(name: str, fields: Iterable[str]) -> bool:
    """Whether a field is one of these, or inside one."""
    return any(name == other or name.startswith(f"{other}.") for other in fields)
