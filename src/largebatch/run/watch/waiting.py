"""Waiting for work in the background that takes some processes longer than others: while any proceeds, none hangs."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Event, Thread
from typing import TypeVar

from largebatch.backend.base import Backend

T = TypeVar("T")

SECONDS_BETWEEN_ROUNDS = 1.0
DONE = 0
STALLED = 1
PROCEEDS = 2


def in_thread(name: str, function: Callable[[], T]) -> "Future[T]":
    """The future result of a function, in a thread of this name that does not keep the process from ending."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return result


def wait_together(
    backend: Backend, heartbeat: Callable[[], None], work: "Future[T] | None", progress: Event | None = None
) -> None:
    """Return when the work of all processes is done; every process must call this.

    Args:
        backend: The prepared backend.
        heartbeat: Called after each round in which any process proceeds; all of them call it.
        work: This process's work, if it has any.
        progress: What the work sets when it proceeds; None if it is taken to proceed until it is done.
    """
    slowest = PROCEEDS
    while slowest != DONE:
        mine = DONE
        if work is not None and not wait([work], SECONDS_BETWEEN_ROUNDS).done:
            mine = PROCEEDS if progress is None or progress.is_set() else STALLED
        if progress is not None:
            progress.clear()
        slowest = backend.all_max(mine)()
        if slowest != STALLED:
            heartbeat()
