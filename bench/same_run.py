"""One training under every strategy, and once killed and resumed under others: the README's picture.

    python bench/same_run.py

Trains `gpt_pydoc.json` for its 200 steps, each time by `accelerate launch` with a shipped Accelerate config: on one
process, on two processes under each strategy, and once in three parts: DDP on two processes, killed by SIGKILL; ZeRO-3
on four, stopped by SIGTERM; FSDP2 on two to the end. Writes the loss of every step to bench/results/same_run and draws
docs/images/same_run.png. Takes some ten minutes on two CPU cores.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from largebatch.storage.files import read_json_lines
from launches import launch_command
from record import RESULTS, ROOT, take_facts

RECIPE = ROOT / "recipes/causal_lm/gpt_pydoc.json"
PICTURE = ROOT / "docs/images/same_run.png"
REFERENCE = "1 process"
# Each run is a list of parts: strategy, processes, and the step after which a signal ends the part, if one does.
Part = tuple[str, int, tuple[signal.Signals, int] | None]
RUNS: dict[str, list[Part]] = {
    REFERENCE: [("ddp", 1, None)],
    "DDP": [("ddp", 2, None)],
    "FSDP2": [("fsdp", 2, None)],
    "ZeRO-1": [("zero1", 2, None)],
    "ZeRO-2": [("zero2", 2, None)],
    "ZeRO-3": [("zero3", 2, None)],
    "killed and resumed": [
        ("ddp", 2, (signal.SIGKILL, 75)),
        ("zero3", 4, (signal.SIGTERM, 130)),
        ("fsdp", 2, None),
    ],
}


def main() -> None:
    facts = take_facts(["torch", "accelerate", "deepspeed", "transformers"])
    losses: dict[str, list[float]] = {}
    resumed_at: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, parts) in enumerate(RUNS.items()):
            run_dir = Path(folder, str(number))
            for part in parts:
                train(run_dir, *part)
            losses[name] = [line["loss"] for line in read_json_lines(run_dir / "metrics.jsonl")]
            starts = [line["step"] for line in read_json_lines(run_dir / "history.jsonl") if line["event"] == "started"]
            resumed_at[name] = starts[1:]
            print(f"{name}: {largest_difference(losses, name):.1e} from {REFERENCE}, resumed after {resumed_at[name]}")
    results = {"facts": facts, "losses": losses, "resumed after step": resumed_at}
    (RESULTS / "same_run").mkdir(parents=True, exist_ok=True)
    (RESULTS / "same_run/cpu.json").write_text(json.dumps(results) + "\n", encoding="utf-8")
    (RESULTS / "same_run/README.md").write_text(describe(results), encoding="utf-8")
    draw(losses, resumed_at)


def train(run_dir: Path, strategy: str, num_processes: int, end: tuple[signal.Signals, int] | None) -> None:
    """Launch the recipe, and end all of its processes by a signal once it has logged a step."""
    words = ["--config", RECIPE, "--run-dir", run_dir, "--logging.every=1", "--logging.trackers=[]"]
    words += ['--checkpoint.every={"steps": 25}', "--evaluation.every=null"]
    command = launch_command(strategy, num_processes, RECIPE.parent / "train.py", *words)
    with (run_dir.parent / "log").open("ab") as log:
        job = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        while job.poll() is None:
            time.sleep(0.1)
            steps = read_json_lines(run_dir / "metrics.jsonl")
            if end is not None and steps and steps[-1]["step"] >= end[1]:
                os.killpg(job.pid, end[0])
                end = None
                job.wait()


def largest_difference(losses: dict[str, list[float]], name: str) -> float:
    """The largest relative difference of a step's loss from the run on one process; every step must be there."""
    return max(abs(a - b) / b for a, b in zip(losses[name], losses[REFERENCE], strict=True))


def describe(results: dict) -> str:
    facts = results["facts"]
    losses = results["losses"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    rows = [
        f"| {name} | {largest_difference(losses, name):.1e} | {', '.join(map(str, after)) or 'no'} |"
        for name, after in results["resumed after step"].items()
        if name != REFERENCE
    ]
    return "\n".join(
        [
            "# One training under every strategy",
            "",
            f"`{facts['command']}`, {facts['date'][:10]}; {facts['machine']}; {versions}; commit {facts['commit']}.",
            "",
            f"The 200 steps of `gpt_pydoc.json`. Largest relative difference of a step's loss from {REFERENCE}:",
            "",
            "| run | largest difference | resumed after step |",
            "| --- | --- | --- |",
            *rows,
            "",
            "The picture of the README is drawn from `cpu.json`.",
            "",
        ]
    )


def draw(losses: dict[str, list[float]], resumed_at: dict[str, list[int]]) -> None:
    """The losses on top of each other, and below their differences from one process."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 4.6), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    steps = range(1, len(losses[REFERENCE]) + 1)
    (chain,) = (name for name, parts in RUNS.items() if len(parts) > 1)
    for number, name in enumerate(losses):
        style = {"color": "black" if name == chain else f"C{number}", "linewidth": 2.2 - 0.25 * number}
        above.plot(steps, losses[name], label=name, **style)
        if name != REFERENCE:
            differences = [abs(a - b) / b for a, b in zip(losses[name], losses[REFERENCE], strict=True)]
            below.semilogy(steps, [max(each, 1e-9) for each in differences], **(style | {"linewidth": 0.9}))
    places = [0, *resumed_at[chain], len(steps)]
    names = ["2 x DDP", "4 x ZeRO-3", "2 x FSDP2"]
    for (start, stop), name in zip(pairwise(places), names, strict=True):
        for axes in (above, below):
            axes.axvline(start, color="black", linewidth=0.6, linestyle=":")
        above.text((start + stop) / 2, above.get_ylim()[1] * 0.97, name, ha="center", va="top", fontsize=9)
    above.set_ylabel("training loss")
    above.legend(ncols=2, fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.88), frameon=False)
    below.set_ylabel("difference\nfrom 1 process")
    below.set_ylim(1e-9, 1e-4)
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, len(steps))
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
