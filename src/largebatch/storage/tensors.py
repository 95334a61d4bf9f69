"""Tensors in and out of `safetensors` files, one at a time, so that no file is ever in memory as a whole."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from largebatch.storage.files import FileRecord, write_file
from largebatch.storage.layout import CheckpointError

# https://github.com/huggingface/safetensors#format
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_tensors(
    path: Path,
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write tensors as they come; `safetensors` itself would take them all at once and copy them.

    Args:
        path: The file.
        shapes: Dtype and shape of each tensor by name, in the order of the file.
        tensors: The tensors, in that order, on any device; each may be let go of when the next is asked for.
        metadata: Text for the file's header.
    """
    return write_file(path, _parts(shapes, tensors, metadata or {}))


def _parts(
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str],
) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    # Data begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for (dtype, shape), tensor in zip(shapes.values(), tensors, strict=True):
        assert tensor.dtype == dtype
        assert tuple(tensor.shape) == tuple(shape)
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


class TensorFiles:
    """Reads ranges of the flat tensors in the files of a folder; files are opened when they are needed."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, Any] = {}

    def read(self, file: str, name: str) -> torch.Tensor:
        """A whole tensor.

        Raises:
            CheckpointError: The file is none of `safetensors`, or has no such tensor; likewise below.
        """
        with _checked(file):
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        return tensor

    def read_range(self, file: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a flat tensor."""
        with _checked(file):
            tensor: torch.Tensor = self._open(file).get_slice(name)[start:stop]
        if tensor.shape != (stop - start,):
            raise CheckpointError(f"{file} has fewer elements of {name} than the manifest says")
        return tensor

    def dtype(self, file: str, name: str) -> torch.dtype:
        """Of a tensor in a file."""
        known = {text: dtype for dtype, text in DTYPE_NAMES.items()}
        with _checked(file):
            return known[self._open(file).get_slice(name).get_dtype()]

    def shape(self, file: str, name: str) -> tuple[int, ...]:
        """Of a tensor in a file."""
        with _checked(file):
            return tuple(self._open(file).get_slice(name).get_shape())

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt")
        return self._files[file]


@contextmanager
def _checked(file: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, LookupError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
