"""`largebatch audit`: check on one machine what the optimizer gets in a training loop of any kind."""

import argparse
from pathlib import Path

from largebatch.tools.options import positive_float, positive_int, positive_ints

EPILOG = """examples:
  largebatch audit train.py
  largebatch audit train.py:fit --world-sizes 1,2 --accumulations 1,4
  largebatch audit train.py --accelerate recipes/accelerate_configs/fsdp.yaml

FILE defines audit(indices, micro_batch_size, accumulation), which trains on those samples and returns the model;
docs/audit.md has examples."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "loop", metavar="FILE[:FUNCTION]", help="Python file, and the name of its function if that is not audit"
    )
    parser.add_argument("--world-sizes", type=positive_ints, default=[1, 2, 4], help="processes; default: 1,2,4")
    parser.add_argument(
        "--accumulations",
        type=positive_ints,
        default=[1, 2, 4],
        help="micro-batches of a step in each process; default: 1,2,4",
    )
    parser.add_argument("--batch", type=positive_int, default=16, help="samples of a step; default: 16")
    parser.add_argument(
        "--accelerate",
        type=Path,
        metavar="YAML",
        help="Accelerate config whose variables the processes get, as from accelerate launch; default: torchrun's",
    )
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=120,
        help="seconds that one training of a few steps may take; default: 120",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Train one batch with your own loop in CPU processes, divided over processes and accumulation steps in several
    ways, and compare the gradient that the optimizer gets with that of one process: is it averaged or summed, is a
    sample lost, does the learning rate follow? FILE is run as any program of yours. The exit code is 0 only if all
    agree.
    """
    from largebatch.tools.audit.report import audit

    return 0 if audit(options) else 1
