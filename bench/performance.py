"""Makes docs/performance.md from bench/results: from the samples alone, what is behind first.

.venv/bin/python bench/performance.py
"""

from pathlib import Path

from record import NOT_MEASURED, RESULTS, ROOT, Record, behind, not_measured, read_record, section

DOCUMENT = ROOT / "docs/performance.md"
PROGRAMS = (
    "loop_tax",
    "two_process",
    "start",
    "data_path",
    "memory",
    "checkpoints",
    "noise_scale",
)
# `make gpu` writes a JSON for each of its parts.
GPU = "gpu"
GPU_PARTS = ("correctness", "ablations", "memory", "throughput", "scaling")
INTRODUCTION = """# Performance

<!-- Made by bench/performance.py from the samples in bench/results: change a program or measure again instead. -->

For everyone who wonders what this library costs beside a loop written by hand, and where it is slower. `make bench`
takes the measurements and generates this page; [bench/README.md](../bench/README.md) describes the programs. Contenders
take turns within one run. A ratio divides two measurements of the same round; the tables show the median over the
rounds, with quartiles in parentheses. Raw samples are in the JSON files of [bench/results](../bench/results).
"""


def document(results: Path = RESULTS) -> str:
    """The page.

    Args:
        results: A folder of folders, each with JSON files of one program.
    """
    found = {name: _records(results / name) for name in (*PROGRAMS, GPU)}
    late = [f"- {record.title}: {line}." for records in found.values() for record in records for line in behind(record)]
    waiting = [f"- `bench/{name}.py`: {NOT_MEASURED}." for name in PROGRAMS if not found[name]]
    waiting += _parts_not_measured(results)
    waiting += [
        f"- {what}: {NOT_MEASURED}."
        for records in found.values()
        for record in records
        for what in not_measured(record)
    ]
    if late:
        late = ["Missed targets, and contenders that are faster or need less than `ours`.", "", *late]
    elif any(record.is_measured for records in found.values() for record in records):
        late = ["No target is missed, and no contender takes less than `ours`."]
    lines = [INTRODUCTION, "## Where it is behind", "", *(late or ["Nothing is measured yet."])]
    if waiting:
        lines += ["", "## What is not measured yet", "", *waiting]
    for name, records in found.items():
        for record in records:
            lines += ["", f"## {record.title}", "", f"[bench/results/{name}](../bench/results/{name})", ""]
            lines += section(record)[:-1]
    others = [folder for folder in sorted(results.iterdir()) if (folder / "README.md").exists()]
    others = [folder for folder in others if not found.get(folder.name)]
    if others:
        lines += ["", "## Other measurements", ""]
        lines += [f"- [{_title(folder)}](../bench/results/{folder.name}/README.md)" for folder in others]
    return "\n".join(lines).rstrip() + "\n"


def _parts_not_measured(results: Path) -> list[str]:
    # A reading that was kept has a folder of its own.
    missing = [name for name in GPU_PARTS if not any((results / GPU).rglob(f"{name}*.json"))]
    why = "no GPU has been used yet" if len(missing) == len(GPU_PARTS) else NOT_MEASURED
    return [f"- `make gpu` ({', '.join(missing)}): {why}."] if missing else []


def _records(folder: Path) -> list[Record]:
    read = [read_record(file) for file in sorted(folder.glob("*.json"))]
    return [record for record in read if record is not None]


def _title(folder: Path) -> str:
    """The first heading of its README."""
    return (folder / "README.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
