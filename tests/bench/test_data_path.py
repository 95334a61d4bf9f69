"""bench/data_path.py: what is measured is the data path, at the sizes that are named."""

import itertools
import json
from contextvars import copy_context

import datasets
import numpy as np
import pytest

import data_path
from largebatch.data.text import IGNORE_INDEX
from record import read_record


@pytest.mark.parametrize("rows", [10**4, 10**9])
def test_a_simulated_data_set_has_every_row(rows):
    source = data_path.simulated_blocks(rows)
    assert len(source) == rows
    places = np.array([0, rows // 3, rows - 1])
    first = source.fetch(places, 0)["input_ids"][:, 0].numpy()
    # A shard counts its tokens in 16 bits, and all of its blocks are in memory whole.
    np.testing.assert_array_equal(first, places * 128 % data_path.SHARD_TOKENS % (10**6 - 128) % 2**16)


def test_the_order_is_asked_for_in_the_middle_of_an_epoch():
    half = 10**4 // 64 - 10**4 // 64 // 2
    epoch = np.concatenate(list(itertools.islice(data_path.indices_from_the_middle(10**4), half)))
    assert len(np.unique(epoch)) == len(epoch) == half * 64
    assert 0 <= epoch.min() < epoch.max() < 10**4


def test_packing_counts_every_pair_and_target(monkeypatch):
    """Where every measurement takes a second, samples are numbers of pairs and of targets."""
    targets, fetch = [], data_path.of_sft.PairSamples.fetch

    def fetch_and_count(self, indices, epoch):
        batch = fetch(self, indices, epoch)
        targets.append(int((batch["labels"] != IGNORE_INDEX).sum()))
        return batch

    def one_second(work):
        work()
        return 1.0

    monkeypatch.setattr(data_path, "NUM_PAIRS", 300)
    monkeypatch.setattr(data_path.of_sft.PairSamples, "fetch", fetch_and_count)
    monkeypatch.setattr(data_path, "seconds", one_second)
    assigning, fetching = data_path.measure_packing(rounds=2)
    assert assigning.samples == [300, 300]
    # What is fetched to be counted, and then once in each round.
    assert fetching.samples == [sum(targets) / 3] * 2


@pytest.mark.slow
def test_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(data_path, "COPIES", 1)
    monkeypatch.setattr(data_path, "NUM_PAIRS", 3000)
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["data_path.py", "--json", str(out), "--rounds", "2", "--batches", "2"])
    # The program keeps neither where it prepared nor how.
    monkeypatch.setattr(data_path.prepared, "HF_HOME", "")
    try:
        copy_context().run(data_path.main)
    finally:
        datasets.enable_progress_bars()
    record = read_record(out)
    cases = {each.case: each.names for each in record.comparisons}
    sizes = ["10^4 rows", "10^5 rows", "10^6 rows", "10^7 rows", "10^8 rows", "10^9 rows"]
    assert cases["order"] == cases["order and fetching"] == sizes
    assert cases["beside the model"] == ["model", "loading"]
    assert json.loads(out.read_text())["median_ratio_to_encode_batch_fast"]["preparing"]["encode_batch_fast"] == 1.0
    assert all(len(each.samples) == 2 for each in record.figures)
