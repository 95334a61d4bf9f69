"""Reads of tensors that the host would have to wait for, if the model were on a GPU; found on the CPU."""

import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their result, or its shape, is a number on the host.
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
READING_METHODS = ("tolist", "numpy", "cpu", "__array__")


class HostReads(TorchDispatchMode):
    """Follows what would be on the device, and notes in `found` where it is read.

    What is computed from a tensor on the device, or written over with it, is on the device, too, and so is what is made
    with an explicit `device`; a tensor that was made on the host, such as a request to stop or the indices of samples,
    is not. The host also waits for what is copied to the device from memory that is not pinned: the numbers of
    `torch.tensor(…, device=…)`, and tensors that are not contiguous, which are first copied to such memory. What cannot
    be told from a tensor's use on the CPU, such as a copy by `.to("cpu")`, is left to CUDA's own check.
    """

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self._storages: set[StorageWeakRef] = set()

    def put_on_device(self, values: object) -> None:
        """Take the tensors in `values`, however nested, for tensors on the device from here on."""
        for tensor in _tensors(values):
            self._storages.add(StorageWeakRef(tensor.untyped_storage()))

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        keywords = keywords or {}
        if not self.has([arguments, keywords]):
            return function(*arguments, **keywords)
        if function._schema.name in READS or _indexes_by_mask(function, arguments):
            self.note(function._schema.name)
        results = function(*arguments, **keywords)
        self.put_on_device(results)
        for number, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.put_on_device(keywords.get(argument.name, arguments[number] if number < len(arguments) else ()))
        return results

    def __enter__(self):
        self._patches = [patch.object(torch.Tensor, name, self._noting(name)) for name in READING_METHODS]
        for each in self._patches:
            each.start()
        self._placements = _Placements(self)
        self._placements.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        result = super().__exit__(*exception)
        self._placements.__exit__(*exception)
        for each in self._patches:
            each.stop()
        return result

    def _noting(self, name):
        method = getattr(torch.Tensor, name)

        def noting(tensor, *arguments, **keywords):
            if self.has(tensor):
                self.note(name)
            return method(tensor, *arguments, **keywords)

        return noting

    def has(self, values: object) -> bool:
        """Whether any of the tensors in `values` is on the device."""
        return any(StorageWeakRef(tensor.untyped_storage()) in self._storages for tensor in _tensors(values))

    def note(self, what: str) -> None:
        """Add what was read, and who reads it, to `found`."""
        frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        callers = [frame for frame in frames if "/torch/" not in frame.filename]
        self.found.append(f"{what} in {Path(callers[-1].filename).name}: {callers[-1].name}")


class _Placements(TorchFunctionMode):
    """Takes what a call puts on a device that it names for tensors on the device.

    Operations, which `HostReads` sees, do not tell whether the caller named it.
    """

    def __init__(self, reads: HostReads):
        super().__init__()
        self._reads = reads

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        results = function(*arguments, **keywords)
        moves = function is torch.Tensor.to
        device = keywords.get("device", arguments[1] if moves and len(arguments) > 1 else None)
        named = isinstance(device, str | int | torch.device)
        if not named or self._reads.has(arguments):
            return results
        if function in (torch.tensor, torch.as_tensor):
            self._reads.note(f"torch.{function.__name__}")
        elif moves and not arguments[0].is_contiguous():
            self._reads.note("to (not contiguous)")
        self._reads.put_on_device(results)
        return results


def _indexes_by_mask(function, arguments) -> bool:
    return function._schema.name == "aten::index" and any(mask.dtype == torch.bool for mask in _tensors(arguments[1]))


def _tensors(values: object) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, DTensor):
            yield leaf._local_tensor
        elif isinstance(leaf, torch.Tensor):
            yield leaf
