"""A job in which one process fails: the others' errors are consequences, and the first cause is found."""

import json

import pytest

from jobs import run_job, train
from largebatch.run import user_errors
from largebatch.tools.job.cause import first_cause
from paths import PYDOC
from resuming import TINY_GPT


def train_and_fail(run_dir) -> str:
    """What this process raises; the others are not ended, unlike after an error."""
    from largebatch.run import Run

    update = Run.update

    def fail(run, step):
        if step.index == 2 and run.backend.rank == 1:
            raise KeyError("no label")
        update(run, step)

    Run.update = fail
    with pytest.raises(Exception, match=r"no label|peer") as caught, user_errors():
        train(PYDOC, *TINY_GPT, "--train.stop_after_steps=14", run_dir=run_dir)
    return type(caught.value).__name__


@pytest.mark.slow
def test_who_raises_is_the_cause_and_who_loses_a_peer_is_not(tmp_path):
    environment = {"LARGEBATCH_LOGS": str(tmp_path), "LARGEBATCH_NODE": "h7"}
    run_job(train_and_fail, tmp_path / "run", environment=environment)
    errors = [json.loads((tmp_path / f"errors/rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert [(error["rank"], error["node"], error["consequence"]) for error in errors] == [
        (0, "h7", True),
        (1, "h7", False),
    ]
    assert "peer" in errors[0]["message"]
    path = tmp_path / "errors/rank_1.json"
    assert first_cause(tmp_path)[0] == f"rank 1 on h7: KeyError: 'no label' (see {path})"
