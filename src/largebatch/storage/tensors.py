"""Tensors to and from `safetensors` files, one at a time, so that no file is ever in memory as a whole."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from largebatch.storage.files import FileRecord, write_file
from largebatch.storage.layout import BUFFER, CheckpointError, Manifest, Shape, rank_file, reading
from largebatch.system.regular_file import open_to_read

Shapes = Mapping[str, tuple[torch.dtype, Shape]]

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


def save_tensors(path: Path, shapes: Shapes, tensors: Iterable[torch.Tensor]) -> FileRecord:
    """Write tensors one by one; `safetensors` itself would take them all at once and copy them.

    Args:
        path: The file.
        shapes: Dtype and shape of each tensor by name, in the order of the file.
        tensors: The tensors, in that order, on any device; each may be freed when the next is asked for.
    """

    def parts() -> Iterator[memoryview]:
        # `transformers` asks for the format.
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, (dtype, shape) in shapes.items():
            end = position + prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(header).encode()
        # The data begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        yield memoryview(len(text).to_bytes(8, "little") + text)
        for (dtype, shape), tensor in zip(shapes.values(), tensors, strict=True):
            assert tensor.dtype == dtype
            assert tuple(tensor.shape) == tuple(shape)
            yield _content(tensor)

    return write_file(path, parts())


def _content(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its dtype, its shape, and the byte at which it begins."""

    dtype: torch.dtype
    shape: Shape
    offset: int


class TensorFiles(ExitStack):
    """Reads ranges of the tensors in the files of a folder.

    CheckpointError if they are not what they should be, OSError if they cannot be read now.

    `safetensors` checks the files, and would map them into memory; reading them is faster, and takes no more memory
    than the range.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self._opened: dict[str, tuple[BufferedReader, dict[str, Stored]]] = {}

    def read(self, file: str, name: str) -> torch.Tensor:
        """A whole tensor, in its shape."""
        shape = self.find(file, name).shape
        return self.read_range(file, name, 0, prod(shape)).view(shape)

    def read_range(self, file: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a tensor, in row-major order."""
        stored = self.find(file, name)
        if stop > prod(stored.shape):
            raise CheckpointError(f"{file} has {name} in shape {stored.shape}, without elements {start} to {stop}")
        values = torch.empty(stop - start, dtype=stored.dtype)
        opened, _ = self._open(file)
        with reading(file):
            opened.seek(stored.offset + start * stored.dtype.itemsize)
            if opened.readinto(values.view(torch.uint8).numpy().data) < values.nbytes:
                raise CheckpointError(f"{file} was cut short")
        return values

    def names(self, file: str) -> list[str]:
        """The names of all tensors in a file."""
        return list(self._open(file)[1])

    def find(self, file: str, name: str) -> Stored:
        """A tensor in a file, without reading it."""
        _, stored = self._open(file)
        if name not in stored:
            raise CheckpointError(f"{file} cannot be read: it has no tensor {name}")
        return stored[name]

    def _open(self, file: str) -> tuple[BufferedReader, dict[str, Stored]]:
        if file not in self._opened:
            path = self._folder / file
            with reading(file):
                opened = self.enter_context(open_to_read(path, follow_links=True))
                with safe_open(path, framework="pt"):
                    # It has checked the header: shapes, dtypes, and that the tensors fill the file.
                    pass
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            dtypes = {text: dtype for dtype, text in DTYPE_NAMES.items()}
            stored = {}
            for name, about in header.items():
                dtype = about["dtype"]
                if dtype not in dtypes:
                    raise CheckpointError(f"{file} has {name} in {dtype}, which is not one of {', '.join(dtypes)}")
                stored[name] = Stored(dtypes[dtype], tuple(about["shape"]), 8 + length + about["data_offsets"][0])
            self._opened[file] = opened, stored
        return self._opened[file]


def whole_weight(files: TensorFiles, vector: str, manifest: Manifest) -> torch.Tensor:
    """A whole vector of weights, or of their averages, in the shape of its parameter."""
    _, _, name = vector.partition("/")
    shape = manifest.parameters[name].shape
    parts = [files.read(rank_file(part.rank), vector) for part in manifest.vectors[vector]]
    return torch.cat(parts).view(shape) if parts else torch.empty(shape)


def common_buffer(files: TensorFiles, name: str, manifest: Manifest) -> torch.Tensor:
    """A buffer for all processes: the mean where they had different running statistics of BatchNorm.

    Raises:
        CheckpointError: They had different values of another buffer.
    """
    first, *others = (files.read(rank_file(rank), f"{BUFFER}/{name}") for rank in manifest.buffers[name])
    if not others:
        return first
    if name not in manifest.running_statistics:
        raise CheckpointError(
            f"its buffer {name} differs between processes, as one does that `forward` updates from the samples of its "
            f"process; update it in train.py, alike on all of them, or resume on {manifest.world_size}"
        )
    values = [first.double() * (manifest.world_size - len(others)), *(other.double() for other in others)]
    return (torch.stack(values).sum(dim=0) / manifest.world_size).to(first.dtype)


def fingerprint(*tensors: torch.Tensor) -> str:
    """A checksum of the tensors' content, the same on every device and in every memory layout."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(_content(tensor))
    return digest.hexdigest()
