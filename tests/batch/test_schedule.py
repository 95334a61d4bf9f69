"""Learning rates against hand-computed tables; `tests/plan/test_contract.py` has Goyal's numbers."""

from math import sqrt

import pytest

from largebatch.batch.schedule import Schedule

# A peak, a schedule in batches of one sample, and its learning rates.
TABLES = {
    "constant": (1.0, Schedule(4, warmup=2), [0, 0.5, 1, 1]),
    "polynomial to a fifth": (1.0, Schedule(2, decay="polynomial", power=3.0, final_fraction=0.2), [1, 0.3]),
    "cosine to a half": (
        2.0,
        Schedule(6, warmup=2, decay="cosine", decay_start=2, final_fraction=0.5),
        [0, 1, 2, 1.5 + sqrt(1 / 8), 1.5, 1.5 - sqrt(1 / 8)],
    ),
    "polynomial of the first degree": (1.0, Schedule(4, decay="polynomial"), [1, 0.75, 0.5, 0.25]),
    "warmup, stable, decay": (
        1.0,
        Schedule(8, warmup=2, decay="warmup_stable_decay", decay_start=4),
        [0, 0.5, 1, 1, 1, 0.75, 0.5, 0.25],
    ),
    "milestone within warmup": (
        1.0,
        Schedule(5, warmup=4, decay="step", milestones=(2,), factor=0.1),
        [0, 0.25, 0.5, 0.75, 0.1],
    ),
    "warmup that is the whole run": (1.0, Schedule(4, warmup=4, decay="cosine", decay_start=4), [0, 0.25, 0.5, 0.75]),
    "warmup from above the peak": (0.1, Schedule(3, warmup=2, warmup_start_lr=0.2), [0.1, 0.1, 0.1]),
}


@pytest.mark.parametrize("name", TABLES)
def test_hand_computed_table(name):
    peak_lr, schedule, expected = TABLES[name]
    assert [schedule.lr_at(step, peak_lr) for step in range(len(expected))] == pytest.approx(expected, rel=1e-12)
