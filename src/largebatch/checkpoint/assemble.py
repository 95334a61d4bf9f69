"""Whole parameters and buffers, put together from the files of a checkpoint."""

import torch

from largebatch.storage.layout import BUFFER, WEIGHT, CheckpointError, Manifest
from largebatch.storage.tensors import TensorFiles


def whole_weight(files: TensorFiles, name: str, manifest: Manifest) -> torch.Tensor:
    """A parameter in its shape."""
    vector, shape = f"{WEIGHT}/{name}", manifest.parameters[name].shape
    parts = [files.read(part.file, vector) for part in manifest.vectors[vector]]
    return torch.cat(parts).view(shape) if parts else torch.empty(shape)


def common_buffer(files: TensorFiles, name: str, manifest: Manifest) -> torch.Tensor:
    """One value of a buffer that may have differed between processes: the mean of BatchNorm's running statistics.

    Raises:
        CheckpointError: Another buffer differed.
    """
    holders = manifest.buffers[name]
    first = files.read(holders[0], f"{BUFFER}/{name}")
    if len(holders) == 1:
        return first
    if name not in manifest.running_statistics:
        raise CheckpointError(
            f"its buffer {name} differs between the {manifest.world_size} processes that wrote it; resume on as many"
        )
    values = [first.double() * (manifest.world_size - len(holders) + 1)]
    values += [files.read(file, f"{BUFFER}/{name}").double() for file in holders[1:]]
    return (torch.stack(values).sum(dim=0) / manifest.world_size).to(first.dtype)
