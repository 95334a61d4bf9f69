"""`largebatch report`: one HTML page about one or several runs. Needs plotly, but not torch."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from largebatch.errors import UserError
from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "report",
        run,
        description="Write one self-contained HTML page about finished or unfinished runs: results, interactive "
        "curves, plans in words, and what happened. Needs plotly, but not torch.",
        epilog="""examples:
  largebatch report runs/resnet_digits
  largebatch report runs/batch_64 runs/batch_512 --out comparison.html""",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the folder of a run")
    out = "the file to write; default: report.html in the run's folder, or in the current one for several runs"
    parser.add_argument("--out", type=Path, metavar="FILE.html", help=out)


def run(options: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    from largebatch.tools.report.runs import read_runs

    runs = read_runs(options.run_dirs)
    out: Path = options.out or (options.run_dirs[0] if len(runs) == 1 else Path()) / "report.html"
    if out.suffix != ".html":
        raise UserError(f"--out {out}: give a file name that ends in .html")
    if find_spec("plotly") is None:
        raise UserError('curves need plotly; pip install "largebatch[report]"')
    from largebatch.tools.report.page import write_report

    write_report(runs, out)
    print(f"wrote {out} ({out.stat().st_size / 1e6:,.1f} MB)")
    return 0
