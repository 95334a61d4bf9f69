"""Fail at every call of a file-system function: no traceback, no hang, nothing missing after exit code 0.

    python bench/file_faults.py --workers 2

Trains a small GPT for four steps in one CPU process, once from the beginning and once resumed after two steps. Each
distinct call (its function, its file in the run folder, and the function of ours that makes it) fails once, with each
of four errors, and, in other runs, it and everything after it fails. Writes and reads of open files count as calls.
After a fault, the run must end within two minutes, without a traceback, with exit code 0, 2 or 74. With 0, the last
checkpoint, the weights, the loss and the status must be those of a run without a fault; otherwise the same command,
without the fault, must get there. Faults below Python (safetensors, the kernel) are not tested, nor other strategies.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, take_facts, write_verdicts

sys.path.insert(0, str(ROOT / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

import jobs  # noqa: F401 - it names what to import before forking
from failing_files import CODES, Moment, Scenario, scenarios

IN_MEMORY = Path("/dev/shm")  # where an fsync takes no time


def judge(case: tuple[int, Scenario, Moment, str, bool]) -> dict[str, Any]:
    """What comes of one fault."""
    number, scenario, moment, code, for_ever = case
    wrong, exit_code = scenario.verdict(moment, code, for_ever, number)
    about = {"run": scenario.name, **vars(moment), "error": code, "lasts": for_ever, "exit_code": exit_code}
    return about | {"verdict": wrong or "held"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fail at every call of a file-system function, and judge the run.")
    parser.add_argument("--workers", type=int, default=2, help="processes that each make one run after another")
    parser.add_argument("--every", type=int, default=1, help="of the faults, take every N-th, for a quick look")
    parser.add_argument("--first", type=int, default=0, help="the fault to begin with: --every 4 needs 0 to 3")
    parser.add_argument("--output", type=Path, default=RESULTS / "file_faults/faults.json")
    options = parser.parse_args()
    facts = take_facts(("torch", "accelerate"))
    started = time.monotonic()
    import largebatch.tools.local_jobs.preload

    assert largebatch.tools.local_jobs.preload
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        faults = [
            (scenario, moment, code, for_ever)
            for scenario in scenarios(Path(folder))
            for moment in scenario.expect()
            for code in CODES
            for for_ever in (False, True)
        ]
        cases = [(number, *fault) for number, fault in enumerate(faults[options.first :: options.every])]
        rows = []
        with multiprocessing.get_context("fork").Pool(options.workers) as pool:
            for row in pool.imap(judge, cases):
                rows.append(row)
                if row["verdict"] != "held":
                    print(json.dumps(row, indent=1), flush=True)
    exits = Counter(str(row["exit_code"]) for row in rows)
    print(f"{len(rows)} faults, {time.monotonic() - started:.0f} s, exit codes: {dict(exits)}")
    settings = facts | {"faults_that_were_possible": len(faults), "exit_codes": dict(sorted(exits.items()))}
    write_verdicts(rows, "held", settings, options.output)


if __name__ == "__main__":
    main()
