"""Tensor files are those of `safetensors`, read by its own code; nothing else is read, and nothing executed."""

import pickle

import pytest
import safetensors.numpy
import safetensors.torch
import torch

from largebatch.storage.files import read_record
from largebatch.storage.layout import CheckpointError
from largebatch.storage.tensors import DTYPE_NAMES, TensorFiles, save_tensors
from saving import Bomb, assert_same

FILE = "rank_00000.safetensors"


def saved(folder, tensors):
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    record = save_tensors(folder / FILE, shapes, tensors.values())
    assert record == read_record(folder / FILE)
    return folder / FILE


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_every_dtype_is_read_by_safetensors_and_by_us(dtype, shape, tmp_path):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    path = saved(tmp_path, {"odd": torch.tensor([True]), "tensor": tensor})
    assert_same(safetensors.torch.load_file(path)["tensor"], tensor)
    assert_same(TensorFiles(tmp_path).read(FILE, "tensor"), tensor)


def test_what_is_not_contiguous_or_needs_a_gradient_is_written_in_row_major_order(tmp_path):
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    tensors = {"columns": parameter.t(), "slice": torch.arange(10)[3:9:2], "channels": torch.arange(6.0).expand(2, 6)}
    found = safetensors.torch.load_file(saved(tmp_path, tensors))
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)


def test_one_tensor_is_asked_for_after_the_other(tmp_path):
    sizes = []

    def tensors():
        for value in (1.0, 2.0):
            sizes.append((tmp_path / FILE).stat().st_size)
            yield torch.full((1000,), value)

    shapes = dict.fromkeys("ab", (torch.float32, (1000,)))
    save_tensors(tmp_path / FILE, shapes, tensors())
    assert sizes[1] - sizes[0] == 4000


@pytest.mark.parametrize("tensors", [[torch.ones(2, 2)], [torch.ones(4).double()], [], [torch.ones(4)] * 2])
def test_tensors_that_are_not_as_announced_are_an_error(tensors, tmp_path):
    with pytest.raises((AssertionError, ValueError)):
        save_tensors(tmp_path / FILE, {"x": (torch.float32, (4,))}, tensors)


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (2, 5), (6, 6)])
def test_ranges_are_read_in_row_major_order(start, stop, tmp_path):
    saved(tmp_path, {"odd": torch.tensor([True]), "x": torch.arange(10, 16).view(2, 3)})
    assert TensorFiles(tmp_path).read_range(FILE, "x", start, stop).tolist() == list(range(10, 16))[start:stop]


@pytest.mark.parametrize(("name", "start", "stop"), [("x", 4, 7), ("x", 6, 8), ("none", 0, 1), ("matrix", 3, 5)])
def test_ranges_that_are_not_there_are_refused(name, start, stop, tmp_path):
    saved(tmp_path, {"x": torch.arange(6), "matrix": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=FILE):
        TensorFiles(tmp_path).read_range(FILE, name, start, stop)


def test_a_dtype_that_is_not_read_is_named(tmp_path):
    safetensors.torch.save_file({"weight": torch.zeros(2, dtype=torch.float8_e4m3fn)}, tmp_path / FILE)
    with pytest.raises(
        CheckpointError, match=r"rank_00000.safetensors has weight in F8_E4M3, which is not one of .*BF16"
    ):
        TensorFiles(tmp_path).names(FILE)


def test_what_is_no_whole_file_of_safetensors_is_refused_and_not_executed(tmp_path):
    whole = saved(tmp_path, {"x": torch.arange(6)}).read_bytes()
    bomb = tmp_path / "exploded"
    for content in (pickle.dumps({"x": Bomb(bomb)}), b"", whole[:-1], whole[:-30]):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            TensorFiles(tmp_path).read(FILE, "x")
    assert not bomb.exists()


def test_a_file_that_is_missing_or_a_folder_is_refused(tmp_path):
    (tmp_path / FILE).mkdir()
    for name in (FILE, "rank_00001.safetensors"):
        with pytest.raises(CheckpointError, match=r"cannot be read|is missing"):
            TensorFiles(tmp_path).read(name, "x")
