"""Which elements of a strategy's state each process writes to a checkpoint."""

from collections import Counter

import pytest

from jobs import run_job
from paths import PYDOC
from tasks import SMALL

pytestmark = pytest.mark.slow


def elements_of_a_process(run_dir):
    """After a step: how many elements of each kind of vector it writes, and over how many processes LARS and LAMB
    sum."""
    import torch

    from stepping import prepared, take

    run, _, model, train_set = prepared(PYDOC, run_dir, *SMALL)
    take(next(run.steps(train_set)), run, model)
    written = Counter()
    for piece in run.backend.engine_state().pieces:
        begin, end = piece.owned
        written[piece.vector.partition("/")[0]] += end - begin
    return written, run.backend._sum_vector(torch.ones(1)).item()


@pytest.mark.parametrize(("strategy", "world_size"), [("hsdp", 4), ("ddp", 2)])
def test_the_writing_is_shared(strategy, world_size, run_dir):
    """That each element is written once is a condition of every resume."""
    results = run_job(elements_of_a_process, run_dir, strategy=strategy, world_size=world_size)
    assert {summed for _, summed in results} == {2 if strategy == "hsdp" else world_size}
    assert all(written.keys() == {"weight", "exp_avg", "exp_avg_sq"} for written, _ in results)
    # A shard has whole rows, so those of FSDP2 differ a little.
    shares = [written.total() for written, _ in results]
    assert max(shares) - min(shares) <= (1 if strategy == "ddp" else max(shares) / 10)
    if strategy == "hsdp":
        # Replicas hold the same.
        assert shares[0] - shares[2] in (-1, 0, 1)
        assert shares[1] - shares[3] in (-1, 0, 1)
