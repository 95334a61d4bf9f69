"""Rows of a part: each is measured under its own try, and the part's record is saved after it."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

from largebatch.tools.local_jobs.jobs import JobFailed, run_job
from launches import accelerate_config, job_options
from record import RESULTS, ROOT, Comparison, Figure, Record, read_record, tables

SINGLE = "single"
ON_THE_CPU = {"CUDA_VISIBLE_DEVICES": ""}

# How long a row may take that begins just before the part's time is up, in seconds.
GRACE = 60

# With this, torch.compile ends the text of each of its errors.
ADVICE = "Set TORCHDYNAMO_VERBOSE"

Result = Comparison | Figure | str
"""What a row gives: a pair that was measured side by side, a number, or a remark."""


@dataclass(frozen=True)
class Deadline:
    """The moment by which a row has to end."""

    moment: float
    clock: Callable[[], float]

    @property
    def seconds_left(self) -> float:
        """Until then, or 0."""
        return max(0.0, self.moment - self.clock())


@dataclass(frozen=True)
class Row:
    """One measurement of a part, under the name by which it is reported."""

    name: str
    measure: Callable[[Deadline], Sequence[Result]]


class NotMeasured(Exception):
    """A row cannot be measured on this machine; the message says why."""


class Part:
    """A part that is being measured, and the file that has what it has measured so far.

    Args:
        record: What the rows are added to.
        file: Rewritten after every row. The whole text of failures is added to failures.txt beside it.
        seconds: Time after which no further row begins.
        only: Groups of words. If there are any, only rows whose names have all the words of a group are measured.
        known: Names of rows that are not measured.
        clock: Seconds since some moment.
    """

    def __init__(
        self,
        record: Record,
        file: Path,
        seconds: float,
        only: Sequence[str] = (),
        known: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.record = record
        self._file = file
        self._only = only
        self._known = known
        self._clock = clock
        self._last_start = clock() + seconds
        self._seconds: dict[str, float] = {}
        self._left_out: list[str] = []
        self._lock = Lock()

    def measure(self, rows: Iterable[Row], at_once: int = 1) -> None:
        """Measure the rows in their order, `at_once` of them at a time; a row that fails does not stop the others."""
        self._save()
        rows = filter(self._is_chosen, rows)
        if at_once == 1:
            # One by one, so that rows can share what a generator keeps alive between them.
            for row in rows:
                self._measure(row)
        else:
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(self._measure, rows))
        if not self._seconds:
            print(f"no row is chosen; there are: {'; '.join(self._left_out)}", flush=True)
        print("\n".join(tables(self.record)), flush=True)
        for remark in self.record.remarks:
            print(f"- {remark}", flush=True)

    def _is_chosen(self, row: Row) -> bool:
        name = row.name.lower()
        is_chosen = not self._only or any(all(word in name for word in group.lower().split()) for group in self._only)
        is_chosen = is_chosen and row.name not in self._known
        if not is_chosen:
            self._left_out.append(row.name)
        return is_chosen

    def _measure(self, row: Row) -> None:
        started = self._clock()
        try:
            if started >= self._last_start:
                raise NotMeasured("the part's time was up")
            results = row.measure(Deadline(self._last_start + GRACE, self._clock))
        except NotMeasured as reason:
            results = not_measured(row.name, str(reason))
        # Whatever a row meets, the other rows are worth having.
        except Exception as error:
            results = not_measured(row.name, f"failed: {in_one_line(error)}")
            self._keep(row.name, error)
        with self._lock:
            for result in results:
                kinds: dict[type, list[Any]] = {
                    Comparison: self.record.comparisons,
                    Figure: self.record.figures,
                    str: self.record.remarks,
                }
                kinds[type(result)].append(result)
            self._seconds[row.name] = round(self._clock() - started, 1)
            self._save()
        print(f"{self.record.program}: {row.name}: {self._seconds[row.name]:.0f} s", file=sys.stderr, flush=True)

    @property
    def folder(self) -> Path:
        """Where its file is."""
        return self._file.parent

    def _keep(self, name: str, error: Exception) -> None:
        # A job's failure has the tracebacks and the output of its processes; that it was raised here says nothing.
        text = str(error) if isinstance(error, JobFailed) else "".join(traceback.format_exception(error))
        with self._lock, self._file.with_name("failures.txt").open("a", encoding="utf-8") as file:
            file.write(f"=== {self._file.stem}: {name}\n{text.rstrip()}\n\n")

    def _save(self) -> None:
        self.record.facts["load average after"] = round(os.getloadavg()[0], 2)
        written = json.loads(self.record.to_json()) | {"seconds of each row": self._seconds}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads it, or kills this program, finds one version of it or the next.
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._file)


def measured_before(part: str, gpu: str) -> set[str]:
    """The names of a part's rows that `bench/results` has of this kind of GPU."""
    names: set[str] = set()
    for file in (RESULTS / "gpu").rglob(f"{part}*.json"):
        record = read_record(file)
        if record is not None and gpu in record.facts["machine"]:
            measured = json.loads(file.read_text(encoding="utf-8"))["seconds of each row"]
            names |= set(measured).difference(figure.what for figure in record.figures if not figure.samples)
    return names


def not_measured(name: str, why: str) -> list[Result]:
    """A figure without samples, and the reason."""
    return [Figure(name, "", []), f"{name}: not measured: {why}."]


def in_one_line(error: Exception) -> str:
    """The cause of a failure, without the advice that torch.compile gives below it."""
    if not isinstance(error, JobFailed):
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    reports = []
    for rank, reason, output in error.reports:
        lines = [line for line in reason.splitlines() if not line.startswith(ADVICE)]
        reports.append((rank, "\n".join(lines), output))
    return JobFailed(reports).in_one_line()


# --- jobs -------------------------------------------------------------------------------------------------------------


class Launcher:
    """Starts jobs from one warm process tree, and knows the environment of each strategy.

    Args:
        world_size: Processes of a job; "single" has one and no launcher.
        strategies: The strategies that can be asked for, without "single".
    """

    def __init__(self, world_size: int, strategies: Sequence[str]):
        self.world_size = world_size
        self._unavailable = {name: why for name in strategies if (why := why_not(name))}
        # Here, in one thread: Accelerate's own code makes them.
        available = [name for name in strategies if name not in self._unavailable]
        self._options = {name: job_options(name, world_size, 0) for name in available}
        self._options[SINGLE] = {"world_size": 1, "environment": {}, "folder": ROOT}

    def options(self, strategy: str, deadline: Deadline) -> dict[str, Any]:
        """The options of a job: its processes and the variables of their launch.

        Raises:
            NotMeasured: The strategy's engine is not installed.
        """
        if strategy in self._unavailable:
            raise NotMeasured(self._unavailable[strategy])
        return self._options[strategy] | {"timeout": deadline.seconds_left}

    def run(
        self,
        deadline: Deadline,
        strategy: str,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        """The result of the first process; the variables are added to those of the launch.

        Raises:
            JobFailed: A process failed, or did not end in time.
            NotMeasured: The strategy's engine is not installed.
        """
        options = self.options(strategy, deadline)
        options["environment"] = {**options["environment"], **environment}
        return run_job(function, *arguments, **options)[0]


def why_not(strategy: str) -> str | None:
    """Why a strategy cannot be launched with the packages that are installed; None if it can."""
    from importlib.util import find_spec

    needs_deepspeed = "DEEPSPEED" in accelerate_config(strategy).read_text(encoding="utf-8")
    return "deepspeed is not installed" if needs_deepspeed and find_spec("deepspeed") is None else None
