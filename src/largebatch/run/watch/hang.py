"""Who a hanging job waits for: each process reports its collectives, and compares the reports of all.

torch numbers the collectives of each process group and records the latest ones ("flight recorder"), over NCCL as over
gloo. A process that has not entered the number in which others wait is the one to look at.
"""

import json
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from largebatch.failures import keep_error, node_name
from largebatch.run.record.record import report_failure
from largebatch.storage.files import replace_file, replace_json_file

# torch's recorders: of NCCL, in builds with CUDA only, and of gloo.
RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
SECONDS_BETWEEN_LOOKS = 0.5
MAX_NAMED = 4


@dataclass(frozen=True)
class Collectives:
    """How far a process is in the collectives of one group."""

    group: str  # name of the group, the same on all of its processes
    about: str  # the group in words, such as "0 (default_pg) over gloo"
    entered: int  # number of the latest collective that the process entered
    waits_in: int | None = None  # number of the first collective that it entered and that has not ended
    operation: str = ""  # the operation of that collective, such as "all_reduce"
    since: int = 0  # when that collective was entered, in nanoseconds since 1970


@dataclass(frozen=True)
class Report:
    """The collectives of one process when it noticed the hang."""

    groups: list[str]  # names of the groups to which it belongs
    collectives: list[Collectives]


def report_hang(message: str) -> None:
    """Record that this process ends because of a hang."""
    report_failure(message, kind="hang")
    keep_error(message, kind="hang")


def place_of_this_process() -> str:
    """This node and process, as messages name them."""
    return f"{node_name()}, process {os.getpid()}"


class HangReport:
    """Tells what the processes of a hanging job wait for.

    Args:
        folder: Shared by all processes, for their reports. The recorder's own dumps are put there, too, or
            into the job's logs if there are any; `torchfrtrace` reads those of NCCL.
        rank: This process's rank.
        places: `place_of_this_process` of every rank.
    """

    def __init__(self, folder: Path, rank: int, places: Sequence[str]):
        self._folder, self._rank, self._places = folder, rank, places

    def explain(self, seconds: float) -> str:
        """Report, wait at most this many seconds for the reports of all, and say in one line who is missing where."""
        if len(self._places) == 1:
            return "the stack says where it hangs"
        dumps = _dumps()
        with suppress(OSError):
            folder = Path(os.environ.get("LARGEBATCH_LOGS") or self._folder)
            for prefix, dump in zip(("fr_", "host_fr_"), dumps, strict=False):
                replace_file(folder / f"{prefix}{self._rank}", [memoryview(dump)])
        files = {f"rank_{rank:05d}.json": rank for rank in range(len(self._places))}
        own = self._folder / list(files)[self._rank]
        replace_json_file(own, asdict(report_of(map(pickle.loads, dumps))))
        deadline = time.monotonic() + seconds
        while True:
            # A listing, because NFS remembers for a while that a single file was not there.
            found = {files[path.name]: path for path in self._folder.iterdir() if path.name in files}
            if len(found) == len(files) or time.monotonic() >= deadline:
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return compare({rank: _read(path) for rank, path in sorted(found.items())}, self._places)


def _dumps() -> list[bytes]:
    """The records of this process, pickled by torch; at most that of NCCL and that of gloo."""
    # These functions are not public in torch.
    dumps = [getattr(torch._C._distributed_c10d, name, bytes)() for name in RECORDERS]
    return [dump for dump in dumps if dump and pickle.loads(dump).get("entries")]


def report_of(records: Iterable[Mapping[str, Any]]) -> Report:
    """Sum up torch's records of this process."""
    recorded: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        for entry in record["entries"]:
            if not entry["is_p2p"]:
                library, _, _ = entry["profiling_name"].partition(":")
                # A group may have a library for each kind of device, and each counts separately.
                group, description = entry["process_group"]
                recorded[group, description, library].append(entry)
    collectives = []
    for (group, description, library), entries in recorded.items():
        about = f"{group} ({description}) over {library}"
        entered = max(entry["collective_seq_id"] for entry in entries)
        unfinished = [entry for entry in entries if not (entry["retired"] or entry["state"] == "completed")]
        if unfinished:
            first = min(unfinished, key=lambda entry: entry["collective_seq_id"])
            operation = first["profiling_name"].rpartition(":")[2]
            waits = first["collective_seq_id"], operation, first["time_created_ns"]
            collectives.append(Collectives(group, about, entered, *waits))
        else:
            collectives.append(Collectives(group, about, entered))
    return Report(list(torch.distributed.distributed_c10d._world.pg_names.values()), collectives)


def _read(path: Path) -> Report:
    value = json.loads(path.read_text(encoding="utf-8"))
    return Report(value["groups"], [Collectives(**collectives) for collectives in value["collectives"]])


@dataclass(frozen=True)
class Wait:
    """A collective in which processes wait."""

    first: Collectives  # how far the process is that entered it first
    waiting: list[int]  # ranks that wait in it
    missing: list[int]  # ranks of its group that have not entered it


def compare(reports: Mapping[int, Report], places: Sequence[str]) -> str:
    """Say in one line for whom the processes wait, from the reports by rank and the place of every rank."""
    waits = _waits(reports)
    silent = [rank for rank in range(len(places)) if rank not in reports]
    waiting = {rank for wait in waits for rank in wait.waiting}

    def distance(wait: Wait) -> tuple[bool, bool, int]:
        # A process that is missing because it is itself waiting for a third one is not the one to look at.
        return not wait.missing, waiting.issuperset(wait.missing), wait.first.since

    wait = min(waits, key=distance, default=None)
    what = f"{wait.first.operation} number {wait.first.waits_in} of group {wait.first.about}" if wait else ""
    if silent:
        gone = f"{_named(silent, places)} wrote no stack: stopped, stuck inside a library, or on a node that is gone"
        return f"{gone}; {_ranks(wait.waiting)} waited in {what}" if wait else gone
    if not any(report.collectives for report in reports.values()):
        return "torch recorded no collectives (TORCH_FR_BUFFER_SIZE)"
    if wait is None:
        return "no process waited in a collective: the stacks say where they hang"
    if wait.missing:
        return f"{_named(wait.missing, places)} had not entered {what}, in which {_ranks(wait.waiting)} waited"
    return f"all processes had entered {what}, which did not end: the network or a device hangs"


def _waits(reports: Mapping[int, Report]) -> list[Wait]:
    """The earliest unfinished collective of each group."""
    by_group: dict[str, dict[int, Collectives]] = defaultdict(dict)
    for rank, report in reports.items():
        for collectives in report.collectives:
            by_group[collectives.about][rank] = collectives
    waits = []
    for members in by_group.values():
        numbers = [member.waits_in for member in members.values() if member.waits_in is not None]
        if not numbers:
            continue
        waiting = [rank for rank, member in members.items() if member.waits_in == min(numbers)]
        first = min((members[rank] for rank in waiting), key=lambda member: member.since)
        # A process without a record of the group entered its last collective long ago, or none.
        missing = [
            rank
            for rank, report in reports.items()
            if first.group in report.groups and (rank not in members or members[rank].entered < min(numbers))
        ]
        waits.append(Wait(first, waiting, missing))
    return waits


def _named(ranks: Sequence[int], places: Sequence[str]) -> str:
    """Such as "rank 3 (h2, process 4711)"; without the places if there are many ranks."""
    if len(ranks) > MAX_NAMED:
        return _ranks(ranks)
    return ", ".join(f"rank {rank} ({places[rank]})" for rank in ranks)


def _ranks(ranks: Sequence[int]) -> str:
    """Such as "ranks 0-2, 4"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    words = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
