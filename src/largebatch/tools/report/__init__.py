"""`largebatch report`: one HTML page about one or several runs. Needs plotly, but not torch."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from largebatch.errors import UserError
from largebatch.storage.run_folder import RunFolder
from largebatch.words import some

EPILOG = """examples:
  largebatch report runs/resnet_digits
  largebatch report runs/batch_64 runs/batch_512 --out comparison.html
  largebatch report runs/sweeps/resnet_digits --target 0.2"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the folder of a run, or of a sweep")
    parser.add_argument(
        "--target",
        type=float,
        metavar="VALUE",
        help="value of the sweep's metric: print how many samples, tokens and minutes it took to reach it",
    )
    parser.add_argument(
        "--axis",
        choices=["step", "samples", "tokens", "minutes"],
        help="what the curves are drawn against; default: step, and samples for several runs",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="the file to write; default: report.html in the run's folder, or in the current one for several runs",
    )


def run(options: argparse.Namespace) -> int:
    """Write one self-contained HTML page about finished or unfinished runs: results, interactive curves, and how their
    recipes differ. For a sweep, also print its tables: the metric against rate and batch size, and whether the recipe's
    scaling rule held. Needs plotly, but not torch.
    """
    from largebatch.tools.reported_runs import read_runs
    from largebatch.tools.sweep.points import SWEEP_FILE
    from largebatch.tools.sweep.results import Results

    folders: list[Path] = options.run_dirs
    sweep = ""
    if len(folders) == 1 and (folders[0] / SWEEP_FILE).is_file():
        results = Results.read(folders[0])
        runs = [run for group in results.groups for run in group.runs.values()]
        sweep = results.table(options.target)
        print(sweep)
    elif options.target is not None:
        raise UserError("--target needs the folder of a sweep")
    else:
        # A pattern such as SWEEP/* also has the sweep's own files.
        others = [path for path in folders if path.exists() and not RunFolder(path).plan_file.is_file()]
        runs = read_runs([path for path in folders if path not in others] or folders)
        if others:
            print(f"left out, without a plan.json: {some(list(map(str, others)))}", file=sys.stderr)
    if find_spec("plotly") is None:
        raise UserError('curves need plotly; pip install "largebatch[report]"')
    from largebatch.tools.report.page import page, write_page

    axis = options.axis or ("step" if len(runs) == 1 else "samples")
    out: Path = options.out or RunFolder(folders[0] if len(folders) == 1 else Path()).report_file
    write_page(page(runs, axis, sweep), out)
    print(f"wrote {out} ({out.stat().st_size / 1e6:,.1f} MB)")
    return 0
