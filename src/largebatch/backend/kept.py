"""State of the task's own in checkpoints: small, the same on every process, and JSON in the checkpoint's manifest."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from largebatch.backend.processes import Processes
from largebatch.errors import TrainingFailed, UserError, reason_of


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
            where, remedy = ("train.py", "register it") if name in saved else ("the checkpoint", "remove it again")
            over = "--resume none starts over and moves the earlier run aside"
            raise UserError(f"run.keep: {where} has no state {name}; {remedy}, or {over}")
        for name, state in self._states.items():
            try:
                state.load_state_dict(saved[name])
            except Exception as error:
                raise UserError(f"run.keep: {name} refuses its state in the checkpoint: {reason_of(error)}") from error

    def check(self, processes: Processes) -> dict[str, Any]:
        """The states as JSON; an error on all processes if one cannot be kept, or if they are not the same on all."""
        with processes.raise_on_all_ranks():
            mine = {name: _through_json(name, state.state_dict()) for name, state in self._states.items()}
        digests = {name: hashlib.sha256(json.dumps(mine[name], sort_keys=True).encode()).hexdigest() for name in mine}
        gathered = processes.gather_objects(digests)
        names = sorted({name for each in gathered for name in each})
        if differing := [name for name in names if any(each.get(name) != digests.get(name) for each in gathered)]:
            raise TrainingFailed(
                f"run.keep: the state of {', '.join(differing)} is not the same on all processes, so a checkpoint "
                "cannot hold it; compute it from numbers that all have, such as the results of run.evaluate",
                everywhere=True,
            )
        return mine


def _through_json(name: str, state: Any) -> Any:
    """A copy of a state; UserError if it would not be the same after it was written as JSON and read."""
    with suppress(TypeError, ValueError, RecursionError):
        copy = json.loads(json.dumps(state))
        if copy == state:
            return copy
    raise UserError(
        f"run.keep: the state of {name} cannot be kept; it may have numbers except NaN, texts, lists, and objects "
        "with texts as keys: write tensor.tolist() for a tensor"
    )
