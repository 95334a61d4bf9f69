"""Whole parameters and buffers from the files of a checkpoint."""

import torch

from largebatch.storage.layout import BUFFER, WEIGHT, CheckpointError, Manifest
from largebatch.storage.tensors import TensorFiles


def whole_weight(files: TensorFiles, name: str, manifest: Manifest) -> torch.Tensor:
    """A whole parameter in its shape."""
    vector, shape = f"{WEIGHT}/{name}", manifest.parameters[name].shape
    parts = [files.read(manifest.files[part.file], vector) for part in manifest.vectors[vector]]
    return torch.cat(parts).view(shape) if parts else torch.empty(shape)


def common_buffer(files: TensorFiles, name: str, manifest: Manifest) -> torch.Tensor:
    """A buffer for all processes: the mean where they had different running statistics of BatchNorm.

    Raises:
        CheckpointError: They had different values of another buffer.
    """
    first, *others = (files.read(manifest.files[number], f"{BUFFER}/{name}") for number in manifest.buffers[name])
    if not others:
        return first
    if name not in manifest.running_statistics:
        raise CheckpointError(
            f"its buffer {name} differs between the {manifest.world_size} processes that wrote it; resume on that many"
        )
    values = [first.double() * (manifest.world_size - len(others)), *(other.double() for other in others)]
    return (torch.stack(values).sum(dim=0) / manifest.world_size).to(first.dtype)
