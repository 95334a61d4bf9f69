"""The report's files: the page, and a folder of PNGs beside it. What is not a report of ours is never written over."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from largebatch.errors import UserError
from largebatch.storage.files import replace_file
from largebatch.tools.report.page import GENERATOR, page
from largebatch.tools.report.panels import panels_of
from largebatch.tools.report.plots import AXES, png
from largebatch.tools.report.runs import ReportedRun

OURS = GENERATOR.rpartition(" ")[0].encode()
MARKS = (b'<meta name="generator" content="' + OURS + b" ", b"Software\0" + OURS + b" ")
"""Of pages and plots of every version."""
FIRST_BYTES = 4096
MOST_LETTERS = 50  # in the name of a plot's file, of what it shows


def write_report(runs: Sequence[ReportedRun], out: Path) -> list[Path]:
    """Write the page to `out`, and its plots as PNGs to the folder of the same name without `.html`.

    Returns:
        The files, the page first.

    Raises:
        UserError: A file is there that is not a report's, or one cannot be written.
    """
    panels = panels_of(runs)
    folder = out.with_suffix("")
    names = _file_names([panel.key for panel in panels])
    plots = {
        folder / f"{name}_by_{axis}.png": (panel, axis)
        for name, panel in zip(names, panels, strict=True)
        for axis in AXES
    }
    try:
        for file in (out, *plots):
            if file.exists() and not _is_ours(file):
                raise UserError(f"{file} is there, and is not a report's; write another --out, or move it away")
        # JSON may have halves of characters, which no file has.
        contents = {out: page(runs, panels, time.time()).encode(errors="replace")}
        contents |= {file: png(panel, runs, axis, GENERATOR) for file, (panel, axis) in plots.items()}
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            replace_file(file, [memoryview(content)])
        for file in folder.glob("*.png"):
            # Plots that an earlier report had, of other runs, say.
            if file not in contents and _is_ours(file):
                file.unlink()
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}; write another --out") from error
    return list(contents)


def _is_ours(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        first = opened.read(FIRST_BYTES)
    return any(mark in first for mark in MARKS)


def _file_names(keys: Sequence[str]) -> list[str]:
    """Of quantities, whose names a recipe has chosen: each another one."""
    names: list[str] = []
    for key in keys:
        name = re.sub(r"[^\w.-]+", "_", key)[:MOST_LETTERS]
        while name in names:
            name += "_"
        names.append(name)
    return names
