"""The report's files: the page, and a folder of PNGs beside it. What is not a report of ours is never written over."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from largebatch.errors import UserError
from largebatch.report.page import GENERATOR, page
from largebatch.report.panels import panels_of
from largebatch.report.plots import AXES, png
from largebatch.report.runs import ReportedRun
from largebatch.storage.files import replace_file

OURS = GENERATOR.rpartition(" ")[0].encode()  # of every version
FIRST_BYTES = 4096


def write_report(runs: Sequence[ReportedRun], out: Path) -> list[Path]:
    """Write the page to `out`, and its plots as PNGs to the folder of the same name without `.html`.

    Returns:
        The files, the page first.

    Raises:
        UserError: A file is there that is not a report's, or one cannot be written.
    """
    panels = panels_of(runs)
    folder = out.with_suffix("")
    plots = {folder / f"{_file_name(panel.key)}_by_{axis}.png": (panel, axis) for panel in panels for axis in AXES}
    for file in (out, *plots):
        if file.exists() and not _is_ours(file):
            raise UserError(f"{file} is there, and is not a report's; write another --out, or move it away")
    contents = {out: page(runs, panels, time.time()).encode()}
    contents |= {file: png(panel, runs, axis, GENERATOR) for file, (panel, axis) in plots.items()}
    try:
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
        return OURS in opened.read(FIRST_BYTES)


def _file_name(key: str) -> str:
    """Of a quantity whose name a recipe has chosen."""
    return re.sub(r"[^\w.-]+", "_", key)
