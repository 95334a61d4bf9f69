"""Loading: whole micro-batches by their indices, in order, in this process and in loader processes."""

import os
import re
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from largebatch.config.data import DigitsData
from largebatch.data.loading import check_sizes, load
from largebatch.errors import DataError


class Squares:
    """A source that fails on request and remembers how it was asked."""

    def __init__(self, size=100):
        self.size = size
        self.asked = []

    def __len__(self):
        return self.size

    def fetch(self, indices, epoch):
        self.asked.append((indices.tolist(), epoch))
        if 13 in indices:
            raise DataError("sample 13 is missing")
        return {
            "square": torch.from_numpy(indices**2),
            "epoch": torch.full((len(indices),), -1 if epoch is None else epoch),
        }

    def weight(self, batch):
        return int(batch["square"].sum())


REQUESTS = [(np.array([3, 1]), 0), (np.array([5]), 1), (np.array([2, 2, 0]), None)]


def loaded(source, requests=REQUESTS, num_workers=0):
    return list(load(source, requests, num_workers, torch.device("cpu")))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_in_order(num_workers):
    batches, weights = zip(*loaded(Squares(), num_workers=num_workers), strict=True)
    assert [batch["square"].tolist() for batch in batches] == [[9, 1], [25], [4, 4, 0]]
    assert [batch["epoch"].tolist() for batch in batches] == [[0, 0], [1], [-1, -1, -1]]
    assert weights == (10, 25, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_are_fractions_are_summed_exactly(dtype):
    """Also where their sum in fp32 would depend on how they are cut: large ones beside the smallest."""
    weights = (torch.rand(12, generator=torch.Generator().manual_seed(0)) * 2**20).round() / 2**20
    weights[3] = 2.0**18
    weights[7] = 2.0**-20
    weights[0] = 0.0
    exact = sum(map(Fraction, weights.tolist()))
    source = Squares()
    source.weight = lambda batch: weights.to(dtype)[batch["square"].double().sqrt().round().long()]
    for size in (1, 5, 12):
        requests = [(part, 0) for part in np.split(np.arange(12), range(size, 12, size))]
        assert sum(Fraction(weight) for _, weight in loaded(source, requests)) == exact


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.tensor([1.0, 0.1]), "returned a weight of 0.100000001, but weights must be multiples of 2^-20"),
        (torch.tensor([-1.0]), "returned a weight of -1, but"),
        (torch.tensor([float("nan")]), "returned a weight of nan, but"),
        (1.5, "returned 1.5; return a whole number, or a float tensor of weights"),
        (torch.tensor(3.0), "returned tensor(3.); return a whole number, or a float tensor of weights"),
    ],
)
def test_weights_that_cannot_be_summed_exactly(weight, words):
    source = Squares()
    source.weight = lambda _: weight
    with pytest.raises(DataError, match=re.escape(f"Squares.weight(batch) {words}")):
        loaded(source)


def test_a_micro_batch_is_fetched_at_once():
    source = Squares()
    loaded(source)
    assert source.asked == [([3, 1], 0), ([5], 1), ([2, 2, 0], None)]


def test_arrays_are_refused():
    source = Squares()
    source.fetch = lambda indices, _: {"square": indices**2}
    words = r"^Squares.fetch returned 'square' as ndarray; return tensors: torch.from_numpy\(array\)$"
    with pytest.raises(DataError, match=words):
        loaded(source)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_arrive_as_they_are(num_workers):
    with pytest.raises(DataError, match=r"^sample 13 is missing$"):
        loaded(Squares(), [(np.array([13]), 0)], num_workers)


def test_loading_leaves_the_random_state_alone():
    """Dropout is seeded before each forward pass; a loader that drew numbers in between would change it."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    loaded(Squares())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("which", ["train", "eval"])
def test_sizes_must_be_the_recipes(which):
    data = DigitsData(source="digits")
    sources = {"train": Squares(1437), "eval": Squares(360)}
    check_sizes([*sources.values(), Squares(3)], data)
    expected = sources[which].size
    sources[which] = Squares(7)
    message = f"^data.num_{which}_samples: the recipe says {expected}, but the data has 7 samples; write 7$"
    with pytest.raises(DataError, match=message) as caught:
        check_sizes([*sources.values()], data)
    assert "SPLIT" not in str(caught.value)
    sources[which] = Squares(0)
    with pytest.raises(DataError, match=rf"^data.num_{which}_samples: the data is too small for one sample; name more"):
        check_sizes([*sources.values()], data)
    sources[which] = Squares(expected + 1)
    with pytest.raises(DataError, match=rf"or name other data, such as .SPLIT\[:{expected}\]. in recipes with a data"):
        check_sizes([*sources.values()], data)


def test_a_signal_while_a_loader_process_starts_is_left_to_the_training(monkeypatch):
    """Slurm signals all processes of a job, and every evaluation starts new loader processes."""

    def be_signaled(_):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(os.getpid(), number)

    # torch calls this in a new loader process before it calls anything of ours.
    monkeypatch.setattr(torch.multiprocessing, "_set_thread_name", be_signaled)
    assert [weight for _, weight in loaded(Squares(), num_workers=1)] == [10, 25, 8]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def run_here(*words):
    return subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300)


def test_a_process_ends_though_it_is_still_loading():
    """As a run does that stops; multiprocessing ends its loader processes by SIGTERM, and waits for them."""
    code = """if True:
        import torch
        from test_loading import REQUESTS, Squares, load
        loading = load(Squares(), REQUESTS * 100, 2, torch.device("cpu"))
        print(next(loading).weight)
    """
    result = run_here(sys.executable, "-c", code)
    assert (result.returncode, result.stdout) == (0, "10\n"), result.stderr


@pytest.mark.root
def test_too_little_shared_memory_is_an_error_and_no_wait():
    code = """if True:
        import numpy
        from test_loading import Squares, loaded
        loaded(Squares(), [(numpy.full(100_000, 2), 0)], 1)
    """
    small = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    result = run_here("unshare", "--mount", "sh", "-c", small, "sh", sys.executable, "-c", code)
    assert "errors.DataError: " in result.stderr
    assert "no shared memory for a batch of 1,600,000 bytes" in result.stderr
    assert "enlarge /dev/shm (docker run --shm-size" in result.stderr
