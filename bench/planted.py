"""Bugs that are planted in turn, each of which `largebatch verify` must find, or refuse before training, and name.

    python bench/planted.py

Each is planted in a copy of a task: those of data, model, loss, evaluation and the task's own optimizer in
`tests/outside_task`, and one of an optimizer, a trust ratio with the norm of a shard, in every shipped recipe. `verify`
must exit with another code than 0 and name the cause. Of the copies without a bug, it must say that they agree.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, take_facts, write_verdicts

sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import jobs  # noqa: F401 - it names what to import before forking
from largebatch.__main__ import main as largebatch
from planted_bugs import ALL, Planted
from planting import plant

AS_EXPECTED = "as expected"


def verify(planted: Planted, folder: Path) -> tuple[int, str]:
    """Plant a bug in a copy in an empty folder, and return the exit code and the output of `verify`."""
    task = folder / "recipes" / planted.recipe.parent.name
    shutil.copytree(planted.recipe.parent, task, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in planted.edits:
        plant(str(task / file), old, new)
    task.with_name("accelerate_configs").symlink_to(ROOT / "recipes/accelerate_configs")
    words = ["--steps=3", *planted.words]
    output = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = largebatch(["verify", str(task / planted.recipe.name), *words])
    return code, output.getvalue()


def row_of(planted: Planted) -> dict[str, Any]:
    """What `verify` says of a bug, and whether that is what it should say."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        code, output = verify(planted, Path(folder))
    saying = [line.strip() for line in output.splitlines() if planted.said in line]
    is_right = bool(saying) and (code == 0) == (not planted.edits)
    return {
        "planted": planted.name,
        "task": planted.recipe.parent.name,
        "exit_code": code,
        "said": saying[0] if saying else output,
        "seconds": round(time.monotonic() - started),
        "verdict": AS_EXPECTED if is_right else "not as expected",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant bugs, and see whether verify finds and names them.")
    parser.add_argument("--only", default="", help="a regular expression in the name, such as 'nothing in gpt_pydoc'")
    parser.add_argument("--minutes", type=float, default=600, help="after which no further bug is planted")
    parser.add_argument("--output", type=Path, default=RESULTS / "planted/planted.json")
    options = parser.parse_args()
    facts = take_facts(("torch", "accelerate", "deepspeed", "transformers"))
    rows = []
    chosen = [each for each in ALL if re.search(options.only, each.name)]
    ends = time.monotonic() + 60 * options.minutes
    for planted in chosen:
        if time.monotonic() < ends:
            rows.append(row_of(planted))
            print(json.dumps(rows[-1], indent=1), flush=True)
    left_out = [each.name for each in chosen[len(rows) :]]
    write_verdicts(rows, AS_EXPECTED, facts | {"left_out": left_out}, options.output)


if __name__ == "__main__":
    main()
