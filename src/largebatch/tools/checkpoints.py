"""`largebatch checkpoints`: which checkpoints a run has. Needs no torch."""

import argparse
import time
from pathlib import Path

from tqdm import tqdm

from largebatch.errors import UserError
from largebatch.storage.catalog import verify_checksums
from largebatch.storage.layout import CheckpointError, read_manifest
from largebatch.storage.run_folder import RunFolder

LINE = "{:<16}{:>10}  {:<18}{:>10}  {:<16}  {}"


EPILOG = """examples:
  largebatch checkpoints runs/resnet_digits --verify"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="the run's folder")
    parser.add_argument("--verify", action="store_true", help="read all files and check their checksums")


def run(options: argparse.Namespace) -> int:
    """List the checkpoints of a run, latest first: step, what wrote them, size, time, and whether they can be used.
    Needs no torch. Exit code 1 if the latest cannot be resumed from.
    """
    found = RunFolder(options.run_dir).checkpoints()
    if not found:
        raise UserError(f"{options.run_dir} has no checkpoints; give the folder of a run, such as runs/resnet_digits")
    print(LINE.format("checkpoint", "step", "written by", "size", "written at", "state"))
    usable = []
    best = None
    for entry in found:
        about = ("-", "-", "-")
        state = "complete"
        try:
            if entry.problem is not None:
                raise CheckpointError(entry.problem)
            if options.verify:
                verify_checksums(entry.path)
            manifest = read_manifest(entry.path)
            writer = f"{manifest.world_size} x {manifest.strategy}, #{manifest.attempt}"
            written_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.time))
            best = best or manifest.best
            if best and best.step == entry.step:
                state = f"complete, the best: {best.metric} {best.value:.4f}"
            about = (writer, tqdm.format_sizeof(entry.size, "B"), written_at)
            usable.append(True)
        except (CheckpointError, OSError) as error:
            state = f"cannot be used: {error}"
            usable.append(False)
        print(LINE.format(entry.path.name, f"{entry.step:,}", *about, state))
    return 0 if usable[0] else 1
