"""Submissions to an sbatch that takes down what it is given; tests/tools/slurm/conftest.py puts it on PATH."""

import json
import re
import sys
from pathlib import Path

SMOKE = "slurm/gpt_pydoc.sbatch"
RECIPE = "recipes/causal_lm/gpt_pydoc.json"
RECORDER = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
Path("called.json").write_text(json.dumps({{"words": sys.argv[1:], "environment": dict(os.environ)}}))
"""


def called() -> dict:
    """The words and the environment of sbatch."""
    return json.loads(Path("called.json").read_text())


def snapshot() -> Path:
    """The folder that the job was told to run."""
    return Path(called()["environment"]["LARGEBATCH_SNAPSHOT"])


def layout(printed: str) -> str:
    """The strategy and the numbers of nodes and processes, of a plan that was printed."""
    return re.search("under (.*?):", printed)[1]
