"""The collectives that a process starts.

They are counted where every strategy's calls meet, torch's dispatcher: DDP calls it from C++, FSDP2 and DeepSpeed from
Python, DTensor through functional collectives.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Volume in multiples of the whole tensor, which all processes together have or get: a ring reduces and gathers in two
# rounds what it reduces or gathers in one.
VOLUME = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "reduce": 1, "broadcast": 1, "barrier": 0}


class Collective(NamedTuple):
    """A collective that was started.

    Args:
        kind: One of VOLUME.
        elements: Elements of the whole tensor that is reduced, broadcast or gathered.
        dtype: The dtype of the tensor.
        ranks: The processes that take part.
    """

    kind: str
    elements: int
    dtype: torch.dtype
    ranks: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Bytes, by the convention of VOLUME."""
        return VOLUME[self.kind] * self.elements * self.dtype.itemsize

    @property
    def short(self) -> tuple[str, int, torch.dtype]:
        """What it is, of how many elements, of what."""
        return self.kind, self.elements, self.dtype


def _group_of(arguments: Sequence[Any]) -> distributed.ProcessGroup:
    """The group among an operator's arguments: an object, or a name."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return distributed.ProcessGroup.unbox(argument)
        if isinstance(argument, distributed.ProcessGroup):
            return argument
    return distributed.distributed_c10d._resolve_process_group(arguments[-1])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)]


# The operators, what they are, and which argument is the whole tensor.
OPERATORS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_": ("reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::barrier": ("barrier", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
}
NO_COLLECTIVES = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class Recorder(TorchDispatchMode):
    """Inside of it, this thread's collectives are noted in `started`; one that is not in the tables above raises."""

    def __init__(self):
        super().__init__()
        self.started: list[Collective] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if any(issubclass(each, DTensor) for each in types):
            # Has the operation come back here as what DTensor makes of it.
            return NotImplemented
        name = function._schema.name
        if "c10d" in function.namespace and name not in NO_COLLECTIVES:
            kind, whole = OPERATORS[name]
            tensors = _tensors(arguments[whole])
            elements = sum(tensor.numel() for tensor in tensors)
            ranks = tuple(distributed.get_process_group_ranks(_group_of(arguments)))
            self.started.append(Collective(kind, elements, tensors[0].dtype, ranks))
        return function(*arguments, **(keywords or {}))
