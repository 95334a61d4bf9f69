"""Processes that are slow while training are named; see bench/slow_processes.py for clean runs."""

import os
from types import SimpleNamespace

import pytest
import torch

from jobs import run_job, train
from largebatch.run.record.metrics import StepMetrics
from largebatch.run.watch.slow_processes import SlowProcesses, seconds_of_product, slow_ranks
from largebatch.storage.files import read_json_lines
from largebatch.tools.report.runs import read_runs
from paths import PYDOC
from resuming import TINY_GPT


@pytest.mark.parametrize(
    ("seconds", "min_excess", "slow"),
    [
        (0.020, 0.0, []),
        (0.0229, 0.0, []),
        (0.0231, 0.0, [5]),
        # A faster one makes nobody else slow.
        (0.001, 0.0, []),
        (0.0251, 0.005, [5]),
        (0.024, 0.005, []),
    ],
)
def test_one_probe(seconds, min_excess, slow):
    """Eight ranks, of which rank 5 is different."""
    assert slow_ranks([0.020] * 5 + [seconds] + [0.020] * 2, min_excess) == slow


class TwoRanks:
    """Stands in for the backend of rank 0, while rank 1 measures what the test says."""

    world_size, device = 2, torch.device("cpu")

    def __init__(self):
        self.factor = 1.0
        self.measured = []

    def gather_objects(self, value):
        return [value, "there"]

    def all_gather(self, values):
        self.measured.append(values.tolist())
        return torch.stack([values, values * torch.tensor([self.factor, 1.0, 1.0])])


def test_three_slow_probes_in_a_row_are_named_once():
    backend, named = TwoRanks(), []
    record = SimpleNamespace(step=3, event=lambda _, __, rank, what, **___: named.append((step, rank, what)))
    recorder = SimpleNamespace(record=record, say=print, metrics=SimpleNamespace(data_wait=0.0))
    slow_processes = SlowProcesses(backend, recorder)
    for step, factor in enumerate((2, 2, 1, 2, 2, 2, 2, 1, 2, 2, 2), 1):
        backend.factor = factor
        slow_processes.probe(10 * step, 1.0 * step)
    assert named == [(6, 1, "the matrix product"), (11, 1, "the matrix product")]


def test_reading_is_counted_per_step_since_the_last_probe(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    backend = TwoRanks()
    backend.plan = SimpleNamespace(batch_at=lambda _: SimpleNamespace(samples_before=0))
    metrics = StepMetrics(backend, None, 0, 0.0)

    def batches():
        for _ in range(4):
            now[0] += 3.0
            yield "batch"

    slow_processes = SlowProcesses(backend, SimpleNamespace(metrics=metrics))
    reading = metrics.timed(batches())
    for count in (2, 4):
        for _ in range(2):
            assert next(reading) == "batch"
            now[0] += 100.0
        slow_processes.probe(count, 50.0 * count)
    assert [(reading, step) for _, reading, step in backend.measured] == [(3.0, 50.0), (3.0, 50.0)]


def test_the_product_draws_no_random_numbers():
    before = torch.get_rng_state()
    assert seconds_of_product(torch.device("cpu")) > 0
    assert torch.equal(torch.get_rng_state(), before)


def train_with_a_slow_rank(run_dir, slow_rank):
    from largebatch.run.watch import slow_processes

    rank = int(os.environ["RANK"])
    # Neither is measured, so that the load of the machine cannot matter.
    StepMetrics.timed = lambda _, batches: batches
    slow_processes.seconds_of_product = lambda _: 0.02 if rank == slow_rank else 0.01
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
    (run,) = read_runs([tmp_path / "run"])
    sentences = [sentence for line in run.history for sentence in line.sentences]
    assert [sentence for sentence in sentences if sentence.startswith("slow process")] == [
        f"slow process: rank 1 ({event['place']}) is slow: the matrix product took 20.00 ms, the median of all "
        "processes is 15.00 ms, and it was over 1.15 times the median in 3 probes in a row"
    ]
