"""Makes docs/performance.md from bench/results: from the samples alone, what is behind first.

.venv/bin/python bench/performance.py
"""

import re
from pathlib import Path

from record import MISSED, NOT_MEASURED, OURS, RESULTS, ROOT, Figure, Record, behind, read_record

DOCUMENT = ROOT / "docs/performance.md"
# `make gpu` writes a JSON for each of its parts.
GPU_PARTS = ("correctness", "memory", "throughput", "scaling", "training")
# The files; the contender that is divided by the baseline, or "" for all figures without a unit; the words with which
# the cases begin; and what the row compares. A GPU reading that was kept has a folder of its own.
ROWS = (
    ("loop_tax/*", OURS, "", "tiny model's step; PyTorch's tutorial loop"),
    ("two_process/*", OURS, "", "step on two processes; loops by hand"),
    ("start/*", OURS, "", "launch to first step; bare script"),
    ("data_path/*", OURS, "", "preparing text; tokenizer alone"),
    ("memory/*", OURS, "", "peak memory; Transformers' `Trainer`"),
    ("checkpoints/*", OURS, "", "save or load; `torch.distributed.checkpoint`"),
    ("coupled_loss/*", OURS, "B = 16,384", "CLIP's loss at 16,384, time and memory; open_clip's by hand"),
    ("noise_scale/*", "one step in 10 measures", "", "step with noise scale; without"),
    ("gpu/**/throughput*", OURS, "GPT-2 124M", "step of GPT-2 124M; bare compiled loop"),
    ("gpu/**/throughput*", OURS, "Llama 1.3B", "step of Llama 1.3B; bare compiled loop"),
    ("gpu/**/throughput*", OURS, "ResNet-50", "step of ResNet-50, DDP; bare compiled loop"),
    ("gpu/**/memory*", "", "", "peak memory; `plan` of that commit (today's: within 5 %)"),
    ("gpu/**/scaling*", "", "", "tokens/s on several GPUs; several times one"),
)
INTRODUCTION = """# Performance

<!-- Made by bench/performance.py from bench/results. -->

This page is for anyone who asks what this library costs beside other loops, and where it is slower. A ratio is the
median of ours / theirs in the same round; below 1, ours takes less. [bench](../bench/README.md) says how to measure
again.

## Where it is behind

Missed targets and faster contenders:
"""
TABLE = """
## All readings

A range is the lowest and highest of several cases. Linked folders have all numbers;
[bench/results](../bench/results) has further measurements.

| program | ours; theirs | ratio | target | commit, machine |
| --- | --- | --- | --- | --- |"""


def document(results: Path = RESULTS) -> str:
    """The page.

    Args:
        results: A folder of folders, each with JSON files of one program.
    """
    late = [
        f"- {re.split('[,;]', record.title)[0]}: {line}."
        for program in dict.fromkeys(row[0].partition("/")[0] for row in ROWS)
        for record in _records(results, f"{program}/**/*")
        for line in behind(record)
    ]
    rows = [_row(results, *row) for row in ROWS]
    return "\n".join([INTRODUCTION, *(late or ["- Nothing that was measured."]), TABLE, *rows]) + "\n"


def _row(results: Path, files: str, contender: str, case: str, what: str) -> str:
    figures: list[Figure] = []
    sources = {}
    for record in _records(results, files):
        found = [each for each in record.figures if each.samples and not each.unit]
        if contender:
            with_it = [each for each in record.comparisons if contender in each.names and each.case.startswith(case)]
            found = [each.ratio(contender, each.baseline) for each in with_it]
        if found:
            figures += found
            machine = record.facts["machine"].rpartition(" x ")[2].partition(",")[0]
            sources[f"{record.facts['commit']}, {machine}"] = None
    medians = sorted(each.median for each in figures)
    ends = dict.fromkeys(f"{each:.3f}" for each in medians[:1] + medians[-1:])
    aims = {aim for each in figures for aim in each.targets}
    aims = sorted(aim for aim in aims if aim + MISSED not in aims)
    program = files.partition("/")[0]
    link = f"[{program}](../bench/results/{program}/README.md)"
    cells = [link, what, " to ".join(ends) or NOT_MEASURED, ", ".join(aims), "; ".join(sources)]
    return f"| {' | '.join(cells)} |"


def _records(results: Path, files: str) -> list[Record]:
    read = [read_record(file) for file in sorted(results.glob(f"{files}.json"))]
    return [record for record in read if record is not None]


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
