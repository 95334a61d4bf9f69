"""Commands of a cluster as bash scripts that tests write, and a checkout that holds no more than a launch needs."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from paths import ROOT

COPIED = ("launch", "slurm", "recipes/accelerate_configs", "recipes/causal_lm", "ds_configs")

# The launcher writes down what it is told. Its log folder is in the environment.
ACCELERATE = """
  env >"$RUN_DIR/environment"
  ulimit -c >>"$RUN_DIR/limit"
  printf '%s\\n' "$LARGEBATCH_NODE" "$@" >"$RUN_DIR/words.$LARGEBATCH_NODE"
  echo "trains on $LARGEBATCH_NODE"
  if [[ -n ${REFUSAL:-} ]]; then
    mkdir -p "$LARGEBATCH_LOGS/endings"
    printf '{"kind": "refused", "message": "%s"}' "$REFUSAL" >"$LARGEBATCH_LOGS/endings/rank_0.json"
  fi
  exit "${TRAIN_CODE:-0}"
"""


def write_commands(folder: Path, commands: Mapping[str, str]) -> str:
    """Make programs of bash scripts; returns a PATH with them first."""
    folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def copy_checkout(folder: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "site.sh"))
    return folder


def run_bash(*words: str, cwd: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """The exit code and all output of a script that may not inherit this process's environment."""
    command = ["bash", *words]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    return result.returncode, result.stdout + result.stderr


def environment_in(run_dir: Path) -> dict[str, str]:
    """The environment that the played launcher had; empty if it was not started."""
    file = run_dir / "environment"
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(line.split("=", 1) for line in lines if "=" in line)
