"""Sweeps: their words, what is in their folder, and the checkpoint that `critical-batch` branches from."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import SOUND
from fuzzing.cases import Case
from fuzzing.mutations import TEXTS, change_json, damage
from largebatch.__main__ import main as largebatch
from largebatch.config import as_json, load_config
from largebatch.tools.sweep import start
from saving import mark

RECIPE = "recipes/causal_lm/gpt_pydoc.json"
SWEEP = ["sweep", RECIPE, "--batch.global_batch_size=32,64", "--seeds", "2", "--folder", "sweep"]
BRANCH = ["critical-batch", "run", f"--recipe={RECIPE}", "--at", "9", "--batches", "1,2", "--window", "640"]
TARGET = ["--target", "0.5"]
READERS = (SWEEP, ["report", "sweep", *TARGET], ["advise", "--fit", "sweep", "--batches", "32,64", *TARGET])


def without_training(words: Sequence[str]) -> int:
    """The command, for which a finished run stands in for each point's."""

    def finish(_: Any, points: Sequence[start.Point], folder: Path, *__: Any) -> None:
        for point in points:
            shutil.copytree(SOUND / "run", folder / point.name, dirs_exist_ok=True)

    start._train_here = finish
    return largebatch(words)


def read_damaged(seed: int, words: Sequence[str]) -> int:
    """A command on a sweep's folder after some damage."""
    without_training(SWEEP)
    damage(Random(seed), Path("sweep"))
    return without_training(words)


def case(random: Random, folder: Path) -> Case:
    """A command with unusual words, or on a damaged folder."""
    run = folder / "run"
    manifest = run / "checkpoints/step_00000009/manifest.json"
    about = json.loads(manifest.read_text()) | {"config": as_json(load_config(folder / RECIPE))}
    manifest.write_text(json.dumps(about))
    kind = random.randrange(4)
    # What damages the run may damage the manifest, and reads it before.
    if kind != 1 and random.random() < 0.5:
        change_json(random, manifest)
    mark(manifest.parent)
    if kind == 0:
        return Case(random.choice(READERS), folder, partial(read_damaged, random.randrange(2**32)))
    words = list(BRANCH if kind == 1 else random.choice((SWEEP, BRANCH)))
    if kind == 1:
        damage(random, run)
    else:
        words[random.randrange(1, len(words))] = random.choice(TEXTS)
    return Case(words, folder, without_training)
