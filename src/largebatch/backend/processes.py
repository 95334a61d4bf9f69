"""Numbers over all processes of a run: gathered rows, sums, small values, and errors that all must raise."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch

from largebatch.backend.exchange import Group, Json, all_gather, compare_tokens, gather
from largebatch.errors import UserError
from largebatch.system.failures import storage_errors

# How long processes wait for one that prepares data. A dead process is noticed at once, a hanging one by the watchdog.
PATIENCE = timedelta(days=2)

J = TypeVar("J", bound=Json)
Rows = dict[str, torch.Tensor]  # by name: one row per sample


class Processes:
    """The processes of a run, which ask each other for numbers; each method must be called by all of them.

    They have compared the token of their launch.

    Args:
        rank: Rank of this process.
        world_size: The number of processes.
        micro_batch_size: The number of samples per process and forward pass.
    """

    def __init__(self, rank: int, world_size: int, micro_batch_size: int):
        self.rank = rank
        self.world_size = world_size
        self._micro_batch_size = micro_batch_size
        # On the host, so that summing a count does not wait for the device.
        self._host_group = self.new_host_group()
        if world_size > 1:
            compare_tokens(self._host_group)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values of every process, which must have the same shape on all: (world_size, *shape)."""
        return values.unsqueeze(0) if self.world_size == 1 else all_gather(values, torch.distributed.group.WORLD)

    def check_rows(self, batches: Sequence[Rows], caller: str) -> None:
        """Refuse, on all processes, batches whose rows do not have the same names, dtypes and shapes on all of them."""
        mine = set()
        for batch in batches:
            rows = [f"{name!r} {tuple(each.shape[1:])} {each.dtype}" for name, each in sorted(batch.items())]
            mine.add(", ".join(rows))
        kinds = sorted(set().union(*self.gather_objects(sorted(mine))))
        if len(kinds) > 1:
            raise UserError(
                f"{caller}: batches have rows {kinds[0]} or {kinds[-1]}; make them equal: pad to a fixed width",
                everywhere=True,
            )

    def gather_rows(self, batches: Sequence[Rows], count: int) -> Rows:
        """What a task computed of each sample, by name: one row per sample, in their order, the same on every process.

        Args:
            batches: This process's micro-batches, with rows of the same names, dtypes and shapes in all of all
                processes. The n-th of process r is the (n x world_size + r)-th of all; only the last ones of all may
                have fewer rows than `micro_batch_size`.
            count: The number of samples of all processes.
        """
        result: Rows = {}
        if not batches:
            return result
        for name, first in sorted(batches[0].items()):
            padded = first.new_zeros(len(batches), self._micro_batch_size, *first.shape[1:])
            for slot, batch in zip(padded, batches, strict=True):
                slot[: len(batch[name])] = batch[name]
            result[name] = self.all_gather(padded).transpose(0, 1).flatten(0, 2)[:count]
        return result

    def sum_rows(self, values: torch.Tensor, num_batches: int) -> torch.Tensor:
        """Sum values for the rows of `gather_rows` over all processes; each gets the sums for its own micro-batches.

        Args:
            values: Each process's own, one for each sample of all processes; or a scalar, which all get the sum of.
            num_batches: The number of this process's micro-batches, the same on all.

        Returns:
            Shape (num_batches, micro_batch_size, …); rows beyond the last sample are zero.
        """
        if not values.ndim:
            if self.world_size > 1:
                torch.distributed.all_reduce(values)
            return values
        missing = num_batches * self.world_size * self._micro_batch_size - len(values)
        slots = torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values
        by_slot = slots.view(num_batches, self.world_size, self._micro_batch_size, *values.shape[1:])
        by_process = by_slot.transpose(0, 1).contiguous()
        if self.world_size == 1:
            return by_process[0]
        mine = torch.empty_like(by_process[0])
        torch.distributed.reduce_scatter_tensor(mine, by_process.flatten(0, 1))
        return mine

    def new_host_group(self) -> Group:
        """A group of all processes that communicates over the host, for one thread; every process must call this."""
        return torch.distributed.new_group(backend="gloo", timeout=PATIENCE) if self.world_size > 1 else None

    def sum_over_processes(self, count: int) -> Callable[[], int]:
        """Start summing a count over all processes; the returned function waits for the sum."""
        return self._reduce(count, torch.distributed.ReduceOp.SUM)

    def all_max(self, number: int) -> Callable[[], int]:
        """Start an all-reduce of the largest number; the returned function waits for it."""
        return self._reduce(number, torch.distributed.ReduceOp.MAX)

    def _reduce(self, number: int, operation: torch.distributed.ReduceOp.RedOpType) -> Callable[[], int]:
        if self.world_size == 1:
            return lambda: number
        result = torch.tensor(number, dtype=torch.int64)
        work = torch.distributed.all_reduce(result, operation, group=self._host_group, async_op=True)

        def wait() -> int:
            work.wait()
            return int(result)

        return wait

    def gather_objects(self, value: Json, group: Group = None) -> list[Any]:
        """A small JSON value of every process, by rank; waits for hours while one downloads or tokenizes.

        Tuples arrive as lists, as in `exchange.gather`. A thread of its own has a `new_host_group`.
        """
        return gather(value, group or self._host_group)

    def differing_ranks(self, value: Json) -> str:
        """The ranks whose value is not the main process's, as text; "" if there are none."""
        values = self.gather_objects(value)
        return ", ".join(str(rank) for rank, other in enumerate(values) if other != values[0])

    def from_main_process(self, function: Callable[[], J]) -> J:
        """What a function returns on the main process, on every process; a user error that it raises, all raise.

        Args:
            function: Returns a small JSON value, as for `gather_objects`.
        """
        mine = None
        with self.raise_on_all_ranks():
            if self.rank == 0:
                mine = function()
        results: list[J] = self.gather_objects(mine)
        return results[0]

    @contextmanager
    def raise_on_all_ranks(self, group: Group = None) -> Iterator[None]:
        """Raise on every process a user or storage error that any meets in the block; every process must enter it.

        If one process left alone, the others would wait for it until they fail.
        """
        error = None
        try:
            with storage_errors():
                yield
        except UserError as caught:
            error = caught
        failures = self.gather_objects(None if error is None else (str(error), error.exit_code), group)
        for rank, failure in enumerate(failures):
            if failure is not None:
                message, exit_code = failure
                if error is None or any(other != failure for other in failures):
                    error = UserError(f"on rank {rank}: {message}")
                error.exit_code = exit_code
                error.everywhere = True
                raise error
