"""`largebatch report`: one HTML file, and PNGs beside it, on one or several runs. Needs matplotlib, and no torch."""

import argparse
from pathlib import Path

from largebatch.errors import UserError
from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "report",
        run,
        help="write one HTML file on a run, or on several to compare them",
        description="Write a report from what is in run folders, of runs that are finished or not: results, plots "
        "against steps and samples, the plan in words, and what happened; of several runs side by side. One HTML file "
        "that loads nothing, and PNGs in a folder beside it. Needs matplotlib, and no torch.",
        epilog="""examples:
  largebatch report runs/resnet_digits
  largebatch report runs/batch_64 runs/batch_512 --out comparison.html""",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a run's folder")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="default: report.html in the run's folder, or, of several runs, in the current one",
    )


def run(options: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    from largebatch.tools.report.runs import read_runs

    runs = read_runs(options.run_dirs)
    out: Path = options.out or (options.run_dirs[0] if len(runs) == 1 else Path()) / "report.html"
    if out.suffix != ".html":
        raise UserError(f"--out {out}: write a file that ends in .html; plots go to the folder of its name without it")
    try:
        from largebatch.tools.report.writing import write_report
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UserError('plots need matplotlib; pip install "largebatch[report]"') from error
    page, *plots = write_report(runs, out)
    pictures = f", and {len(plots)} plots as PNG in {plots[0].parent}" if plots else ""
    print(f"wrote {page} ({page.stat().st_size / 1000:,.0f} kB){pictures}")
    return 0
