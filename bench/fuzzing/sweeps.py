"""Sweeps: their words, what is in their folder, and the checkpoint that `critical-batch` branches from."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

from fuzzing.cases import Case, Sound
from fuzzing.mutations import TEXTS, change_json, damage
from largebatch.__main__ import main as largebatch
from largebatch.config import as_json, load_config
from largebatch.tools.sweep import start
from saving import mark

RECIPE = "recipes/causal_lm/gpt_pydoc.json"
SWEEP = ["sweep", RECIPE, "--learning_rate.base_lr=1e-3,2e-3", "--seeds", "2", "--folder", "sweep"]
BRANCH = ["critical-batch", "run", f"--recipe={RECIPE}", "--at", "9", "--batches", "1,2", "--window", "640"]


def without_training(words: Sequence[str]) -> int:
    """The command, which trains no point."""
    start._train_here = lambda *_: 0
    return largebatch(words)


def sweep_twice(words: Sequence[str]) -> int:
    """A sweep, the damage that the second word describes by its seed, and another command on what is left."""
    seed, *command = words
    without_training(SWEEP)
    damage(Random(seed), Path("sweep"))
    return without_training(command)


def case(random: Random, sound: Sound, folder: Path) -> Case:
    """A command with unusual words, or on a damaged folder."""
    shutil.copytree(sound.project, folder, dirs_exist_ok=True)
    run = shutil.copytree(sound.checkpoints, folder / "run")
    manifest = run / "checkpoints/step_00000009/manifest.json"
    about = json.loads(manifest.read_text()) | {"config": as_json(load_config(folder / RECIPE))}
    manifest.write_text(json.dumps(about))
    if random.random() < 0.5:
        change_json(random, manifest)
    mark(manifest.parent)
    kind = random.randrange(4)
    if kind == 0:
        return Case([str(random.random()), *random.choice((SWEEP, ["report", "sweep"]))], folder, sweep_twice)
    words = list(BRANCH if kind == 1 else random.choice((SWEEP, BRANCH)))
    if kind == 1:
        damage(random, run)
    else:
        words[random.randrange(1, len(words))] = random.choice(TEXTS)
    return Case(words, folder, without_training)
