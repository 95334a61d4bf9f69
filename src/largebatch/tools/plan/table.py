"""A comparison as a table for a person, in lines of at most 110 characters."""

import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Literal, TextIO

from largebatch.tools.plan.comparison import GIB, Column, Comparison, Option

Mark = Literal["good", "bad", "faint"]
Paint = Callable[[str, Mark], str]
NAME_WIDTH, COLUMN_WIDTH = 28, 16
MOST_COLUMNS = (110 - NAME_WIDTH) // COLUMN_WIDTH
MIB = 2**20
CODES: dict[Mark, str] = {"good": "32", "bad": "31", "faint": "2"}
NOTES = (
    "Model states are exact for the fullest process: weights, gradients, optimizer, and DeepSpeed's fp32 copies.",
    "Beside them, about, and not all at once: gradients of micro-batches, gathered weights, buckets.",
    "Sent: in rings, where each of n processes sends (n - 1) / n of what is gathered or reduced.",
)


def painter(stream: TextIO) -> Paint:
    """Return what colors a text on a terminal, and leaves it plain elsewhere (https://no-color.org)."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return lambda text, _: text
    return lambda text, mark: f"\033[{CODES[mark]}m{text}\033[0m"


def table(comparison: Comparison, paint: Paint = lambda text, _: text) -> str:
    """Return the comparison as text, whose marks `paint` colors."""
    config, model = comparison.config, comparison.model
    dtype = "fp64" if model.element_bytes == 8 else "fp32"
    lines = [
        f"{comparison.title}: {config.task}, {model.elements:,} parameters in {dtype}, {config.optimizer.name}, "
        f"micro-batches of {config.batch.micro_batch_size:,}"
    ]
    for first in range(0, len(comparison.columns), MOST_COLUMNS):
        lines += ["", *_rows(comparison, comparison.columns[first : first + MOST_COLUMNS], paint)]
    lines.append("")
    for about, world_sizes in _remarks(comparison.columns).items():
        lines += _wrapped(f"{_processes(*world_sizes)}: {about}")
    lines += _beside(comparison)
    notes = (*NOTES, *_about_sizes(comparison), *_about_activations(comparison))
    lines += [line for note in notes for line in _wrapped(note, paint)]
    for name, reason in comparison.left_out.items():
        lines += _wrapped(f"{name} is not counted: {reason}")
    return "\n".join(lines) + "\n"


def _rows(comparison: Comparison, columns: Sequence[Column], paint: Paint) -> list[str]:
    def row(name: str, cells: Sequence[str], marks: Sequence[Mark | None] = ()) -> str:
        padded = [f"{cell:>{COLUMN_WIDTH}}" for cell in cells]
        marks = marks or [None] * len(padded)
        painted = [paint(cell, mark) if mark else cell for cell, mark in zip(padded, marks, strict=True)]
        return f"{name:<{NAME_WIDTH}}" + "".join(painted).rstrip()

    def rows(cell: Callable[[Option, Column], str], mark: Callable[[Option, Column], Mark | None]) -> list[str]:
        names = next((column.options for column in comparison.columns if column.options), ())
        found = []
        for number, option in enumerate(names):
            there = [(column.options[number], column) if column.options else None for column in columns]
            cells = [cell(*each) if each else "-" for each in there]
            found.append(row(f"  {option.strategy}", cells, [mark(*each) if each else None for each in there]))
        return found

    plans = [column.plan for column in columns]
    unit = _unit(comparison)
    lines = [
        row("processes", [f"{column.world_size:,}" for column in columns]),
        row("accumulation", [f"{plan.gradient_accumulation_steps:,}" if plan else "-" for plan in plans]),
        f"model states + beside, {unit} per process",
        *rows(lambda option, _: _states(option, unit), lambda *_: None),
    ]
    if comparison.gpu_memory is not None:
        with_activations = " with activations" if comparison.activations is not None else ""
        lines += [
            f"together{with_activations}, of {_size(comparison.gpu_memory, unit)} {unit}",
            *rows(lambda option, _: _together(option, unit), lambda option, _: "good" if option.fits else "bad"),
        ]
    lines += [
        f"sent per step, {unit} by each process",
        *rows(lambda option, column: _sent(option, column, unit), lambda *_: None),
    ]
    if comparison.gpu_memory is not None:
        suggested = [column.suggested or ("none fits" if column.plan else "-") for column in columns]
        lines.append(row("suggested", suggested, ["good" if column.suggested else None for column in columns]))
    return lines


def _remarks(columns: Sequence[Column]) -> dict[str, list[int]]:
    """What there is to say, and of which numbers of processes."""
    remarks: dict[str, list[int]] = {}
    for column in columns:
        chosen = f"{column.suggested}: " if column.suggested else ""
        if about := column.problem or column.reason:
            remarks.setdefault(chosen + about, []).append(column.world_size)
    return remarks


def _beside(comparison: Comparison) -> list[str]:
    """What is beside the model states, on the first number of processes that can train."""
    column = next((column for column in comparison.columns if column.options), None)
    if column is None:
        return []
    unit = _unit(comparison)
    lines = [f"Beside the model states on {_processes(column.world_size)}, about, in {unit}:"]
    for option in column.options:
        parts = [f"{_size(size, unit)} {reason}" for reason, size in option.states.beside.items()]
        lines += textwrap.wrap(f"  {option.strategy:<7}{', '.join(parts) or 'nothing'}", 110, subsequent_indent=" " * 9)
    return lines


def _about_sizes(comparison: Comparison) -> list[str]:
    sizes = {size for _, size in comparison.config.batch.sizes}
    if len(sizes) == 1:
        return []
    return [
        "The batch size changes: accumulation, what is beside the model states, and what is sent are those of the "
        f"largest, {max(sizes):,} samples."
    ]


def _about_activations(comparison: Comparison) -> list[str]:
    if comparison.activations is None:
        return ["Activations are not estimated for this task or model: leave room for them."]
    unit = _unit(comparison)
    how = "with" if comparison.config.compute.activation_checkpointing else "without"
    return [
        f"Activations, an estimate: {_size(comparison.activations, unit)} {unit} for a micro-batch {how} activation "
        "checkpointing, what autograd keeps of a forward pass of shapes alone; not counted are work space and CUDA's "
        "own memory."
    ]


def _wrapped(text: str, paint: Paint | None = None) -> list[str]:
    lines = textwrap.wrap(text, 110, subsequent_indent="  ")
    return [paint(line, "faint") for line in lines] if paint else lines


def _processes(*world_sizes: int) -> str:
    numbers = ", ".join(f"{world_size:,}" for world_size in world_sizes)
    return f"{numbers} {'process' if world_sizes == (1,) else 'processes'}"


def _unit(comparison: Comparison) -> str:
    sizes = [option.together for column in comparison.columns for option in column.options]
    return "GiB" if comparison.gpu_memory is not None or max(sizes, default=0) >= GIB / 10 else "MiB"


def _size(size: int, unit: str) -> str:
    number = size / (GIB if unit == "GiB" else MIB)
    if number < 0.01:
        # Small models beside buckets of a fixed size.
        return f"{number:.2g}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _states(option: Option, unit: str) -> str:
    states = option.states
    return f"{_size(states.held, unit)} + {_size(states.with_beside - states.held, unit)}"


def _together(option: Option, unit: str) -> str:
    return f"{_size(option.together, unit)} {'fits' if option.fits else 'does not'}"


def _sent(option: Option, column: Column, unit: str) -> str:
    least, most = (_size(size, unit) for size in option.traffic.sent(column.world_size))
    return least if least == most else f"{least} to {most}"
