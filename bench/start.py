"""How long a run takes to start, beside a bare script with the same imports; and `largebatch plan` and `lint`.

    .venv/bin/python bench/start.py

From `accelerate launch` to the end of the first optimizer step, with two processes on DDP: the shipped recipe
gpt_pydoc.json against bench/peers/start/bare.py, interleaved. Takes some four minutes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from launches import launch_command
from paired import interleave
from record import OURS, ROOT, Comparison, Figure, Record, add_output_options, take_facts, write_record

BIN = Path(sys.executable).parent
RECIPE = ROOT / "recipes/causal_lm/gpt_pydoc.json"
LIMIT = 1.3
LOGIN_NODE_SECONDS = 0.5
LOOK_EVERY = 0.01
PATIENCE = 300.0
COMMANDS = {
    "largebatch plan": ["plan", "recipes/causal_lm/gpt2_124m.json", "--world-size", "64"],
    "largebatch plan, of a recipe with `expected`": [
        "plan",
        "recipes/image_classification/resnet50_imagenet_8k.json",
        "--world-size",
        "256",
    ],
    "largebatch lint": ["lint"],
}
ABOUT = f"""Time from `accelerate launch` to the end of the first optimizer step, with two processes on DDP. `ours` is
the shipped recipe `gpt_pydoc.json`; `bare` is a script with the same imports, model and batch, and nothing else
(`bench/peers/start/bare.py`). The target is at most {LIMIT} times `bare`, and {LOGIN_NODE_SECONDS} s each for the
commands that people run on a login node: `largebatch plan` and `largebatch lint` (of this whole repository)."""


def contender_command(name: str, folder: Path) -> tuple[list[str], Path]:
    """What launches a contender, and the file that its first step leaves something in."""
    if name == OURS:
        run_dir = folder / "run"
        words = ["--config", RECIPE, "--run-dir", run_dir, "--train.stop_after_steps=1", "--data.num_eval_samples=8"]
        return launch_command("ddp", 2, RECIPE.parent / "train.py", *words), run_dir / "metrics.jsonl"
    return launch_command("ddp", 2, ROOT / "bench/peers/start/bare.py", folder / "loss"), folder / "loss"


def seconds_to_first_step(name: str) -> float:
    """Launch a contender, wait for its first step and then for its end.

    Raises:
        SystemExit: The program failed.
    """
    with tempfile.TemporaryDirectory() as made, Path(made, "output").open("w+") as output:
        command, first_step = contender_command(name, Path(made))
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while not (first_step.exists() and first_step.stat().st_size) and process.poll() is None:
            if time.perf_counter() - started > PATIENCE:
                process.kill()
            time.sleep(LOOK_EVERY)
        seconds = time.perf_counter() - started
        if process.wait() or not first_step.exists():
            output.seek(0)
            sys.exit(f"{name} failed:\n{output.read()[-2000:]}")
        return seconds


def seconds_of_command(words: list[str]) -> float:
    """Run a `largebatch` command to its end.

    Raises:
        SystemExit: The program failed.
    """
    started = time.perf_counter()
    result = subprocess.run([BIN / "largebatch", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if result.returncode:
        sys.exit(f"largebatch {' '.join(words)} failed:\n{result.stdout}{result.stderr}")
    return seconds


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Seconds from launch to the first step, and of plan and lint.")
    add_output_options(parser, "start")
    parser.add_argument("--rounds", type=int, default=5, help="launches of each; default: 5")
    parser.add_argument("--commands", type=int, default=9, help="calls of plan and of lint; default: 9")
    options = parser.parse_args()
    facts = take_facts(("torch", "accelerate", "transformers", "datasets"))
    # What files the first launch leaves in the page cache is not measured.
    for name in ("bare", OURS):
        seconds_to_first_step(name)
    launches = interleave(["bare", OURS], options.rounds, seconds_to_first_step)
    calls = interleave(list(COMMANDS), options.commands, lambda name: seconds_of_command(COMMANDS[name]))
    record = Record(
        program="start",
        title="Starting",
        about=ABOUT,
        settings={"rounds": options.rounds, "commands": options.commands, "processes": 2},
        facts=facts,
        comparisons=[Comparison("s to the first step", "bare", launches, limits={OURS: LIMIT})],
        figures=[Figure(name, "s", [each[name] for each in calls], at_most=LOGIN_NODE_SECONDS) for name in COMMANDS],
    )
    write_record(record, options)


if __name__ == "__main__":
    main()
