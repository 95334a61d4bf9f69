"""CUDA's streams, events and copies without a GPU: calls are recorded, and work runs as late as CUDA allows.

When a call that gives a GPU work returns, the work may not have begun. On a GPU, a program that forgets to wait for it
is usually lucky; here it never is: what a stream was given runs only when something waits for it, so what was read too
early is wrong. Tensors are on the CPU; `put_on_device` says which of them stand for tensors on the GPU.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

DEVICE = torch.device("cuda", 0)


class CudaRecorder:
    """While it is entered, torch's calls of CUDA are recorded in `log`, in the order in which they were made."""

    def __init__(self):
        self.log: list[str] = []
        self.locked: dict[int, int] = {}
        """The size in bytes of each piece of page-locked memory, by its address."""
        self.lock_error = 0
        """What CUDA returns when memory is to be page-locked; 0 is success."""
        self.compute_stream = Stream(self, "the compute stream")
        self.may_select = threading.Event()
        """Threads wait for it in `set_device`: clear it to let them begin late."""
        self.may_select.set()
        self._on_device: set[StorageWeakRef] = set()
        self._thread = threading.local()

    def put_on_device(self, *tensors: torch.Tensor) -> None:
        """Take these tensors, and all others in their memory, for tensors on the GPU."""
        self._on_device.update(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)

    def launch(self, kernel: Callable[[], object]) -> None:
        """Give the current stream of this thread something to do."""
        self.stream.queue.append(kernel)

    @property
    def stream(self) -> "Stream":
        """The current stream of this thread."""
        return getattr(self._thread, "stream", self.compute_stream)

    def __enter__(self):
        self._clone, self.copy_now, self._to = torch.Tensor.clone, torch.Tensor.copy_, torch.Tensor.to
        runtime = SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._unlock)
        streams = 0

        def new_stream(_device):
            nonlocal streams
            streams += 1
            return Stream(self, f"side stream {streams}")

        self._patches = ExitStack()
        for owner, name, stand_in in [
            (torch.cuda, "Stream", new_stream),
            (torch.cuda, "stream", self._inside),
            (torch.cuda, "current_stream", lambda _device: self.stream),
            (torch.cuda, "set_device", self._set_device),
            (torch.cuda, "current_device", lambda: DEVICE.index),
            (torch.cuda, "manual_seed", lambda seed: self.log.append(f"manual_seed({seed})")),
            (torch.cuda, "cudart", lambda: runtime),
            (torch.accelerator, "is_available", lambda: True),
            (torch.Tensor, "clone", lambda tensor: self.cloned(tensor)),
            (torch.Tensor, "copy_", lambda *arguments, **options: self.copy(*arguments, **options)),
            (torch.Tensor, "to", lambda *arguments, **options: self.moved(*arguments, **options)),
            (torch.Tensor, "pin_memory", lambda tensor, *_: self.pinned(tensor)),
            (torch.Tensor, "record_stream", lambda _, stream: self.log.append(f"kept for {stream.name}")),
        ]:
            self._patches.enter_context(patch.object(owner, name, stand_in))
        return self

    def __exit__(self, *exception):
        self._patches.close()

    # --- tensors --------------------------------------------------------------------------------------------------

    def copy(self, target, source, non_blocking=False):
        """`Tensor.copy_`: immediate on the host; to or from the GPU as late as possible."""
        if not self._is_on_device(target) and not self._is_on_device(source):
            return self.copy_now(target, source)
        stream = self.stream
        on_host = [tensor for tensor in (target, source) if not self._is_on_device(tensor)]
        waits = not non_blocking or not all(self._is_locked(tensor) for tensor in on_host)
        self.log.append(f"copy on {stream.name}{', waiting' if waits and on_host else ''}")
        self.launch(lambda: self.copy_now(target, source))
        if waits and on_host:
            stream.run()
        return target

    def cloned(self, tensor):
        """`Tensor.clone`."""
        if not self._is_on_device(tensor):
            return self._clone(tensor)
        copy = torch.empty_like(tensor)
        self.put_on_device(copy)
        self.log.append(f"clone on {self.stream.name}")
        self.launch(lambda: self.copy_now(copy, tensor))
        return copy

    def moved(self, tensor, device=None, *arguments, non_blocking=False, **options):
        """`Tensor.to`: a copy if it is to the GPU or from it."""
        is_to_device = isinstance(device, torch.device | str) and torch.device(device).type == "cuda"
        if is_to_device == self._is_on_device(tensor):
            return self._to(tensor, *([] if is_to_device else [device]), *arguments, **options)
        copy = torch.empty_like(tensor)
        if is_to_device:
            self.put_on_device(copy)
        return self.copy(copy, tensor, non_blocking)

    def pinned(self, tensor):
        """`Tensor.pin_memory`: a page-locked copy with the same strides."""
        copy = self._clone(tensor)
        self.locked[copy.data_ptr()] = copy.untyped_storage().nbytes()
        weakref.finalize(copy.untyped_storage(), self.locked.pop, copy.data_ptr())
        return copy

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._on_device

    def _is_locked(self, tensor: torch.Tensor) -> bool:
        """Whether CUDA copies this tensor on the host without help of the host."""
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        within = any(start <= first and last <= start + size for start, size in self.locked.items())
        return tensor.is_contiguous() and (within or not tensor.nbytes)

    # --- CUDA -----------------------------------------------------------------------------------------------------

    def _lock(self, address: int, size: int, _flags: int) -> int:
        assert size > 0
        assert address not in self.locked
        self.log.append("lock pages")
        if not self.lock_error:
            self.locked[address] = size
        return self.lock_error

    def _unlock(self, address: int) -> int:
        del self.locked[address]
        return 0

    def _set_device(self, device) -> None:
        assert self.may_select.wait(600)
        # Torch's own check, which needs no driver.
        self.log.append(f"set_device({torch.cuda._utils._get_device_index(device)})")

    @contextmanager
    def _inside(self, stream):
        before, self._thread.stream = self.stream, stream
        try:
            yield
        finally:
            self._thread.stream = before


class Stream:
    """What a stream has been given and has not done."""

    def __init__(self, recorder: CudaRecorder, name: str):
        self.queue: deque[Callable[[], object]] = deque()
        self.name = name
        self._recorder = recorder

    def wait_stream(self, stream: "Stream") -> None:
        self._recorder.log.append(f"{self.name} waits for {stream.name}")
        place = lambda: None  # noqa: E731
        stream.queue.append(place)
        self.queue.append(lambda: stream.run(until=place))

    def synchronize(self) -> None:
        self._recorder.log.append(f"synchronize {self.name}")
        self.run()

    def run(self, until: Callable[[], object] | None = None) -> None:
        """Do everything, or everything up to a place in the queue; nothing if it has been passed."""
        while self.queue if until is None else until in self.queue:
            self.queue.popleft()()
