"""Setting the initial weights of a prepared model, the ranges that each process holds, one parameter at a time."""

from typing import Protocol

import torch

from largebatch.backend.base import Backend
from largebatch.backend.state import EngineState
from largebatch.errors import BackendMismatch
from largebatch.storage.layout import WEIGHT


class StartingWeights(Protocol):
    """Where the initial weights of a model come from."""

    checksums: dict[str, str]
    """By parameter: a checksum of its values, or of what they depend on, which must be equal on every process."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a parameter, in row-major order, on the CPU."""
        ...


def set_weights(backend: Backend, weights: StartingWeights) -> None:
    """Set all parameters; every process must call it. BackendMismatch if they would start from different weights."""

    def fill(state: EngineState) -> None:
        for piece in state.pieces:
            piece.write(piece.start, weights.read(piece.vector.removeprefix(f"{WEIGHT}/"), piece.start, piece.stop))

    with torch.no_grad():
        backend.restore(fill, {}, has_states=False)
    first_seen: dict[str, tuple[int, str]] = {}
    for rank, checksums in enumerate(backend.gather_objects(weights.checksums)):
        for name, checksum in checksums.items():
            other, expected = first_seen.setdefault(name, (rank, checksum))
            if checksum != expected:
                raise BackendMismatch(
                    f"rank {rank} starts from another {name} than rank {other}; start from the same files, on machines "
                    "of one kind with the same torch"
                )
