"""Reading a checkpoint into a process of any strategy: the ranges it holds, from whichever files have them."""

from pathlib import Path

from largebatch.backend.base import Backend
from largebatch.backend.state import EngineState
from largebatch.checkpoint.assemble import common_buffer
from largebatch.errors import UserError
from largebatch.storage.layout import BUFFER, CheckpointError, Manifest, overlaps, rank_file
from largebatch.storage.tensors import TensorFiles


def load(backend: Backend, folder: Path, manifest: Manifest) -> None:
    """Set the state of this process to that of a checkpoint; every process must call it.

    At most one piece is in memory besides the state itself. UserError if the checkpoint is of another model or
    optimizer, or its files are not what the manifest says.
    """

    def fill(state: EngineState) -> None:
        try:
            _check_same_model(state, manifest)
            with TensorFiles(folder) as files:
                for piece in state.pieces:
                    for part, place in overlaps(manifest.vectors[piece.vector], piece.start, piece.stop):
                        values = files.read_range(part.file, piece.vector, place, place + part.stop - part.start)
                        piece.write(part.start, values)
                _load_buffers(backend, files, state, manifest)
        except CheckpointError as error:
            raise UserError(f"the checkpoint {folder} cannot be loaded: {error}") from error

    scalars = {name: parameter.scalars for name, parameter in manifest.parameters.items()}
    backend.restore(fill, scalars, has_states=bool(manifest.kinds) or any(scalars.values()))


def _check_same_model(state: EngineState, manifest: Manifest) -> None:
    mine = {name: parameter.shape for name, parameter in state.parameters.items()}
    theirs = {name: parameter.shape for name, parameter in manifest.parameters.items()}
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            raise CheckpointError(
                f"its parameter {name} is {_shape(theirs.get(name))}, the model's is {_shape(mine.get(name))}"
            )
    for name in [*state.buffers, *manifest.buffers]:
        if (name in state.buffers) != (name in manifest.buffers):
            raise CheckpointError(f"{'it' if name in state.buffers else 'the model'} has no buffer {name}")
    missing = [piece.vector for piece in state.pieces if piece.vector not in manifest.vectors]
    if missing:
        raise CheckpointError(f"it has no {missing[0]}, which this optimizer needs")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def _load_buffers(backend: Backend, files: TensorFiles, state: EngineState, manifest: Manifest) -> None:
    for name, buffer in state.buffers.items():
        holders = manifest.buffers[name]
        if manifest.world_size == backend.world_size:
            mine = rank_file(backend.rank)
            value = files.read(mine if mine in holders else holders[0], f"{BUFFER}/{name}")
        else:
            value = common_buffer(files, name, manifest)
        if value.shape != buffer.shape:
            raise CheckpointError(f"its buffer {name} is {_shape(tuple(value.shape))}, the model's is not")
        buffer.copy_(value)
