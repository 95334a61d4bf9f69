"""Checkpoints: what `checkpoints` and `export` read; half of them with checksums that fit the damage."""

import stat
from pathlib import Path
from random import Random

from fuzzing.cases import Case
from fuzzing.mutations import damage
from saving import mark


def case(random: Random, folder: Path) -> Case:
    """A damaged checkpoint."""
    (folder / "secret.json").write_text('{"password": "SECRET"}')
    run = folder / "run"
    checkpoint = run / "checkpoints/step_00000009"
    damage(random, checkpoint)
    if random.random() < 0.5 and all(map(is_small_file, checkpoint.iterdir())):
        mark(checkpoint)
    listed = ["checkpoints", str(run)]
    exported = ["export", str(checkpoint), str(folder / "exported")]
    return Case(random.choice((listed, [*listed, "--verify"], exported, exported)), folder)


def is_small_file(path: Path) -> bool:
    state = path.lstat()
    return stat.S_ISREG(state.st_mode) and bool(state.st_mode & stat.S_IRUSR) and state.st_size < 2**20
