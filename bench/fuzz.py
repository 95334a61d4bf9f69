"""Damaged and hostile input: every command ends soon with a result or a sentence, and never with a traceback.

    python bench/fuzz.py --cases 1000 --seed 0

Each target, a file of `fuzzing`, makes cases of its own kind of input, from a sound one and a few random mutations.

A case runs in a forked child of this process, which has imported everything, as root without root's rights over files,
with at most 2 GiB of memory besides the parent's. It holds if it takes at most 10 s of CPU time, never waits for 30 s,
prints neither a traceback nor a terminal escape, and, if its exit code is not 0, says why: "error: …" or, with exit
code 1, what a check has found. Case number n of a target depends on the seed and n alone: `--only recipes:17` runs one
again.
"""

import argparse
import importlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import SOUND
from fuzzing.cases import HELD, Case, Outcome, make_sound, run_case
from largebatch.__main__ import COMMANDS, build_parser
from record import RESULTS, take_facts, write_verdicts

TARGETS = (
    *("recipes", "overrides", "variables", "run_folders", "checkpoints"),
    *("advice", "sweeps", "chats", "tars", "model_folders"),
)


def warm_up() -> None:
    """Import what the commands import, and make what cases are made from."""
    import datasets  # noqa: F401
    import plotly.io  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import largebatch.estimate.comparison
    import largebatch.estimate.recipe_model
    import largebatch.run.checkpoint.export
    import largebatch.tools.report.page  # noqa: F401

    for command in COMMANDS:
        build_parser(command)
    make_sound()


def fuzz(target: str, numbers: Sequence[int], seed: int) -> list[tuple[int, Case, Outcome]]:
    """Run cases of a target; each is made from the seed, the target and its number."""
    make = importlib.import_module(f"fuzzing.{target}").case
    outcomes = []
    for number in numbers:
        # Resolved: on some systems the folder is a link.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name).resolve()
            shutil.copytree(SOUND, folder, dirs_exist_ok=True)
            case = make(Random(f"{seed} {target} {number}"), folder)
            outcomes.append((number, case, run_case(case)))
    return outcomes


def row_of(target: str, outcomes: Sequence[tuple[int, Case, Outcome]]) -> dict[str, Any]:
    """A target's line in the result."""
    bad = [(number, outcome) for number, _, outcome in outcomes if outcome.verdict != HELD]
    longest = max(outcome.cpu_seconds for _, _, outcome in outcomes)
    return {
        "target": target,
        "cases": len(outcomes),
        "accepted": sum(outcome.is_accepted for _, _, outcome in outcomes),
        "longest CPU seconds": round(longest, 1),
        "not held": {f"{target}:{number}": outcome.verdict for number, outcome in bad},
        "verdict": HELD if not bad else "not held",
    }


def main() -> None:
    """Run all targets and write what came of them, or one case and print it."""
    parser = argparse.ArgumentParser(description="Run commands on damaged and hostile input.")
    parser.add_argument("--cases", type=int, default=1000, help="of each target; default: 1000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(TARGETS), help="names between commas; default: all")
    parser.add_argument("--only", metavar="TARGET:NUMBER", help="run one case, and print all of it")
    parser.add_argument("--output", type=Path, default=RESULTS / "fuzz/fuzz.json")
    options = parser.parse_args()
    facts = take_facts(("pydantic", "torch", "plotly"))
    rows = []
    warm_up()
    if options.only:
        target, _, number = options.only.partition(":")
        ((_, case, outcome),) = fuzz(target, [int(number)], options.seed)
        print(case.words, case.environment, outcome.output, outcome.verdict, outcome.cpu_seconds, sep="\n")
        return
    for target in options.targets.split(","):
        started = time.monotonic()
        rows.append(row_of(target, fuzz(target, range(options.cases), options.seed)))
        print(json.dumps(rows[-1], indent=1), f"{time.monotonic() - started:.0f} s", flush=True)
    write_verdicts(rows, HELD, facts | {"seed": options.seed}, options.output)


if __name__ == "__main__":
    main()
