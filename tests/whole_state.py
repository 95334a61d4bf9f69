"""The whole state of a model whose parts are on several processes, put together without the library's files."""

from math import prod

import numpy as np


def whole_state(backend, kind: str = "weight") -> dict[str, np.ndarray]:
    """All weights, or states of another kind, and this process's buffers, by name; every process must call this."""
    state = backend.engine_state()
    mine = [
        (piece.vector, piece.owned, str(piece.tensor.dtype).removeprefix("torch."), piece.read(*piece.owned).tolist())
        for piece in state.pieces
        if piece.vector.startswith(f"{kind}/") and piece.owned[0] < piece.owned[1]
    ]
    parts = [part for everyones in backend.gather_objects(mine) for part in everyones]
    found = {}
    for name, about in state.parameters.items():
        own = [part[1:] for part in parts if part[0] == f"{kind}/{name}"]
        vector = np.concatenate([np.array(values, dtype) for _, dtype, values in sorted(own)])
        assert len(vector) == prod(about.shape)
        found[name] = vector.reshape(about.shape)
    return found | {name: buffer.numpy(force=True).copy() for name, buffer in state.buffers.items()}
