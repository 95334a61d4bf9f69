"""bench/planted.py: its bugs can be planted in the tasks as they are now, and one of them is refused and named."""

import shutil

from planted import ALL, AS_EXPECTED, OF_OPTIMIZERS, row_of
from planting import plant


def test_each_bug_can_be_planted(tmp_path):
    for number, planted in enumerate(ALL):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in {file for file, _, _ in planted.edits}:
            shutil.copy(planted.recipe.parent / file, folder)
        for file, old, new in planted.edits:
            plant(str(folder / file), old, new)


def test_one_is_refused_before_training_and_named():
    row = row_of(OF_OPTIMIZERS[0])
    assert (row["verdict"], row["exit_code"]) == (AS_EXPECTED, 2)
