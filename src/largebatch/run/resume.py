"""Finds where a run begins, at step 0 or after a checkpoint, and whether it is still the same run."""

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from largebatch.backend.base import Backend
from largebatch.batch import Timeline
from largebatch.config import RecipeConfig
from largebatch.config.differences import differences, is_within
from largebatch.errors import StorageError, UserError, file_errors, reason_of
from largebatch.plan import RunPlan
from largebatch.run.same_samples import Numbers
from largebatch.storage.catalog import Entry, entries, entry_at, unusable, verify_checksums
from largebatch.storage.layout import MANIFEST, MARKER, CheckpointError, Manifest, read_manifest
from largebatch.storage.run_folder import RunFolder
from largebatch.system.failures import Kind
from largebatch.system.presence import exists
from largebatch.words import bulleted

SECONDS_UNTIL_SEEN = 30.0
SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Start:
    """The beginning of an attempt: step 0, or a checkpoint."""

    in_place: bool = False  # whether it continues what is in the run's folder, rather than moving that aside
    checkpoint: Path | None = None  # the folder of the checkpoint to load; None means step 0
    manifest: Manifest | None = None
    skipped: list[str] = field(default_factory=list)  # later checkpoints that cannot be used, with the reasons
    changes: list[str] = field(default_factory=list)  # allowed differences from the checkpoint's recipe, one line each
    is_finished: bool = False  # whether there is nothing left to train
    samples: Numbers = field(default_factory=dict)  # what some samples must be
    differing: list[str] = field(default_factory=list)  # how the recipe differs from that of a finished run
    step: int = 0  # optimizer steps completed before


def completed_steps(resume: str, folder: RunFolder) -> int:
    """The step of the checkpoint that a run would resume from, as this process alone sees it."""
    if resume == "none":
        return 0
    if resume == "auto":
        with file_errors(f"{folder.checkpoints_dir} cannot be read", "choose another run folder"):
            return folder.checkpoint_step()
    # `find_start` refuses one that is not complete.
    with suppress(CheckpointError), file_errors(f"--resume: {resume} cannot be read"):
        return read_manifest(Path(resume)).step
    return 0


def find_start(
    resume: str, allow_change: Sequence[str], folder: RunFolder, config: RecipeConfig, backend: Backend
) -> Start:
    """Decide where the run begins, as `RunOptions` say; every process must call it and gets the same answer.

    Raises:
        UserError: The requested checkpoint cannot be used, or is from a recipe that trains something else.
    """
    if resume == "none":
        return Start()
    plan = backend.plan
    finished = False
    trained = 0
    candidates = [Path(resume)]
    if resume == "auto":
        # As the main process sees it: others may see a shared folder later, or while another run begins in it.
        finished, trained = backend.from_main_process(partial(_past, folder))
        candidates = checkpoints_of(folder.checkpoints_dir, backend)
    usable, not_usable = latest_usable(candidates, backend)
    skipped = [f"{entry.path}: {entry.problem}" for entry in not_usable]
    if usable is None:
        with backend.raise_on_all_ranks():
            _refuse_to_start_over(resume, folder, not_usable, skipped)
        changed = differences(backend.from_main_process(folder.config), config).keys() - {"batch.micro_batch_size"}
        if trained and not changed:
            if finished and trained >= plan.stop_after_steps:
                return Start(is_finished=True, step=trained)
            raise UserError(
                f"{folder.path} was trained to step {trained:,}, but has no checkpoint any more; put it back, or "
                "start over with --resume none, which moves the earlier run aside",
                everywhere=True,
            )
        # The same recipe starts over in the same folder, which keeps its history.
        return Start(in_place=not finished and not changed, skipped=skipped)
    path, manifest = usable
    path = path.resolve()
    try:
        refused, allowed = _split(manifest, config, plan, allow_change)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"the config or plan in its {MANIFEST} is not one of largebatch: {reason_of(error)}"
        raise UserError(f"{path}: {what}; resume from another checkpoint", everywhere=True) from error
    if refused and finished and not allow_change:
        return Start(differing=[*refused.values()])
    is_finished = finished and manifest.step >= plan.stop_after_steps
    with backend.raise_on_all_ranks():
        if refused:
            fields = ",".join([*allow_change, *refused])
            raise UserError(
                f"{path} is of a different recipe, and resuming would train something else:{bulleted(refused.values())}"
                "\nrestore the earlier values, or start over in another --run-dir, or with --resume none, which moves "
                f"the earlier run aside; --allow-change {fields} resumes with the change"
            )
        if manifest.step > plan.stop_after_steps and not is_finished:
            raise UserError(
                f"the checkpoint is of step {manifest.step}, but the run would end after step {plan.stop_after_steps} "
                f"(of {plan.total_steps}); resume from an earlier one (--resume PATH), or make the run at "
                "least that long"
            )
    in_place = path.is_relative_to(folder.path) or path.parent == folder.checkpoints_dir.resolve()
    samples = manifest.samples
    if any(field.split(".")[0] == "data" for field in allow_change):
        samples = {}
        allowed.append("data: its samples are not compared with those that the checkpoint was trained with")
    return Start(in_place, path, manifest, skipped, allowed, is_finished, samples, step=manifest.step)


def _past(folder: RunFolder) -> tuple[bool, int]:
    """Whether the latest attempt has finished, and the latest step of which the run is known to have had a checkpoint:
    where attempts began and, unless they failed, ended."""
    ending = folder.ending()
    steps = [line["step"] for line in folder.history() if line.get("event") in ("started", Kind.STOPPED, Kind.FINISHED)]
    return ending is not None and ending.kind == Kind.FINISHED, max(steps, default=0)


def _refuse_to_start_over(resume: str, folder: RunFolder, not_usable: Sequence[Entry], problems: Sequence[str]) -> None:
    """Raise an error unless a run may begin at step 0 that can use none of its checkpoints, because of `problems`."""
    if any(entry.is_transient for entry in not_usable):
        raise StorageError(f"no checkpoint can be used: {'; '.join(problems)}; the same command tries again")
    if resume != "auto":
        raise UserError(f"--resume: {problems[0]}; `largebatch checkpoints` lists the checkpoints in a run folder")
    if any(exists(entry.path / MARKER) for entry in not_usable):
        raise UserError(
            f"{folder.path} has checkpoints, but none of them can be used:{bulleted(problems)}\n"
            "repair them and start again; --resume none starts over and moves the earlier run aside"
        )


def checkpoints_of(folder: Path, backend: Backend) -> list[Path]:
    """The checkpoints in a folder, the latest first, as the main process sees them."""

    def names() -> list[str]:
        with file_errors(f"{folder} cannot be read", "choose another run folder"):
            return [entry.path.name for entry in entries(folder)]

    return [folder / name for name in backend.from_main_process(names)]


def latest_usable(candidates: Iterable[Path], backend: Backend) -> tuple[tuple[Path, Manifest] | None, list[Entry]]:
    """The first candidate that is complete and intact, with its manifest, and those before it, which are not.

    The processes share the work of verifying checksums.

    Raises:
        StorageError: A process does not see one that the main process sees, even after some seconds.
    """
    skipped: list[Entry] = []
    for path in candidates:
        found = entry_at(path)
        manifest = None
        if backend.gather_objects(found.problem is None)[0]:
            found = _once_seen(path)
            sees = backend.gather_objects(found.problem is None or found.is_transient)
            with backend.raise_on_all_ranks():
                if sees[0] and not sees[backend.rank]:
                    what = f"{path}: {found.problem}, but the main process sees the whole checkpoint"
                    raise StorageError(f"{what}; the same command tries again")
        if found.problem is None:
            try:
                verify_checksums(path, backend.rank, backend.world_size)
                manifest = read_manifest(path)
            except (CheckpointError, OSError) as error:
                found = unusable(found, error)
        problems = [each for each in backend.gather_objects((found.problem, found.is_transient)) if each[0] is not None]
        if manifest is not None and not problems:
            return (path, manifest), skipped
        problem, is_transient = problems[0]
        skipped.append(replace(found, problem=problem, is_transient=is_transient))
    return None, skipped


def _once_seen(path: Path) -> Entry:
    """The entry of a checkpoint, complete if it is so within some seconds: NFS remembers what was not there."""
    deadline = time.monotonic() + SECONDS_UNTIL_SEEN
    while (found := entry_at(path)).problem is not None and not found.is_transient and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return found


def _split(
    manifest: Manifest, config: RecipeConfig, plan: RunPlan, allow_change: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """The differences from a checkpoint that are not allowed, by field, and those that are; each as a line."""
    found = differences(manifest.config, config)
    if plan.sync_batch_norm and "model.sync_batch_norm" not in found:
        theirs = manifest.config["batch"]["micro_batch_size"] * manifest.world_size
        mine = plan.micro_batch_size * plan.world_size
        if theirs != mine:
            found["model.sync_batch_norm"] = (f"over {theirs} samples", f"over {mine} samples")
    refused = {}
    allowed = []
    for name, (old, new) in found.items():
        line = f"{name}: {json.dumps(old)} in the checkpoint, {json.dumps(new)} now"
        if is_within(name, allow_change):
            allowed.append(line)
        else:
            refused[name] = line
    # Samples that the checkpoint's plan had trained on at its step, and those of the plan now.
    before = TypeAdapter(Timeline).validate_python(manifest.plan["timeline"]).at(manifest.step).samples_before
    now = plan.batch_at(manifest.step).samples_before
    if allowed and before != now:
        what = f"{now - before:,} samples are skipped" if now > before else f"{before - now:,} samples are repeated"
        allowed.append(f"step {manifest.step:,} came after {before:,} samples and comes after {now:,} now: {what}")
    return refused, allowed
