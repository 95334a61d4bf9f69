"""The record that every program here writes as JSON: raw samples with their machine, versions and settings.

Tables and verdicts are computed from the samples, each time: all of them in the README.md beside the JSON, and the rows
of docs/performance.md. A median ratio is the median, over the rounds, of two samples of the same round: what slows the
machine down for a while slows both.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
OURS = "ours"
NOT_MEASURED = "not measured yet"
MISSED = ": **missed**"


@dataclass(frozen=True)
class Comparison:
    """Contenders that were measured side by side; smaller samples are better.

    Args:
        unit: The unit of the samples.
        baseline: The contender by which the others are divided.
        rounds: A sample of each contender in each round, in the order in which they were taken.
        case: Which of a program's comparisons it is, where it makes several.
        limits: The target, the largest ratio, by contender.
    """

    unit: str
    baseline: str
    rounds: list[dict[str, float]]
    case: str = ""
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The contenders, the baseline first, then in the order of the first round."""
        return [self.baseline, *(name for name in self.rounds[0] if name != self.baseline)]

    def median(self, name: str) -> float:
        """The median of a contender's samples."""
        return statistics.median(each[name] for each in self.rounds)

    def ratios(self, name: str, baseline: str) -> list[float]:
        """One contender's samples divided by another's of the same round."""
        return [each[name] / each[baseline] for each in self.rounds]

    def ratio(self, name: str, other: str) -> "Figure":
        """One contender's ratios to another's, with the target if that is the baseline."""
        case = f" ({self.case})" if self.case else ""
        limit = self.limits.get(name) if other == self.baseline else None
        return Figure(f"{name} / {other}{case}", "", self.ratios(name, other), at_most=limit)


@dataclass(frozen=True)
class Figure:
    """A number that stands by itself.

    Args:
        what: The measured quantity.
        unit: Its unit.
        samples: The measurements; none is "not measured yet".
        at_least, at_most: The targets, if there are any.
    """

    what: str
    unit: str
    samples: list[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def median(self) -> float:
        """The median of the samples; NaN if there are none."""
        return statistics.median(self.samples or [math.nan])

    @property
    def targets(self) -> list[str]:
        """The targets, each with MISSED if the median misses it."""
        aims = []
        if self.at_least is not None:
            aims.append(f"at least {self.at_least:,g}" + MISSED * (self.median < self.at_least))
        if self.at_most is not None:
            aims.append(f"at most {self.at_most:,g}" + MISSED * (self.median > self.at_most))
        return aims


@dataclass
class Record:
    """The samples of one run of a program, and what they were taken with."""

    program: str
    """Its name, which is that of its folder of results."""
    title: str
    about: str
    """What is measured, and how; Markdown."""
    settings: dict[str, Any]
    facts: dict[str, Any]
    """When, where and with which versions."""
    comparisons: list[Comparison] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What a reader must know of this run, such as a contender that was left out."""

    def to_json(self) -> str:
        """The record as `read_record` reads it."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_record(path: Path) -> Record | None:
    """The record in a JSON file, or None where the file is of another kind."""
    written = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(written, dict) or "facts" not in written:
        return None
    return Record(
        **{name: written[name] for name in ("program", "title", "about", "settings", "facts", "remarks")},
        comparisons=[Comparison(**each) for each in written["comparisons"]],
        figures=[Figure(**each) for each in written["figures"]],
    )


def take_facts(packages: Sequence[str], gpu: str | None = None) -> dict[str, Any]:
    """Date, command, commit, machine and versions, before a measurement.

    Args:
        packages: Packages whose versions matter; missing ones are listed as such.
        gpu: The GPU that is measured, by its name.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *_relative(sys.argv)]),
        "commit": _commit(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {_cpu_name()}" + (f"; {gpu}" if gpu else ""),
        "load average before": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
    }


def add_output_options(parser: argparse.ArgumentParser, program: str) -> None:
    """The options that say where a record goes; `program` is the program's name."""
    parser.add_argument(
        "results", type=Path, nargs="?", default=RESULTS / program, help=f"folder; default: bench/results/{program}"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the JSON to OUT alone, and no folder")


def write_record(record: Record, options: argparse.Namespace, name: str = "cpu") -> None:
    """Print the table, and write it and the JSON where the options of `add_output_options` say.

    Args:
        record: The finished record.
        options: The parsed options.
        name: The name of the JSON in the folder: the kind of machine.
    """
    record.facts["load average after"] = round(os.getloadavg()[0], 2)
    print("\n".join(tables(record)))
    for remark in record.remarks:
        print(f"\n{remark}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(record.to_json(), encoding="utf-8")
        return
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"{name}.json").write_text(record.to_json(), encoding="utf-8")
    records = [each for each in map(read_record, sorted(options.results.glob("*.json"))) if each is not None]
    text = "\n".join([f"# {record.title}", "", *(line for each in records for line in section(each))])
    (options.results / "README.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def write_verdicts(rows: Sequence[dict[str, Any]], wanted: str, settings: dict[str, Any], output: Path) -> NoReturn:
    """Write what came of each combination, and exit with 1 if one has another verdict.

    Args:
        rows: The names and the "verdict" of each combination.
        wanted: The verdict that each should have.
        settings: The settings of all runs, and the versions: `take_facts`.
        output: The JSON.
    """
    as_wanted = sum(row["verdict"] == wanted for row in rows)
    result = settings | {"combinations": len(rows), wanted: as_wanted, "rows": rows}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{wanted}: {as_wanted} of {len(rows)}; written to {output}")
    sys.exit(as_wanted != len(rows))


def resident(field: str) -> int:
    """VmRSS, the resident set now, or VmHWM, its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# --- tables -----------------------------------------------------------------------------------------------------------


def section(record: Record) -> list[str]:
    """A record in Markdown, without a heading: what, with what, tables, remarks; ends with an empty line."""
    facts = record.facts
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    load = f"load average {facts['load average before']} before, {facts.get('load average after', '?')} after"
    where = f"{facts['machine']}; {load}; {versions}; commit {facts['commit']}."
    remarks = [line for remark in record.remarks for line in (remark, "")]
    lines = [record.about, "", f"`{facts['command']}`, {facts['date'][:10]}; {where}", ""]
    return [*lines, *tables(record), "", *remarks]


def tables(record: Record) -> list[str]:
    """The record's numbers as Markdown tables."""
    lines: list[str] = []
    comparisons = record.comparisons
    if comparisons:
        has_cases = any(each.case for each in comparisons)
        header = ["contender", "median", "ratio in the same round, median (quartiles)", "target"]
        lines += _table([*(["case"] if has_cases else []), *header], _rows(comparisons, has_cases))
    if record.figures:
        lines += [""] if lines else []
        lines += _table(["figure", "median", "target"], [_figure_row(each) for each in record.figures])
    return lines


def _rows(comparisons: Sequence[Comparison], has_cases: bool) -> Iterator[list[str]]:
    for comparison in comparisons:
        for name in comparison.names:
            ratio = comparison.ratio(name, comparison.baseline)
            spread = f"{_spread(ratio.samples)} of {comparison.baseline}"
            if name == comparison.baseline:
                spread = f"1, {name} itself"
            cells = [name, f"{_digits(comparison.median(name))} {comparison.unit}", spread, ", ".join(ratio.targets)]
            yield [*([comparison.case] if has_cases else []), *cells]


def _spread(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.3f}"
    if len(values) < 2:
        return middle
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle} ({low:.3f} to {high:.3f})"


def _figure_row(figure: Figure) -> list[str]:
    value = f"{_digits(figure.median)} {figure.unit}" if figure.samples else NOT_MEASURED
    return [figure.what, value, ", ".join(figure.targets)]


def behind(record: Record) -> list[str]:
    """One line for each missed target, and for each contender that takes less than ours in most rounds."""
    ratios = [each.ratio(name, each.baseline) for each in record.comparisons for name in each.limits]
    missed: dict[str, list[str]] = {}
    for figure in [*record.figures, *ratios]:
        for target in figure.targets:
            if MISSED in target:
                missed.setdefault(target.removesuffix(MISSED), []).append(_line(figure))
    lines = []
    for target, (first, *others) in missed.items():
        more = f", and {len(others)} more" if others else ""
        lines.append(f"{first}{more} (target: {target})")
    with_ours = [each for each in record.comparisons if OURS in each.names]
    ratios = [each.ratio(OURS, name) for each in with_ours for name in each.names if not name.startswith(OURS)]
    slower = [_line(each) for each in ratios if round(each.median, 3) > 1 and MISSED not in "".join(each.targets)]
    return [*lines, *slower]


def _line(figure: Figure) -> str:
    return f"{figure.what}: {figure.median:.4g} {figure.unit}".rstrip()


def _table(header: Sequence[str], rows: Iterator[list[str]] | Sequence[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _digits(value: float) -> str:
    """Three significant digits, and all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# --- facts ------------------------------------------------------------------------------------------------------------


def _relative(words: Sequence[str]) -> list[str]:
    """Paths inside the repository as seen from its root."""
    return [word.removeprefix(f"{ROOT}{os.sep}") for word in words]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    # A copy of the code on a borrowed machine may have neither git nor its folder.
    told = os.environ.get("LARGEBATCH_COMMIT")
    if told:
        return told
    describe = ["git", "describe", "--always", "--dirty"]
    try:
        asked = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown CPU")
