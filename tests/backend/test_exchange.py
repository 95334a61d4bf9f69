"""What processes send each other: values arrive exactly, and what a stranger sends is not executed."""

import math
import os
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist

from jobs import run_job
from largebatch.backend import exchange
from largebatch.backend.launch import read_launch
from largebatch.backend.start import start
from largebatch.config import load_config
from largebatch.errors import LaunchError
from largebatch.plan import resolve
from paths import MAPS
from saving import Bomb

VALUES = [
    {"of rank 0": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, 2**70]},
    [None, True, 'λ\0"\udcff/', {"": {}}, []] * 1000,
]


def send(data, size=None):
    """As `exchange.gather`, but with any bytes, of which there are said to be `size`."""
    sizes = exchange.all_gather(torch.tensor(len(data) if size is None else size), dist.group.WORLD)
    if size is None:
        mine = torch.zeros(max(int(each) for each in sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        exchange.all_gather(mine, dist.group.WORLD)


def refusal(of_rank_0, of_rank_1):
    """What rank 0 says while rank 1 does something else."""
    if dist.get_rank() == 1:
        of_rank_1()
        return None
    with pytest.raises(LaunchError) as caught:
        of_rank_0()
    return str(caught.value)


def processes_and_a_stranger(folder):
    launch = read_launch()
    config = load_config(MAPS)
    os.environ["LARGEBATCH_TOKEN"] = f"start {os.environ['RANK']}"
    with pytest.raises(LaunchError) as caught:
        start(launch, resolve(config, launch.world_size))
    found = [str(caught.value)]

    # Accelerate's group, of both.
    rank = dist.get_rank()
    os.environ["LARGEBATCH_TOKEN"] = "the same"
    exchange.compare_tokens(dist.group.WORLD)
    # NaN is not equal to itself, and -0.0 is to 0.0.
    assert repr(exchange.gather(VALUES[rank], dist.group.WORLD)) == repr(VALUES)
    assert len(exchange.gather(rank, dist.group.WORLD, to_first=True)) == (0 if rank else 2)

    gather = partial(exchange.gather, None, dist.group.WORLD)
    for data in (pickle.dumps(Bomb(folder / "exploded")), pickle.dumps(1), b"\xff", b"[" * 100_000, b"{}x"):
        found.append(refusal(gather, partial(send, data)))
    for size in (0, -1, 2**60):
        found.append(refusal(gather, partial(send, b"", size)))
    # Rank 0's digest, sent back by one who does not know the token.
    echo = torch.frombuffer(bytearray(exchange._proof(0, 2)), dtype=torch.uint8)
    compare = partial(exchange.compare_tokens, dist.group.WORLD)
    found.append(refusal(compare, partial(exchange.all_gather, echo, dist.group.WORLD)))
    assert not (folder / "exploded").exists()
    return found


@pytest.mark.slow
def test_values_arrive_exactly_and_what_a_stranger_sends_is_not_executed(tmp_path):
    found = run_job(processes_and_a_stranger, tmp_path)[0]
    assert all("rank 1 does not have this process's LARGEBATCH_TOKEN" in text for text in (found[0], found[9]))
    assert all("rank 1 sent something that is not JSON" in text for text in found[1:6])
    assert all("rank 1 announced a message of" in text for text in found[6:9])
