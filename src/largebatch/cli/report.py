"""`largebatch report`: one HTML file, and PNGs beside it, on one or several runs. Needs matplotlib, and no torch."""

from collections.abc import Sequence
from pathlib import Path

from largebatch.errors import UserError
from largebatch.report.runs import read_runs


def write_report_of(run_dirs: Sequence[Path], out: Path | None) -> None:
    """Write the report and say where it is.

    Args:
        run_dirs: Folders of runs.
        out: The HTML file; None is report.html in the run's folder, or here where there are several runs.

    Raises:
        UserError: A folder is no run's, matplotlib is not installed, or the file cannot be written.
    """
    runs = read_runs(run_dirs)
    if out is None:
        out = (run_dirs[0] if len(run_dirs) == 1 else Path()) / "report.html"
    if out.suffix != ".html":
        raise UserError(f"--out {out}: write a file that ends in .html; plots go to the folder of its name without it")
    try:
        from largebatch.report.writing import write_report
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UserError('plots need matplotlib; pip install "largebatch[report]"') from error
    page, *plots = write_report(runs, out)
    pictures = f", and {len(plots)} plots as PNG in {plots[0].parent}" if plots else ""
    print(f"wrote {page} ({page.stat().st_size / 1000:,.0f} kB){pictures}")
