"""A job in which one process fails: the others' errors are consequences, and the first cause is found."""

import pytest

from jobs import run_job, train
from largebatch.storage.run_folder import RunFolder
from largebatch.system.endings import decisive, read_endings
from paths import PYDOC
from resuming import TINY_GPT


def train_and_fail(run_dir):
    """What this process raises; the others are not ended, unlike after an error."""
    from largebatch.run import Run

    update = Run.update

    def fail(run, step):
        if step.index == 2 and run.backend.rank == 1:
            raise KeyError("no label")
        update(run, step)

    Run.update = fail
    with pytest.raises(Exception, match=r"no label|peer") as caught:
        train(PYDOC, *TINY_GPT, "--train.stop_after_steps=14", run_dir=run_dir)
    return type(caught.value).__name__


@pytest.mark.slow
def test_who_raises_is_the_cause_and_who_loses_a_peer_is_not(run_dir, tmp_path):
    environment = {"LARGEBATCH_LOGS": str(tmp_path), "LARGEBATCH_NODE": "h7"}
    run_job(train_and_fail, run_dir, environment=environment)
    endings = read_endings(tmp_path / "endings")
    assert [ending.is_consequence for ending in endings] == [True, False]
    path = tmp_path / "endings/rank_1.json"
    assert decisive(endings).where_and_why == f"rank 1 on h7: KeyError: 'no label' (see {path})"
    # The run knows it, too, and so do people.
    run = RunFolder(run_dir)
    assert (run.ending().rank, run.ending().exception, run.ending().step) == (1, "KeyError", 2)
    assert run.history()[-1]["message"].startswith("KeyError: ")
