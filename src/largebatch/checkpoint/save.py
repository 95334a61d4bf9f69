"""Writing checkpoints: every process its own ranges, in the background, and published only when everything is there."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from largebatch.backend.base import Backend
from largebatch.backend.state import EngineState
from largebatch.config.sections import Checkpoint
from largebatch.errors import TrainingFailed, UserError
from largebatch.storage.attempts import Attempt
from largebatch.storage.catalog import discard, discard_incomplete, entries, prune
from largebatch.storage.files import (
    FileRecord,
    remove_folder,
    rename_folder,
    sync_folder,
    write_file,
    write_json_file,
)
from largebatch.storage.layout import (
    BUFFER,
    MANIFEST,
    MARKER,
    MODEL_CONFIG,
    WEIGHT,
    Manifest,
    ParameterInfo,
    Range,
    folder_name,
    rank_file,
    temporary_name,
)
from largebatch.storage.tensors import Shapes, fingerprint, save_tensors

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """What one process writes of one step."""

    ranges: Mapping[str, tuple[int, int]]
    """The range of each vector, as (start, stop)."""
    buffers: Sequence[str]
    scalars: Mapping[str, Mapping[str, float]]
    """The optimizer's single numbers, by parameter."""
    record: FileRecord | None = None
    """The file, once it is written."""


@dataclass(frozen=True)
class Snapshot:
    """The state of one process after one step."""

    step: int
    bad_steps: int
    parameters: Mapping[str, ParameterInfo]
    """All of the model's."""
    part: Part
    """What this process writes."""
    shapes: Shapes
    """Dtype and shape of each tensor of its file."""
    tensors: Callable[[], Iterator[torch.Tensor]]
    """Returns the tensors, in that order."""


class Problem(NamedTuple):
    """Why a checkpoint was not written: "storage" if later ones may succeed; else the run ends with the message."""

    kind: Literal["storage", "user", "bug"]
    message: str


@dataclass
class CheckpointWriter:
    """Writes checkpoints of a run; every process of the job has one and makes the same calls."""

    backend: Backend
    folder: Path
    """The run's folder of checkpoints."""
    attempt: Attempt
    """The attempt that writes; once a later one has begun, it may not publish."""
    settings: Checkpoint
    config: Mapping[str, Any]
    """The resolved recipe, as JSON."""
    model_config: str | None
    """The JSON text of a `transformers` model's configuration."""
    warn: Callable[[str], None]
    """Tells a person that a checkpoint could not be written; called by the main process."""
    not_written: Callable[[int, str], None]
    """Takes the step of such a checkpoint and the reason; called by the main process."""
    last_step: int = field(default=0, init=False)
    """Step of the newest checkpoint that is known to be complete; 0 if there is none."""

    def __post_init__(self) -> None:
        # Threads must not share a group.
        self._group = self.backend.new_host_group()
        self._staging: dict[str, torch.Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        if self.backend.device.type == "cuda":
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copy_stream = torch.cuda.Stream(self.backend.device)  # type: ignore[no-untyped-call]
        self._thread: threading.Thread | None = None
        self._result: Problem | BaseException | None = None
        self._writing = 0

    def save(self, step: int, bad_steps: int) -> None:
        """Write a checkpoint of the current state; one that is still being written is waited for.

        Asynchronously, the state is copied while the next step's gradients are computed: call `wait_until_copied`
        before weights or optimizer states are changed. A storage problem is told by `warn`, and training may go on.

        Raises:
            TrainingFailed: The checkpoint before could not be written, for a reason that will not go away.
        """
        self.wait()
        snapshot = self._snapshot(step, bad_steps)
        self._writing = step
        self._result = None
        if self.settings.asynchronous:
            self._copied.clear()
            if self.backend.device.type == "cuda":
                self._ready.record()
            self._thread = threading.Thread(
                target=self._write_and_keep, args=(snapshot,), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._write_and_keep(snapshot)
            self.wait()

    def wait_until_copied(self) -> None:
        """Return when the state may be changed."""
        self._copied.wait()

    def wait(self) -> None:
        """Return when no checkpoint is being written; raise TrainingFailed as `save` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        step, result = self._writing, self._result
        self._writing, self._result = 0, None
        if isinstance(result, BaseException):
            raise result
        if result is None:
            self.last_step = step or self.last_step
        elif result.kind != "storage":
            raise TrainingFailed(result.message, everywhere=True)
        elif self.backend.is_main_process:
            newest = f"of step {self.last_step}" if self.last_step else "none yet"
            self.warn(
                f"WARNING: the checkpoint of step {step} could not be written: {result.message}. Training continues, "
                f"and the next checkpoint will be tried; the newest one is {newest}"
            )
            self.not_written(step, result.message)

    def poll(self) -> None:
        """Take note of a checkpoint that has been finished meanwhile; raise TrainingFailed as `save` does."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    # --- taking the state -----------------------------------------------------------------------------------------

    def _snapshot(self, step: int, bad_steps: int) -> Snapshot:
        state = self.backend.engine_state()
        pieces = [piece for piece in state.pieces if piece.owned[0] < piece.owned[1]]
        buffers = self._own_buffers(state)
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            piece.vector: (piece.tensor.dtype, (piece.owned[1] - piece.owned[0],)) for piece in pieces
        }
        shapes |= {f"{BUFFER}/{name}": (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
        if self.settings.asynchronous:
            # They change in forward passes.
            buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}

        def tensors() -> Iterator[torch.Tensor]:
            yield from (piece.read(*piece.owned) for piece in pieces)
            yield from buffers.values()

        scalars = {name: info.scalars for name, info in state.parameters.items() if info.scalars}
        part = Part({piece.vector: piece.owned for piece in pieces}, list(buffers), scalars)
        return Snapshot(step, bad_steps, state.parameters, part, shapes, tensors)

    def _own_buffers(self, state: EngineState) -> Mapping[str, torch.Tensor]:
        """All buffers on the first process, on others those that differ from its."""
        if self.backend.world_size == 1 or not state.buffers:
            return state.buffers
        mine = {name: fingerprint(buffer) for name, buffer in state.buffers.items()}
        first = self._broadcast(mine)
        if self.backend.is_main_process:
            return state.buffers
        return {name: buffer for name, buffer in state.buffers.items() if mine[name] != first.get(name)}

    # --- writing, in the background -------------------------------------------------------------------------------

    def _copy(self, snapshot: Snapshot) -> Snapshot:
        """The same with copies on the host, whose memory is kept from one checkpoint to the next."""
        old, self._staging = self._staging, {}
        on_gpu = self.backend.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.backend.device)
            self._copy_stream.wait_event(self._ready)
        with torch.cuda.stream(self._copy_stream) if on_gpu else nullcontext():
            for (name, (dtype, shape)), tensor in zip(snapshot.shapes.items(), snapshot.tensors(), strict=True):
                copy = old.pop(name, None)
                if copy is None or copy.dtype != dtype or copy.shape != shape:
                    copy = torch.empty(shape, dtype=dtype, pin_memory=on_gpu)
                copy.copy_(tensor, non_blocking=True)
                self._staging[name] = copy
        if on_gpu:
            self._copy_stream.synchronize()
        copies = list(self._staging.values())
        return replace(snapshot, tensors=lambda: iter(copies))

    def _write_and_keep(self, snapshot: Snapshot) -> None:
        try:
            if self.settings.asynchronous:
                try:
                    snapshot = self._copy(snapshot)
                finally:
                    self._copied.set()
            self._result = self._write(snapshot)
        # Raised in the training's own thread, when it looks for the result.
        except BaseException as error:
            self._result = error

    def _write(self, snapshot: Snapshot) -> Problem | None:
        temporary = self.folder / temporary_name(snapshot.step, self.attempt.name, "tmp")
        parts = self._gather(_or_problem(lambda: self._write_own(temporary, snapshot)))
        problem: Problem | None = None
        if self.backend.is_main_process:
            problem = next((part for part in parts if isinstance(part, Problem)), None)
            if problem is None:
                written = [part for part in parts if isinstance(part, Part)]
                problem = _or_problem(lambda: self._publish(temporary, snapshot, written))
            if problem is None:
                self._delete_older()
            else:
                remove_folder(temporary)
                if problem.kind != "user":
                    # It may have its final name already. Without a marker it is worth nothing.
                    discard_incomplete(self.folder, snapshot.step, self.attempt.name)
        return self._broadcast(problem)

    def _delete_older(self) -> None:
        try:
            prune(self.folder, self.settings.keep_last, self.backend.plan.keeps_checkpoint_of, self.attempt.name)
        except OSError as error:
            self.warn(f"WARNING: an older checkpoint could not be deleted: {error}")

    def _write_own(self, temporary: Path, snapshot: Snapshot) -> Part:
        self.attempt.check()
        temporary.mkdir(parents=True, exist_ok=True)
        file = temporary / rank_file(self.backend.rank)
        record = save_tensors(file, snapshot.shapes, snapshot.tensors(), {"step": str(snapshot.step)})
        return replace(snapshot.part, record=record)

    def _publish(self, temporary: Path, snapshot: Snapshot, parts: Sequence[Part]) -> None:
        """Complete the folder, give it its name and, last of all, its marker."""
        manifest = self._manifest(snapshot, parts)
        manifest.check_coverage()
        records = {rank_file(rank): part.record for rank, part in enumerate(parts)}
        if self.model_config is not None:
            records[MODEL_CONFIG] = write_file(temporary / MODEL_CONFIG, [memoryview(self.model_config.encode())])
        records[MANIFEST] = write_json_file(temporary / MANIFEST, manifest.to_json())
        sync_folder(temporary)
        final = self.folder / folder_name(snapshot.step)
        self.attempt.check()
        for entry in entries(self.folder):
            # One that was not complete or not intact when the run was resumed.
            if entry.step == snapshot.step:
                discard(entry, self.attempt.name)
        rename_folder(temporary, final)
        # The folder of checkpoints may be new.
        sync_folder(self.folder.parent)
        files = {
            name: {"size": record.size, "checksum": record.checksum}
            for name, record in records.items()
            if record is not None
        }
        self.attempt.check()
        write_json_file(final / f"{MARKER}.tmp", {"step": snapshot.step, "files": files})
        (final / f"{MARKER}.tmp").rename(final / MARKER)
        sync_folder(final)

    def _manifest(self, snapshot: Snapshot, parts: Sequence[Part]) -> Manifest:
        scalars = {name: numbers for part in parts for name, numbers in part.scalars.items()}
        vectors: dict[str, list[Range]] = {}
        buffers: dict[str, list[str]] = {}
        for rank, part in enumerate(parts):
            for vector, (start, stop) in part.ranges.items():
                vectors.setdefault(vector, []).append(Range(rank_file(rank), start, stop))
            for name in part.buffers:
                buffers.setdefault(name, []).append(rank_file(rank))
        for name, info in snapshot.parameters.items():
            if info.size == 0:
                vectors.setdefault(f"{WEIGHT}/{name}", [])
        return Manifest(
            step=snapshot.step,
            attempt=self.attempt.number,
            world_size=self.backend.world_size,
            strategy=self.backend.launch.strategy,
            config=self.config,
            plan=json.loads(self.backend.plan.to_json()),
            bad_steps=snapshot.bad_steps,
            parameters={
                name: replace(info, scalars=scalars.get(name, {})) for name, info in snapshot.parameters.items()
            },
            vectors={
                name: tuple(sorted(ranges, key=lambda part: part.start)) for name, ranges in sorted(vectors.items())
            },
            buffers={name: tuple(holders) for name, holders in buffers.items()},
            running_statistics=tuple(sorted(self.backend.running_statistics & buffers.keys())),
            time=time.time(),
        )

    # --- between processes ----------------------------------------------------------------------------------------

    def _gather(self, part: Part | Problem) -> list[Part | Problem]:
        """What every process has, on the main one."""
        if self.backend.world_size == 1:
            return [part]
        parts: list[Any] | None = [None] * self.backend.world_size if self.backend.is_main_process else None
        torch.distributed.gather_object(part, parts, dst=0, group=self._group)
        return parts or []

    def _broadcast(self, value: T) -> T:
        """What the main process has."""
        shared = [value]
        if self.backend.world_size > 1:
            torch.distributed.broadcast_object_list(shared, src=0, group=self._group)
        return shared[0]


def _or_problem(work: Callable[[], T]) -> T | Problem:
    """The result of `work`, which may fail on one process without leaving the others waiting for it."""
    try:
        return work()
    except UserError as error:
        return Problem("user", str(error))
    except OSError as error:
        return Problem("storage", str(error))
    except Exception as error:
        return Problem("bug", f"the checkpoint could not be written: {type(error).__name__}: {error}")
