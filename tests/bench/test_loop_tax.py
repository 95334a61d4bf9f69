"""bench/loop_tax.py: every contender trains the same job."""

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

import loop_tax
import tasks
from largebatch.config import load_config
from paired import in_own_process
from peers.digits.job import BATCH, digits

image_sources = tasks.module("image_classification", "data").sources


class Count:
    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


@pytest.mark.parametrize("name", loop_tax.PEERS)
def test_a_peer_trains_every_batch_of_every_epoch(name, monkeypatch):
    if name == "lightning" and importlib.util.find_spec("lightning") is None:
        # It is no part of the tested set; bench/requirements.txt has it.
        source = Path(loop_tax.__file__).parent / "peers/digits/lightning_loop.py"
        compile(source.read_text(), source, "exec")
        return
    peer = importlib.import_module(f"peers.digits.{loop_tax.PEERS[name]}")
    monkeypatch.setattr(peer, "EPOCHS", 2)
    clock = Count()
    peer.train(clock)
    assert clock.steps == 2 * (1437 // 64)


@pytest.mark.slow
def test_ours_trains_as_many_steps():
    # It exits with an error where it does not.
    assert in_own_process(Path(loop_tax.__file__), "ours") > 0


def test_the_samples_are_ours():
    pixels, labels = digits()
    train, _ = image_sources(load_config(loop_tax.RECIPE, ("--data.image_size=8",)))
    assert len(pixels) == len(train) == 1437
    assert (pixels.shape[1], BATCH) == (64, 64)
    torch.testing.assert_close(labels.bincount(), torch.as_tensor(train.labels).bincount(), atol=20, rtol=0)
