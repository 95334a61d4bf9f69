"""Running a recipe's train.py in this process, and reading what it wrote."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from largebatch.errors import UserError
from largebatch.storage.json_lines import read_json_lines
from largebatch.task_folders import run_as_main


def train(recipe: Path, *overrides: str, run_dir: Path) -> None:
    """Run a recipe as if the train.py beside it were started from the command line."""
    script = recipe.with_name("train.py")
    sys.argv = [str(script), "--config", str(recipe), "--run-dir", str(run_dir), *overrides]
    run_as_main(script)


@dataclass(frozen=True)
class Trained:
    """What a run has written."""

    metrics: list[dict[str, Any]]  # the logged steps
    evaluations: list[dict[str, Any]]
    weights: dict[str, NDArray[np.float64]]  # the final weights and running statistics by name, in float64


def read_run(run_dir: Path) -> Trained:
    """The numbers of a finished run.

    Raises:
        UserError: It trained no step, or wrote no weights.
    """
    from safetensors.numpy import load_file

    weights: dict[str, NDArray[np.float64]] = {}
    for file in sorted((run_dir / "model").glob("*.safetensors")):
        weights |= {name: np.asarray(tensor, dtype=np.float64) for name, tensor in load_file(file).items()}
    metrics = read_json_lines(run_dir / "metrics.jsonl")
    if not metrics or not weights:
        what = "wrote no weights: end it with run.finish()" if metrics else "trained no step"
        raise UserError(f"the script {what}")
    return Trained(metrics, read_json_lines(run_dir / "evaluations.jsonl"), weights)
