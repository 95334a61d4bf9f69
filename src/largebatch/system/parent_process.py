"""Ends a process with the one that started it, which would otherwise leave it behind when it is killed."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def end_with_parent() -> None:
    """Have this process end when the process that started it ends, even by SIGKILL.

    A process of `multiprocessing` may have been forked by a server that outlives the process that asked for it, so a
    thread waits for that one. For others, Linux does it.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:

        def wait() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()
    else:
        die_with_thread()


def die_with_thread() -> None:
    """Have Linux kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
