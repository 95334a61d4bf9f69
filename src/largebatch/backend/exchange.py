"""Small values between the processes of a job, as JSON in tensors: what arrives is never unpickled, so it cannot run
code here."""

import hmac
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from largebatch.errors import LaunchError

MAX_BYTES = 2**26  # of one process's value: more than the part of a checkpoint's manifest that a process writes

FOREIGN_PROCESS_REMEDY = (
    "start all processes from the same version of largebatch, and close the job's ports to others (SECURITY.md)"
)

Group = dist.ProcessGroup | None
Json: TypeAlias = float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""Floats keep their bits; tuples arrive as lists."""


def gather(value: Json, group: Group, to_first: bool = False) -> list[Any]:
    """A JSON value of every process, by rank; all processes must call this.

    Args:
        value: The value of this process.
        group: All processes, over gloo; None if there is only one.
        to_first: Whether only the first process needs the values; the others get an empty list.

    Raises:
        LaunchError: A process sent something else.
    """
    if group is None:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in all_gather(torch.tensor(len(mine)), group)]
    for rank, size in enumerate(sizes):
        if not 0 < size <= MAX_BYTES:
            raise LaunchError(
                f"rank {rank} announced a message of {size:,} bytes, of at most {MAX_BYTES:,}; {FOREIGN_PROCESS_REMEDY}"
            )
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(mine)] = mine
    if to_first:
        is_first = dist.get_rank(group) == 0
        received = [torch.empty_like(padded) for _ in sizes] if is_first else []
        dist.gather(padded, received or None, dst=0, group=group)
    else:
        received = [*all_gather(padded, group)]
    return [_decode(rank, data[:size]) for rank, (data, size) in enumerate(zip(received, sizes, strict=False))]


def all_gather(values: torch.Tensor, group: Group) -> torch.Tensor:
    """The values of every process, of the same shape on all: (processes, *shape); all processes must call this."""
    received = values.new_empty(dist.get_world_size(group), *values.shape)
    dist.all_gather_into_tensor(received.view(-1), values.flatten(), group=group)
    return received


def _decode(rank: int, data: torch.Tensor) -> Any:
    try:
        return json.loads(data.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"rank {rank} sent something that is not JSON ({type(error).__name__}); {FOREIGN_PROCESS_REMEDY}"
        ) from None


def compare_tokens(group: Group) -> None:
    """Refuse processes without this job's LARGEBATCH_TOKEN, which launch/node.sh gives to all; every process calls it.

    Each sends a digest of the token and its own rank, which tells nobody the token or another rank's digest.
    """
    world_size = dist.get_world_size(group)
    expected = [_proof(rank, world_size) for rank in range(world_size)]
    mine = torch.frombuffer(bytearray(expected[dist.get_rank(group)]), dtype=torch.uint8)
    received = [tensor.numpy().tobytes() for tensor in all_gather(mine, group)]
    pairs = zip(received, expected, strict=True)
    if strangers := [str(rank) for rank, pair in enumerate(pairs) if not hmac.compare_digest(*pair)]:
        raise LaunchError(
            f"rank {', '.join(strangers)} does not have this process's LARGEBATCH_TOKEN, so it belongs to another job "
            "or start; start all processes with launch/node.sh, and close the job's ports to others (SECURITY.md)"
        )


def _proof(rank: int, world_size: int) -> bytes:
    token = os.environ.get("LARGEBATCH_TOKEN", "").encode(errors="surrogateescape")
    return hmac.digest(token, f"{rank} of {world_size}".encode(), "sha256")
