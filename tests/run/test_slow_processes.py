"""Processes that are slow while training are named; see bench/slow_processes.py for clean runs."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from jobs import run_job, train
from largebatch.run.watch.slow_processes import SlowProcesses, Times, own_clock, seconds_of_product, slow_ones
from largebatch.storage.files import read_json_lines
from largebatch.tools.report.runs import read_runs
from paths import PYDOC
from resuming import TINY_GPT

CLEAN = Times(product=0.010, reading=0.020, step=0.100)


def with_one(**different: float) -> list[Times]:
    """Eight processes, of which rank 5 is different."""
    return [CLEAN._replace(**different) if rank == 5 else CLEAN for rank in range(8)]


@pytest.mark.parametrize(
    ("different", "named"),
    [
        ({}, []),
        ({"product": 0.0114}, []),
        ({"product": 0.0116}, [(5, "the matrix product", 1.16)]),
        # A faster one makes nobody else slow.
        ({"product": 0.001}, []),
        ({"reading": 0.0251}, [(5, "data reading", 1.255)]),
        # 1.2 times, but that is 4 % of a step.
        ({"reading": 0.024}, []),
    ],
)
def test_one_probe(different, named):
    assert [(slow.rank, slow.what, pytest.approx(slow.ratio)) for slow in slow_ones(with_one(**different))] == named


def test_reading_that_takes_no_time_elsewhere():
    everyone = [CLEAN._replace(reading=0.0), CLEAN._replace(reading=0.0), CLEAN._replace(reading=0.5)]
    (slow,) = slow_ones(everyone)
    assert (slow.rank, slow.what) == (2, "data reading")


class TwoRanks:
    """Stands in for the backend of rank 0, while rank 1 measures what the test says."""

    world_size, device = 2, torch.device("cpu")

    def __init__(self):
        self.factor = 1.0

    def all_gather(self, values):
        return torch.stack([values, values * torch.tensor([self.factor, 1.0, 1.0])])


def test_three_slow_probes_in_a_row_are_named_once():
    backend = TwoRanks()
    slow_processes = SlowProcesses(backend, (), None)
    named = []
    for step, factor in enumerate((2, 2, 1, 2, 2, 2, 2, 1, 2, 2, 2), 1):
        backend.factor = factor
        if found := slow_processes.probe(10 * step, 1.0 * step):
            (slow,) = found
            named.append((step, slow.rank, slow.what))
    assert named == [(6, 1, "the matrix product"), (11, 1, "the matrix product")]


def test_reading_is_counted_per_step_since_the_last_probe(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("largebatch.run.watch.slow_processes.own_clock", lambda: lambda: now[0])
    gathered = []
    backend = TwoRanks()
    backend.all_gather = lambda values: gathered.append(Times(*values.tolist())) or torch.stack([values, values])

    def batches():
        for _ in range(4):
            now[0] += 3.0
            yield "batch"

    slow_processes = SlowProcesses(backend, (), None)
    reading = slow_processes.timed(batches())
    for count in (2, 4):
        for _ in range(2):
            assert next(reading) == "batch"
            now[0] += 100.0
        slow_processes.probe(count, 50.0 * count)
    assert [(times.reading, times.step) for times in gathered] == [(3.0, 50.0), (3.0, 50.0)]


def test_a_single_process_is_not_probed(monkeypatch):
    monkeypatch.setattr("largebatch.run.watch.slow_processes.seconds_of_product", None)
    alone = SlowProcesses(SimpleNamespace(world_size=1), (), None)
    assert list(alone.timed(iter([1, 2]))) == [1, 2]
    assert alone.probe(10, 1.0) == []


def test_the_product_draws_no_random_numbers():
    before = torch.get_rng_state()
    assert seconds_of_product(torch.device("cpu"), own_clock()) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_the_clock_counts_sleep():
    """As waiting for a disk; only waiting for a core is left out."""
    clock = own_clock()
    start = clock()
    time.sleep(0.5)
    assert clock() - start > 0.3


def train_with_a_slow_rank(run_dir, slow_rank):
    from largebatch.run.watch import slow_processes

    rank = int(os.environ["RANK"])
    # Not measured, so that the load of the machine cannot matter; nor is reading.
    slow_processes.own_clock = lambda: lambda: 0.0
    slow_processes.seconds_of_product = lambda _device, _clock: 0.02 if rank == slow_rank else 0.01
    os.environ["LARGEBATCH_NODE"] = f"node{rank}"
    words = ('--evaluation.every={"steps": 3}', '--checkpoint.every={"steps": 2}', "--train.stop_after_steps=6")
    train(PYDOC, *TINY_GPT, *words, run_dir=run_dir)


@pytest.mark.slow
def test_a_slow_rank_is_named_in_the_history_and_the_report(tmp_path):
    run_job(train_with_a_slow_rank, tmp_path / "run", 1)
    (event,) = [line for line in read_json_lines(tmp_path / "run/history.jsonl") if line["event"] == "slow_process"]
    # Probes after the checkpoint of step 2, the evaluation of step 3, and the checkpoint of step 4.
    named = {name: event[name] for name in ("step", "rank", "what")}
    assert named == {"step": 4, "rank": 1, "what": "the matrix product"}
    assert event["place"].startswith("node1, process ")
    assert event["ratio"] == pytest.approx(2 / 1.5, abs=1e-3)
    (run,) = read_runs([tmp_path / "run"])
    texts = [shown.text for shown in run.events if shown.kind == "slow_process"]
    assert texts == [
        f"rank 1 ({event['place']}) is slow: the matrix product took 20.00 ms, the median of all "
        "processes is 15.00 ms, and it was over 1.15 times the median in 3 probes in a row"
    ]
