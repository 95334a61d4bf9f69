"""The collectives that a process starts, and the bytes that it really sends.

The first are counted where every strategy's calls meet, torch's dispatcher: DDP calls it from C++, FSDP2 and DeepSpeed
from Python, DTensor through functional collectives. The second are read off the kernel's TCP sockets, which is where
gloo's messages must pass; so they tell whether the first are all.
"""

import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
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
        operator: The torch operator.
        kind: One of VOLUME.
        elements: Elements of the whole tensor that is reduced, broadcast or gathered.
        dtype: The dtype of the tensor.
        root: The process that gets a "reduce"; 0 elsewhere.
        ranks: The processes that take part.
    """

    operator: str
    kind: str
    elements: int
    dtype: torch.dtype
    root: int
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


def _group_with(ranks: tuple[int, ...]) -> distributed.ProcessGroup:
    """The first group that was made of these processes."""
    groups = distributed.distributed_c10d._world.pg_group_ranks
    return next(group for group, found in groups.items() if tuple(found) == ranks)


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
ROOT_OF_REDUCE = 3
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
            root = arguments[ROOT_OF_REDUCE] if kind == "reduce" else 0
            ranks = tuple(distributed.get_process_group_ranks(_group_of(arguments)))
            self.started.append(Collective(name, kind, elements, tensors[0].dtype, root, ranks))
        return function(*arguments, **(keywords or {}))


def replay(collectives: Sequence[Collective]) -> None:
    """Start the same collectives again, with zeros."""
    for operator, kind, elements, dtype, root, ranks in collectives:
        group = _group_with(ranks)
        whole = torch.zeros(elements, dtype=dtype)
        part = torch.zeros(elements // len(ranks), dtype=dtype)
        if operator == "c10d::allgather_":
            distributed.all_gather(list(whole.chunk(len(ranks))), part, group)
        else:
            {
                "all_reduce": partial(distributed.all_reduce, whole, group=group),
                "all_gather": partial(distributed.all_gather_into_tensor, whole, part, group),
                "reduce_scatter": partial(distributed.reduce_scatter_tensor, part, whole, group=group),
                "reduce": partial(distributed.reduce, whole, root, group=group),
                "broadcast": partial(distributed.broadcast, whole, root, group=group),
                "barrier": partial(distributed.barrier, group),
            }[kind]()


def bytes_sent_in(work: Callable[[], Any]) -> int:
    """What this process sends over TCP in `work`, and in a barrier before it; every process must call it."""
    distributed.barrier()
    before = _settled_bytes_sent()
    distributed.barrier()
    work()
    sent = _settled_bytes_sent() - before
    # Connections must not be closed by a process that leaves.
    distributed.barrier()
    return sent


def _settled_bytes_sent() -> int:
    """When all collectives that were started have ended, for which threads of gloo may wait for processes behind."""
    deadline = time.monotonic() + 300
    while True:
        have_ended = _have_ended()
        # What has ended is with the kernel.
        sent, waiting = _bytes_sent()
        if have_ended and not waiting:
            return sent
        assert time.monotonic() < deadline, "the process never stops sending"
        time.sleep(0.05)


def _have_ended() -> bool:
    """Whether torch's record, which every run turns on, knows of no collective that has not ended."""
    recorded = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]
    assert recorded
    return all(entry["retired"] for entry in recorded)


def _bytes_sent() -> tuple[int, int]:
    """Payload bytes sent so far by the TCP connections that this process has open, and those that wait to be sent."""
    total = waiting = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        if not descriptor.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                # struct tcp_info of linux/tcp.h: tcpi_notsent_bytes; tcpi_bytes_sent, without what was sent again.
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                waiting += struct.unpack_from("I", information, 144)[0]
                sent, again = struct.unpack_from("QQ", information, 200)
                total += sent - again
    return total, waiting
