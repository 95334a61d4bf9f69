"""Sets the state of a process under any strategy, range by range: from a checkpoint, or to initial weights."""

from pathlib import Path
from typing import Protocol

import torch

from largebatch.backend.base import Backend
from largebatch.backend.state import EngineState
from largebatch.errors import BackendMismatch, UserError, file_errors
from largebatch.storage.layout import BUFFER, WEIGHT, CheckpointError, Manifest, overlaps, rank_file
from largebatch.storage.tensors import TensorFiles, common_buffer


def load(backend: Backend, folder: Path, manifest: Manifest) -> None:
    """Set the state of this process to that of a checkpoint; every process must call it.

    At most one piece at a time is in memory besides the state itself.

    Raises:
        UserError: The checkpoint is of a different model or optimizer, or its files are not what the manifest says.
        StorageError: It cannot be read now.
    """

    def fill(state: EngineState) -> None:
        try:
            _check_same_model(state, manifest)
            remedy = "correct that, or resume from another checkpoint"
            with file_errors(f"the checkpoint {folder} cannot be read", remedy), TensorFiles(folder) as files:
                for piece in state.pieces:
                    for part, place in overlaps(manifest.vectors[piece.vector], piece.start, piece.stop):
                        stop = place + part.stop - part.start
                        piece.write(part.start, files.read_range(rank_file(part.rank), piece.vector, place, stop))
                _load_buffers(backend, files, state, manifest)
        except CheckpointError as error:
            raise UserError(f"the checkpoint {folder} cannot be loaded: {error}") from error

    # The optimizer has states, scalars or vectors, for the parameters that it has stepped.
    with_vectors = {vector.partition("/")[2] for vector in manifest.vectors if not vector.startswith(f"{WEIGHT}/")}
    scalars = {name: info.scalars for name, info in manifest.parameters.items() if info.scalars or name in with_vectors}
    backend.restore(fill, scalars)


def _check_same_model(state: EngineState, manifest: Manifest) -> None:
    differing = (state.parameters.keys() ^ manifest.parameters.keys()) | (
        state.buffers.keys() ^ manifest.buffers.keys()
    )
    if differing:
        raise CheckpointError(f"it and the model do not both have {min(differing)}")
    for name, parameter in state.parameters.items():
        if (stored := manifest.parameters[name].shape) != parameter.shape:
            raise CheckpointError(
                f"its parameter {name} is of shape {stored}, but the model's is of shape {parameter.shape}"
            )
    for piece in state.pieces:
        if piece.vector not in manifest.vectors:
            raise CheckpointError(
                f"it has no {piece.vector}, which this optimizer needs; restore the earlier section optimizer, or "
                "start over with --resume none"
            )


def _load_buffers(backend: Backend, files: TensorFiles, state: EngineState, manifest: Manifest) -> None:
    for name, buffer in state.buffers.items():
        if manifest.world_size == backend.world_size:
            holders = manifest.buffers[name]
            holder = backend.rank if backend.rank in holders else holders[0]
            value = files.read(rank_file(holder), f"{BUFFER}/{name}")
        else:
            value = common_buffer(files, name, manifest)
        if value.shape != buffer.shape:
            raise CheckpointError(f"its buffer {name} is of shape {tuple(value.shape)}, but the model's is not")
        buffer.copy_(value)


class StartingWeights(Protocol):
    """A source of a model's initial weights."""

    checksums: dict[str, str]
    """A checksum of each parameter's values, or of what they depend on, which must be equal on every process."""
    buffers: dict[str, torch.Tensor]
    """The buffers that do not start as the model sets them, such as BatchNorm's statistics."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a parameter, in row-major order, on the CPU."""
        ...


def set_weights(backend: Backend, weights: StartingWeights) -> None:
    """Set all parameters, and buffers that weights come with; every process must call it.

    Raises:
        BackendMismatch: Processes would start from different weights.
    """

    def fill(state: EngineState) -> None:
        for piece in state.pieces:
            piece.write(piece.start, weights.read(piece.vector.removeprefix(f"{WEIGHT}/"), piece.start, piece.stop))
        for name, value in weights.buffers.items():
            state.buffers[name].copy_(value)

    with torch.no_grad():
        backend.restore(fill, {})
    first_seen: dict[str, tuple[int, str]] = {}
    for rank, checksums in enumerate(backend.gather_objects(weights.checksums)):
        for name, checksum in checksums.items():
            other, expected = first_seen.setdefault(name, (rank, checksum))
            if checksum != expected:
                raise BackendMismatch(
                    f"rank {rank} starts with a different {name} than rank {other}; use the same files, machines of "
                    "the same kind and the same version of torch on all ranks"
                )
