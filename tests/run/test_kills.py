"""Kill -9 at random instants: every resume works, and nothing differs in the end.

`checkpoint/test_every_step_of_a_save.py` kills at each step of a save.
"""

import pytest

from resuming import TINY_GPT, kill_many_times

pytestmark = pytest.mark.slow

WORDS = (
    *TINY_GPT,
    "--train.stop_after_steps=24",
    '--evaluation.every={"steps": 12}',
    '--checkpoint.every={"steps": 2}',
    "--checkpoint.keep_last=2",
)
KILLS = 4


def test_kills(tmp_path):
    assert kill_many_times(tmp_path, WORDS, "zero2", KILLS, seed=5) >= 1
