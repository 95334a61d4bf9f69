"""Writes checkpoints: every process writes its own ranges, in the background; only complete ones are published."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from largebatch.backend.base import Backend
from largebatch.backend.exchange import gather
from largebatch.backend.state import EngineState
from largebatch.config.sections import Checkpoint
from largebatch.errors import StorageError, TrainingFailed, UserError
from largebatch.run.checkpoint.staging import Staging, available_memory
from largebatch.run.watch.waiting import in_thread, wait_together
from largebatch.storage.attempts import Attempt
from largebatch.storage.catalog import discard, discard_incomplete, prune
from largebatch.storage.files import (
    FileRecord,
    remove_folder,
    rename_folder,
    replace_json_file,
    sync_folder,
    write_file,
    write_json_file,
)
from largebatch.storage.layout import (
    BUFFER,
    FORMAT,
    MANIFEST,
    MARKER,
    WEIGHT,
    Manifest,
    Range,
    folder_name,
    rank_file,
    temporary_name,
)
from largebatch.storage.tensors import Shapes, fingerprint, save_tensors
from largebatch.system.failures import Kind, describe_error, kind_of


class Part(NamedTuple):
    """One process's part of a checkpoint, as written; JSON as it is."""

    size: int  # of the file, in bytes
    checksum: str
    ranges: dict[str, tuple[int, int]]  # by vector: its first element and the one after its last
    buffers: list[str]
    scalars: dict[str, Mapping[str, float]]  # the optimizer's scalar states, by parameter


@dataclass
class CheckpointWriter:
    """Writes checkpoints of a run; every process of the job has one and makes the same calls."""

    backend: Backend
    folder: Path  # the run's folder of checkpoints
    attempt: Attempt  # the attempt that writes; once a later one has begun, it may not publish
    settings: Checkpoint
    config: dict[str, Any]  # the resolved recipe, as JSON
    model_files: Mapping[str, bytes]  # as `model_files` returns them
    warn: Callable[[str], None]  # called by the main process with a warning for the user
    not_written: Callable[[int, str], None]  # called by the main process with the step and reason of a failed save
    heartbeat: Callable[[], None]  # called while a process writes that others wait for
    last_step: int = 0  # step of the latest checkpoint that is known to be complete; 0 if there is none
    latest: Path | None = None  # its folder

    def __post_init__(self) -> None:
        # Threads must not share a group.
        self._group = self.backend.new_host_group()
        on_gpu = self.backend.device.type == "cuda"
        self._staging = Staging(page_locked=on_gpu)
        self._copy_stream = torch.cuda.Stream(self.backend.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copied = threading.Event()
        self._copied.set()
        self._work: Future[None] | None = None
        self._progress = threading.Event()
        self._writing = 0
        self._completed: list[int] = []
        self._problem = ""  # why the latest save failed, if one has

    def save(self, step: int, about: Mapping[str, Any]) -> None:
        """Write a checkpoint of the current state, with `about` in its manifest; waits for one that is being written.

        Asynchronously, the state is copied while the next step's gradients are computed: call `wait_until_copied`
        before weights or optimizer states change. If the storage refuses it, `warn` is called and training may go on.

        Raises:
            TrainingFailed: The previous checkpoint could not be written, for a reason that will not go away.
            UserError: The host has no memory for a copy of the state.
        """
        self.wait()
        self.backend.statistics.count(step)
        state = self._own_state()
        space = self._staging.tensors(_shapes(state)) if self.settings.asynchronous else None
        self._writing = step
        self._copied.clear()
        if self._copy_stream is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream(self.backend.device))
        self._work = in_thread("checkpoint", partial(self._write, step, about, state, space))
        if space is None:
            self.wait()

    def reserve(self) -> None:
        """Refuse state that a checkpoint cannot hold, and take what page-locked memory asynchronous ones will need.

        Every process must call it after its first step, when all states are there. Page-locking takes seconds in which
        no kernel can be launched.

        Raises:
            BackendMismatch: The optimizer has other states than its entry declares.
            UserError: The host has too little memory.
        """
        state = self.backend.engine_state()
        if self.settings.asynchronous and self._copy_stream is not None:
            # Every process asks before any takes some.
            available = min(self.backend.gather_objects(available_memory())) // self.backend.launch.local_world_size
            with self.backend.raise_on_all_ranks():
                self._staging.tensors(_shapes(state), available)

    def wait_until_copied(self) -> None:
        """Return when the state may be changed."""
        self._copied.wait()

    def wait(self) -> None:
        """Return when no process writes a checkpoint any more; every process must call this.

        Raises:
            TrainingFailed: As in `save`.
        """
        # Always, because others may not have noticed yet that theirs is done.
        wait_together(self.backend, self.heartbeat, self._work, self._progress)
        self._conclude()

    def _conclude(self) -> None:
        """Take note of what has become of the checkpoint that was being written, if any."""
        if self._work is None:
            return
        step = self._writing
        error = self._work.exception()
        self._work = None
        if error is None:
            self._completed.append(step)
            self.last_step = step
            self.latest = self.folder / folder_name(step)
        elif kind_of(error) != Kind.FILES:
            raise error
        else:
            self._problem = str(error)
            if self.backend.is_main_process:
                self.warn(
                    f"WARNING: the checkpoint of step {step} could not be written: {error}. Training continues and "
                    f"will write the next checkpoint; the latest complete one: {self.latest or 'none yet'}"
                )
                self.not_written(step, self._problem)

    def require(self, step: int) -> Path:
        """The complete checkpoint of the last step; StorageError, on all processes, if it could not be written."""
        if self.latest is None or self.last_step < step:
            raise StorageError(
                f"the last checkpoint, of step {step}, could not be written: {self._problem}; correct that, and the "
                f"same command tries again, from the latest complete one: {self.latest or 'none yet'}",
                everywhere=True,
            )
        return self.latest

    def poll(self) -> list[int]:
        """The steps of checkpoints completed since the last call; raise TrainingFailed as `save` does."""
        if self._work is not None and self._work.done():
            self._conclude()
        completed = self._completed
        self._completed = []
        return completed

    # --- taking the state -----------------------------------------------------------------------------------------

    def _own_state(self) -> EngineState:
        """The state this process writes: pieces it owns and, on all but the first process, only buffers that differ."""
        state = self.backend.engine_state()
        pieces = [piece for piece in state.pieces if piece.owned[0] < piece.owned[1]]
        buffers = state.buffers
        if self.backend.world_size > 1 and buffers:
            mine = {name: fingerprint(buffer) for name, buffer in buffers.items()}
            first = gather(mine if self.backend.is_main_process else None, self._group)[0]
            if not self.backend.is_main_process:
                buffers = {name: buffer for name, buffer in buffers.items() if mine[name] != first.get(name)}
        if self.settings.asynchronous:
            # They change in forward passes.
            buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        return EngineState(state.parameters, pieces, buffers)

    def _copy(self, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
        with torch.cuda.stream(self._copy_stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        if self._copy_stream is not None:
            self._copy_stream.synchronize()

    # --- writing, in the background -------------------------------------------------------------------------------

    def _write(
        self, step: int, about: Mapping[str, Any], state: EngineState, space: Mapping[str, torch.Tensor] | None
    ) -> None:
        """Copy the state to `space`, if there is some, then write and publish it."""
        tensors = _tensors(state)
        try:
            if self._copy_stream is not None:
                torch.cuda.set_device(self.backend.device)
            if space is not None:
                self._copy(space.values(), tensors)
                tensors = iter(space.values())
        finally:
            self._copied.set()
        final = self.folder / folder_name(step)
        temporary = self.folder / temporary_name(final.name, self.attempt.name, "tmp")
        try:
            with self.backend.raise_on_all_ranks(self._group), _failures():
                part = self._write_own(temporary, state, tensors)
            parts = [Part(*each) for each in gather(part, self._group, to_first=True)]
            with self.backend.raise_on_all_ranks(self._group), _failures():
                if self.backend.is_main_process:
                    self._publish(temporary, final, self._manifest(step, about, state, parts), parts)
        except UserError:
            if self.backend.is_main_process:
                with suppress(OSError):
                    remove_folder(temporary)
                # It may have its final name already. Without a marker it is useless, but a later attempt's is not.
                with suppress(OSError, TrainingFailed):
                    self.attempt.check()
                    discard_incomplete(final, self.attempt.name)
            raise

    def _write_own(self, temporary: Path, state: EngineState, tensors: Iterator[torch.Tensor]) -> Part:
        self.attempt.check()
        temporary.mkdir(parents=True, exist_ok=True)
        ranges = {piece.vector: piece.owned for piece in state.pieces}
        file = temporary / rank_file(self.backend.rank)

        def counted() -> Iterator[torch.Tensor]:
            for tensor in tensors:
                self._progress.set()
                yield tensor

        record = save_tensors(file, _shapes(state), counted())
        scalars = {name: info.scalars for name, info in state.parameters.items() if info.scalars}
        return Part(record.size, record.checksum, ranges, list(state.buffers), scalars)

    def _publish(self, temporary: Path, final: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
        """Complete the folder, give it its name and, last of all, its marker; then delete older checkpoints."""
        manifest.check_coverage()
        records = {rank_file(rank): FileRecord(part.size, part.checksum) for rank, part in enumerate(parts)}
        for name, content in self.model_files.items():
            records[name] = write_file(temporary / name, content)
        records[MANIFEST] = write_json_file(temporary / MANIFEST, manifest.model_dump(exclude_defaults=True))
        sync_folder(temporary)
        self.attempt.check()
        # One that was not complete or not intact when the run was resumed.
        if os.path.lexists(final):
            discard(final, self.attempt.name)
        rename_folder(temporary, final)
        # The folder of checkpoints may be new.
        sync_folder(self.folder.parent)
        self.attempt.check()
        files = {name: asdict(record) for name, record in records.items()}
        replace_json_file(final / MARKER, {"step": manifest.step, "files": files})
        try:
            best = manifest.best.step if manifest.best else None
            keeps = self.backend.plan.keeps_checkpoint_of
            prune(self.folder, self.settings.keep_last, lambda step: step == best or keeps(step), self.attempt.name)
        except OSError as problem:
            self.warn(f"WARNING: an older checkpoint could not be deleted: {problem}")

    def _manifest(self, step: int, about: Mapping[str, Any], state: EngineState, parts: Sequence[Part]) -> Manifest:
        scalars: dict[str, Mapping[str, float]] = {}
        vectors: dict[str, list[Range]] = {}
        buffers: dict[str, tuple[int, ...]] = {}
        for rank, part in enumerate(parts):
            scalars |= part.scalars
            for vector, (start, stop) in part.ranges.items():
                vectors.setdefault(vector, []).append(Range(rank, start, stop))
            for name in part.buffers:
                buffers[name] = (*buffers.get(name, ()), rank)
        for name in state.parameters:
            # One without elements has no ranges.
            vectors.setdefault(f"{WEIGHT}/{name}", [])
        return Manifest(
            format=FORMAT,
            step=step,
            attempt=self.attempt.number,
            world_size=self.backend.world_size,
            strategy=self.backend.launch.strategy,
            time=time.time(),
            **about,
            config=self.config,
            plan=json.loads(self.backend.plan.to_json()),
            parameters={name: replace(info, scalars=scalars.get(name, {})) for name, info in state.parameters.items()},
            vectors={
                name: tuple(sorted(ranges, key=lambda part: part.start)) for name, ranges in sorted(vectors.items())
            },
            running_statistics=tuple(sorted(self.backend.statistics.names & buffers.keys())),
            buffers=buffers,
        )


@contextmanager
def _failures() -> Iterator[None]:
    """Raise what goes wrong as an error that all processes can raise; one of the storage lets training go on."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise StorageError(str(error)) from error
    except Exception as error:
        raise TrainingFailed(f"the checkpoint could not be written: {describe_error(error)}") from error


def _shapes(state: EngineState) -> Shapes:
    """Dtype and shape of each tensor that this process writes, by its name in the file."""
    pieces = {piece.vector: (piece.tensor.dtype, (piece.owned[1] - piece.owned[0],)) for piece in state.pieces}
    return pieces | {f"{BUFFER}/{name}": (each.dtype, tuple(each.shape)) for name, each in state.buffers.items()}


def _tensors(state: EngineState) -> Iterator[torch.Tensor]:
    """What `_shapes` describes, in the same order."""
    yield from (piece.read(*piece.owned) for piece in state.pieces)
    yield from state.buffers.values()
