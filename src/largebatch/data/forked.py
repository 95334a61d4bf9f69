"""Work that is shared by forked processes."""

import gc
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context

from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from largebatch.errors import DataError, UserError
from largebatch.system.endings import STOP_SIGNALS
from largebatch.system.parent_process import die_with_thread, end_with_parent

MAX_CHARACTERS = 10_000
_DIED = "subprocesses has abruptly died"
"""What `datasets` says, in a RuntimeError, of a process that was killed (`iflatmap_unordered` of its 5.2)."""


def run_forked(num_processes: int, work: Callable[[int], None], items: Sequence[int]) -> None:
    """Call `work` with each item, once, in so many forked processes, which end when this one does.

    Args:
        num_processes: Number of processes.
        work: The work of one item.
        items: The arguments.

    Raises:
        DataError: A process was killed.
        UserError: `work` raised one; it is of the same class.
        ProcessRaisedException: `work` raised another exception, whose traceback is its message.
    """
    failures = get_context("fork").SimpleQueue()

    def run(number: int) -> None:
        end_with_parent()
        # The thread that waits for the parent may get no time while the others work.
        die_with_thread()
        # Requests to stop are for the parent.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for request in {*STOP_SIGNALS} - {signal.SIGTERM}:
            signal.signal(request, signal.SIG_IGN)
        try:
            for item in items[number::num_processes]:
                work(item)
        except UserError as error:
            # A longer message would block on the pipe, which has no reader yet.
            failures.put((type(error), str(error)[:MAX_CHARACTERS]))
            sys.exit(1)

    # What this process has left may have threads, which its children lack: not to be destroyed there.
    gc.freeze()
    try:
        start_processes(  # type: ignore[no-untyped-call]
            run, nprocs=min(num_processes, len(items)), daemon=True, start_method="fork"
        )
    except ProcessExitedException as error:
        if failures.empty():
            raise _died(f"ended with exit code {error.exit_code}") from None
        error_class, message = failures.get()
        raise error_class(message) from None
    finally:
        gc.unfreeze()


@contextmanager
def forked_by_datasets() -> Iterator[None]:
    """Raise DataError, as `run_forked` does, if a process that `datasets` has started in the block is killed."""
    try:
        yield
    except RuntimeError as error:
        if _DIED not in str(error):
            raise
        raise _died("was killed") from error


def _died(how: str) -> DataError:
    return DataError(
        f"a process that prepared data {how}, perhaps for lack of memory; write fewer --workers (in a job, "
        "data.num_workers), or take a machine with more memory, and run the same command again"
    )
