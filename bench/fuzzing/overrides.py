"""Overrides: the words of a command line."""

from pathlib import Path
from random import Random

from fuzzing import SOUND
from fuzzing.cases import Case
from fuzzing.mutations import TEXTS


def command_lines(folder: Path) -> list[list[str]]:
    """A sound line of each command that starts no process, talks to no other machine and trains nothing."""
    gpt = "recipes/causal_lm/gpt_pydoc.json"
    run = str(folder / "run")
    size = ["--batch.micro_batch_size", "8"]
    steps = ["--train.stop_after_steps=10", "--evaluation.every", '{"steps": 5}']
    start = ["--run-dir", run, "--start", "1", "--max-restarts", "3"]
    return [
        ["plan", gpt, "--world-size", "2", *size, *steps],
        ["plan", gpt, "--world-size", "2", "--model.num_layers", "3", "--optimizer.weight_decay", "0.1", "--json"],
        ["plan", gpt, "--world-sizes", "2,4", "--gpu-memory", "80", *size],
        ["plan", gpt, "--world-sizes", "2,4", "--gpu", "h100", "--network", "400G/gpu", "--gpus-per-node", "8"],
        ["lint", gpt, "slurm/gpt_pydoc.sbatch", "ds_configs/zero3.json"],
        ["submit", "gpt_pydoc", "--nodes", "2-4", "--gpus-per-node", "2", "--partition=x", *steps],
        ["job-begins", *start],
        ["job-ended", *start, "--exit-code", "1", "--asked-to-stop", "SIGTERM"],
        ["checkpoints", run, "--verify"],
        ["report", run, str(SOUND / "run"), "--out", str(folder / "report.html")],
        ["export", run, str(folder / "exported"), "--dtype", "bfloat16"],
        ["schema", "recipes/causal_lm", "--check"],
        ["new", str(folder / "new"), "--recipe", "gpt_pydoc"],
        ["effective-batch", str(folder / "train.py"), "--gpus", "8"],
    ]


def case(random: Random, folder: Path) -> Case:
    """The words of a command, some of them replaced, left out, repeated or added."""
    words = random.choice(command_lines(folder))
    for _ in range(random.randint(1, 3)):
        place = random.randrange(1, len(words) + 1)
        text = random.choice(TEXTS)
        old = words[place] if place < len(words) else ""
        name, equals, _ = old.partition("=")
        changed = [f"{name}={text}"] if equals or random.random() < 0.2 else [text]
        words[place : place + 1] = random.choice((changed, changed, [], [old, old], [old, text]))
        words = words if len(words) > 1 else [*words, text]
    return Case(words, folder, environment={"LARGEBATCH_JOB_ID": "17"})
