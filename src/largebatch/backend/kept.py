"""State of the task's own in checkpoints: small, the same on every process, and JSON in the checkpoint's manifest."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from largebatch.errors import TrainingFailed, UserError
from largebatch.storage.tensors import DTYPE_NAMES

if TYPE_CHECKING:
    from largebatch.backend.base import Backend

MAX_ELEMENTS = 2**16  # of a tensor
TENSOR = "tensor of"
"""The key of a tensor's dtype; its shape and its elements are beside it."""


class KeptStates:
    """The objects that `Run.keep` has registered, by name."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    def add(self, name: str, state: Any) -> None:
        """Register an object; UserError if it has no state, or its name is taken."""
        if not (hasattr(state, "state_dict") and hasattr(state, "load_state_dict")) or name in self._states:
            raise UserError(
                f"run.keep: {name} is a {type(state).__name__}; register an object with state_dict and "
                "load_state_dict, once, under a name of its own"
            )
        self._states[name] = state

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give each object its state in a checkpoint; UserError if that has others."""
        if different := saved.keys() ^ self._states.keys():
            name = min(different)
            here, there = ("the checkpoint", "train.py") if name in saved else ("train.py", "the checkpoint")
            raise UserError(
                f"run.keep: {here} has a state {name}, but {there} has not; register the same, or start over"
            )
        for name, state in self._states.items():
            state.load_state_dict(_decoded(saved[name]))

    def check(self, backend: "Backend") -> dict[str, Any]:
        """The states as JSON; an error on all processes if one cannot be kept, or if they are not the same on all."""
        with backend.raise_on_all_ranks():
            mine = {name: _encoded(state.state_dict(), name) for name, state in self._states.items()}
        digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
        if len(set(backend.gather_objects(digest))) > 1:
            raise TrainingFailed(
                f"run.keep: the state of {', '.join(mine)} is not the same on all processes, so a checkpoint cannot "
                "hold it; compute it from numbers that all have, such as the results of run.evaluate",
                everywhere=True,
            )
        return mine


def _encoded(value: Any, place: str) -> Any:
    """A value as JSON; UserError, with its `place`, if it would not be the same after reading it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encoded(each, f"{place}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encoded(each, f"{place}.{key}") for key, each in value.items()}
    if type(value) is torch.Tensor and value.dtype in DTYPE_NAMES and value.numel() <= MAX_ELEMENTS:
        return {TENSOR: DTYPE_NAMES[value.dtype], "shape": list(value.shape), "elements": value.flatten().tolist()}
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise UserError(
        f"run.keep: {place} ({type(value).__name__}{shape}) cannot be kept; a state may have numbers, texts, lists, "
        f"objects with texts as keys, and whole tensors of at most {MAX_ELEMENTS:,} elements"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if isinstance(value, dict) and TENSOR in value:
        dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        return torch.tensor(value["elements"], dtype=dtypes[value[TENSOR]]).view(value["shape"])
    return {key: _decoded(each) for key, each in value.items()} if isinstance(value, dict) else value
