"""Writing checkpoints: every process its own ranges, in the background, and published only when all is there."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import xxhash

from largebatch.backend.base import Backend
from largebatch.backend.state import EngineState, Piece
from largebatch.errors import TrainingFailed, UserError
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
from largebatch.storage.tensors import save_tensors


class Fence(Protocol):
    """The attempt that writes: no other may publish in its place."""

    @property
    def name(self) -> str:
        """A name that no other attempt has."""
        ...

    @property
    def number(self) -> int:
        """Which start of the run, from 1."""
        ...

    def check(self) -> None:
        """Raise UserError where a later attempt has taken over."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """What one process writes of one step.

    Args:
        step: Optimizer steps completed.
        bad_steps: Steps so far that were not finite.
        parameters: Of the whole model.
        ranges: What this process writes of each vector, as (start, stop).
        shapes: Dtype and shape of each tensor of this process's file.
        tensors: Calling it gives the tensors, in that order.
        buffers: Names of the buffers in the file.
    """

    step: int
    bad_steps: int
    parameters: Mapping[str, ParameterInfo]
    ranges: Mapping[str, tuple[int, int]]
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    tensors: Callable[[], Iterator[torch.Tensor]]
    buffers: list[str]


@dataclass(frozen=True)
class Report:
    """What came of one process's part."""

    problem: "Problem | None" = None
    record: FileRecord | None = None
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    scalars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Problem:
    """Why a checkpoint was not written.

    Args:
        kind: "storage": later ones may succeed; "user": the run must end with this message; "bug": likewise, ours.
        message: For a person.
    """

    kind: Literal["storage", "user", "bug"]
    message: str


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep_last` (None is all), and those for which `for_ever` holds."""

    keep_last: int | None
    for_ever: Callable[[int], bool]


class CheckpointWriter:
    """Writes checkpoints of a run; every process of the job has one and makes the same calls.

    Args:
        backend: The prepared backend.
        folder: The run's folder of checkpoints.
        fence: The attempt that writes.
        retention: Which older checkpoints stay.
        config: The resolved recipe, as JSON.
        plan: The resolved plan, as JSON.
        model_config: The JSON text of a `transformers` model's configuration, if it has one.
        asynchronous: Whether `save` returns while the files are still being written.
        warn: Tells a person that a checkpoint could not be written; called by the main process.
        not_written: Takes the step of such a checkpoint and the reason; called by the main process too.
    """

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        fence: Fence,
        retention: Retention,
        config: Mapping[str, Any],
        plan: Mapping[str, Any],
        model_config: str | None,
        asynchronous: bool,
        warn: Callable[[str], None],
        not_written: Callable[[int, str], None],
    ):
        self._backend = backend
        self._folder = folder
        self._fence = fence
        self._retention = retention
        self._config = config
        self._plan = plan
        self._model_config = model_config
        self._asynchronous = asynchronous
        self._warn = warn
        self._not_written = not_written
        # Threads must not share a group.
        self._group = backend.new_host_group()
        self._staging: dict[str, torch.Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        if backend.device.type == "cuda":
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copy_stream = torch.cuda.Stream(backend.device)  # type: ignore[no-untyped-call]
        self._thread: threading.Thread | None = None
        self._result: Problem | BaseException | None = None
        self._writing = 0
        self.last_step = 0
        """Step of the newest checkpoint that is known to be complete; 0 is none."""

    def save(self, step: int, bad_steps: int) -> None:
        """Write a checkpoint of the state as it is now; one that is still being written is waited for.

        Asynchronously, the state is copied while the next step's gradients are computed: call `wait_until_copied`
        before weights or optimizer states are changed. A storage problem is told by `warn`, and training may go on.

        Raises:
            TrainingFailed: The checkpoint before could not be written, for a reason that will not go away.
        """
        self.wait()
        snapshot = self._snapshot(step, bad_steps)
        self._writing = step
        self._result = None
        if self._asynchronous:
            self._copied.clear()
            if self._backend.device.type == "cuda":
                self._ready.record()
            self._thread = threading.Thread(target=self._write_and_keep, args=(snapshot,), name="checkpoint")
            self._thread.daemon = True
            self._thread.start()
        else:
            self._write_and_keep(snapshot)
            self.wait()

    def wait_until_copied(self) -> None:
        """Return when the state may be changed."""
        self._copied.wait()

    def wait(self) -> None:
        """Return when no checkpoint is being written.

        Raises:
            TrainingFailed: As `save`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._settle()

    def poll(self) -> None:
        """Take note of a checkpoint that has been finished meanwhile.

        Raises:
            TrainingFailed: As `save`.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def _settle(self) -> None:
        step, result = self._writing, self._result
        self._writing, self._result = 0, None
        if step == 0:
            return
        if result is None:
            self.last_step = step
            return
        if isinstance(result, BaseException):
            raise result
        if result.kind == "storage":
            if self._backend.is_main_process:
                self._warn(
                    f"WARNING: the checkpoint of step {step} could not be written: {result.message}. Training goes on, "
                    f"and the next checkpoint will be tried; the newest one is "
                    f"{f'of step {self.last_step}' if self.last_step else 'none yet'}"
                )
                self._not_written(step, result.message)
            return
        error = TrainingFailed(result.message)
        error.everywhere = True
        raise error

    # --- taking the state -----------------------------------------------------------------------------------------

    def _snapshot(self, step: int, bad_steps: int) -> Snapshot:
        state = self._backend.engine_state()
        pieces = [piece for piece in state.pieces if piece.owned[0] < piece.owned[1]]
        buffers = self._own_buffers(state)
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            piece.vector: (piece.tensor.dtype, (piece.owned[1] - piece.owned[0],)) for piece in pieces
        }
        shapes |= {f"{BUFFER}/{name}": (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
        if self._asynchronous:
            # They change in forward passes.
            buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        return Snapshot(
            step=step,
            bad_steps=bad_steps,
            parameters=state.parameters,
            ranges={piece.vector: piece.owned for piece in pieces},
            shapes=shapes,
            tensors=_live_tensors(pieces, buffers),
            buffers=list(buffers),
        )

    def _own_buffers(self, state: EngineState) -> Mapping[str, torch.Tensor]:
        """All buffers on the first process, on others those that differ from its."""
        if self._backend.world_size == 1 or not state.buffers:
            return state.buffers
        mine = {name: _fingerprint(buffer) for name, buffer in state.buffers.items()}
        shared = [mine]
        torch.distributed.broadcast_object_list(shared, src=0, group=self._group)
        if self._backend.is_main_process:
            return state.buffers
        return {name: buffer for name, buffer in state.buffers.items() if mine[name] != shared[0].get(name)}

    # --- writing, in the background -------------------------------------------------------------------------------

    def _copy(self, snapshot: Snapshot) -> Snapshot:
        """The same with copies on the host, whose memory is kept from one checkpoint to the next."""
        old, self._staging = self._staging, {}
        on_gpu = self._backend.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._backend.device)
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
            if self._asynchronous:
                try:
                    snapshot = self._copy(snapshot)
                finally:
                    self._copied.set()
            self._result = self._write(snapshot)
        # Raised in the training's own thread, when it looks for the result.
        except BaseException as error:
            self._result = error

    def _write(self, snapshot: Snapshot) -> Problem | None:
        temporary = self._folder / temporary_name(snapshot.step, self._fence.name, "tmp")
        report = _reported(lambda: self._write_own(temporary, snapshot))
        reports = self._gather(report)
        problem: Problem | None = None
        if self._backend.is_main_process:
            problem = next((report.problem for report in reports if report.problem), None)
            if problem is None:
                problem = _reported(lambda: self._publish(temporary, snapshot, reports)).problem
            if problem is None:
                self._delete_older()
            else:
                remove_folder(temporary)
                if problem.kind != "user":
                    # Its name may be given already. Without a marker it is worth nothing.
                    discard_incomplete(self._folder, snapshot.step, self._fence.name)
        return self._broadcast(problem)

    def _delete_older(self) -> None:
        try:
            prune(self._folder, self._retention.keep_last, self._retention.for_ever, self._fence.name)
        except OSError as error:
            self._warn(f"WARNING: an older checkpoint could not be deleted: {error}")

    def _write_own(self, temporary: Path, snapshot: Snapshot) -> Report:
        self._fence.check()
        temporary.mkdir(parents=True, exist_ok=True)
        file = temporary / rank_file(self._backend.rank)
        record = save_tensors(file, snapshot.shapes, snapshot.tensors(), {"step": str(snapshot.step)})
        return Report(
            record=record,
            ranges=snapshot.ranges,
            scalars={name: info.scalars for name, info in snapshot.parameters.items() if info.scalars},
            buffers=snapshot.buffers,
        )

    def _publish(self, temporary: Path, snapshot: Snapshot, reports: list[Report]) -> Report:
        """Complete the folder, give it its name and, last of all, its marker."""
        manifest = self._manifest(snapshot, reports)
        manifest.check_coverage()
        records = {rank_file(rank): report.record for rank, report in enumerate(reports)}
        if self._model_config is not None:
            records[MODEL_CONFIG] = write_file(temporary / MODEL_CONFIG, [memoryview(self._model_config.encode())])
        records[MANIFEST] = write_json_file(temporary / MANIFEST, manifest.to_json())
        sync_folder(temporary)
        final = self._folder / folder_name(snapshot.step)
        self._fence.check()
        for entry in entries(self._folder):
            # One that was not complete or not intact when the run was resumed.
            if entry.step == snapshot.step:
                discard(entry, self._fence.name)
        rename_folder(temporary, final)
        # The folder of checkpoints may be new.
        sync_folder(self._folder.parent)
        marker = {
            "step": snapshot.step,
            "files": {
                name: {"size": record.size, "checksum": record.checksum}
                for name, record in records.items()
                if record is not None
            },
        }
        self._fence.check()
        write_json_file(final / f"{MARKER}.tmp", marker)
        (final / f"{MARKER}.tmp").rename(final / MARKER)
        sync_folder(final)
        return Report()

    def _manifest(self, snapshot: Snapshot, reports: list[Report]) -> Manifest:
        scalars = {name: numbers for report in reports for name, numbers in report.scalars.items()}
        vectors: dict[str, list[Range]] = {}
        buffers: dict[str, list[str]] = {}
        for rank, report in enumerate(reports):
            for vector, (start, stop) in report.ranges.items():
                vectors.setdefault(vector, []).append(Range(rank_file(rank), start, stop))
            for name in report.buffers:
                buffers.setdefault(name, []).append(rank_file(rank))
        for name, info in snapshot.parameters.items():
            if info.size == 0:
                vectors.setdefault(f"{WEIGHT}/{name}", [])
        return Manifest(
            step=snapshot.step,
            attempt=self._fence.number,
            world_size=self._backend.world_size,
            strategy=self._backend.launch.strategy,
            config=self._config,
            plan=self._plan,
            bad_steps=snapshot.bad_steps,
            parameters={
                name: replace(info, scalars=scalars.get(name, {})) for name, info in snapshot.parameters.items()
            },
            vectors={
                name: tuple(sorted(ranges, key=lambda part: part.start)) for name, ranges in sorted(vectors.items())
            },
            buffers={name: tuple(holders) for name, holders in buffers.items()},
            running_statistics=tuple(sorted(self._backend.running_statistics & buffers.keys())),
            time=time.time(),
        )

    # --- between processes ----------------------------------------------------------------------------------------

    def _gather(self, report: Report) -> list[Report]:
        if self._backend.world_size == 1:
            return [report]
        reports: list[Any] | None = [None] * self._backend.world_size if self._backend.is_main_process else None
        torch.distributed.gather_object(report, reports, dst=0, group=self._group)
        return reports or []

    def _broadcast(self, problem: Problem | None) -> Problem | None:
        if self._backend.world_size == 1:
            return problem
        shared = [problem]
        torch.distributed.broadcast_object_list(shared, src=0, group=self._group)
        return shared[0]


def _reported(work: Callable[[], Report]) -> Report:
    """What came of `work`, which may fail on one process without leaving the others waiting for it."""
    try:
        return work()
    except UserError as error:
        return Report(Problem("user", str(error)))
    except OSError as error:
        return Report(Problem("storage", str(error)))
    except Exception as error:
        return Report(Problem("bug", f"the checkpoint could not be written: {type(error).__name__}: {error}"))


def _live_tensors(pieces: list[Piece], buffers: Mapping[str, torch.Tensor]) -> Callable[[], Iterator[torch.Tensor]]:
    def tensors() -> Iterator[torch.Tensor]:
        for piece in pieces:
            yield piece.read(*piece.owned)
        yield from buffers.values()

    return tensors


def _fingerprint(buffer: torch.Tensor) -> str:
    content = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return xxhash.xxh3_128(content).hexdigest()
