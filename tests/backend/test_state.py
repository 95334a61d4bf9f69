"""Which elements of a strategy's state each process writes to a checkpoint."""

from collections import defaultdict
from math import prod

import pytest

from jobs import run_job
from paths import PYDOC
from tasks import SMALL

pytestmark = pytest.mark.slow


def ranges_of_a_process(run_dir):
    """After a step: the elements of each parameter, the ranges that it holds and writes, and over how many processes
    LARS and LAMB sum."""
    import torch

    from stepping import prepared, take

    run, _, model, train_set = prepared(PYDOC, run_dir, *SMALL)
    take(next(run.steps(train_set)), run, model)
    state = run.backend.engine_state()
    sizes = {name: prod(about.shape) for name, about in state.parameters.items()}
    held = [(piece.vector, piece.start, piece.stop, piece.owned) for piece in state.pieces]
    return sizes, held, run.backend._sum_vector(torch.ones(1)).item()


@pytest.mark.parametrize(("strategy", "world_size"), [("hsdp", 4), ("fsdp", 2), ("ddp", 4)])
def test_each_element_is_written_once_and_the_writing_is_shared(strategy, world_size, tmp_path):
    results = run_job(ranges_of_a_process, tmp_path / "run", strategy=strategy, world_size=world_size)
    sizes = results[0][0]
    written = defaultdict(list)
    shares = []
    for _, held, summed in results:
        assert summed == (2 if strategy == "hsdp" else world_size)
        assert all(first <= begin <= end <= last or begin == end for _, first, last, (begin, end) in held)
        shares.append(sum(end - begin for *_, (begin, end) in held))
        for vector, _, _, owned in held:
            written[vector].append(owned)
    for vector, ranges in written.items():
        end = 0
        for begin, stop in sorted(each for each in ranges if each[0] < each[1]):
            assert begin == end, (vector, ranges)
            end = stop
        assert end == sizes[vector.partition("/")[2]]
    # Of weights and two moments; a shard has whole rows, so those of FSDP2 differ a little.
    assert {vector.partition("/")[0] for vector in written} == {"weight", "exp_avg", "exp_avg_sq"}
    assert max(shares) - min(shares) <= (1 if strategy == "ddp" else max(shares) / 10)
    if strategy == "hsdp":
        # Replicas hold the same.
        assert shares[0] - shares[2] in (-1, 0, 1)
        assert shares[1] - shares[3] in (-1, 0, 1)
