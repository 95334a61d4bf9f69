"""Processes that read other samples by the same indices are refused; what only rounds differently is not."""

import itertools
import json
import os
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jobs import failure_of, run_job, train
from largebatch.errors import DataError
from largebatch.run.same_samples import check_same_samples
from largebatch.storage.run_folder import RunFolder
from largebatch.task_folders import import_from
from paths import MAPS


def train_on_other_samples(run_dir, shift=None, *words):
    """As where data are in the order of a set of strings, if `shift` is None."""
    source = import_from(MAPS.parent, "data").MapSource
    fetch = source.fetch
    shift = int(os.environ["RANK"]) if shift is None else shift
    source.fetch = lambda self, indices, epoch: fetch(self, (indices + shift) % len(self), epoch)
    train(MAPS, "--train.stop_after_steps=1", *words, run_dir=run_dir)


@pytest.mark.slow
def test_samples_in_another_order(run_dir):
    report = failure_of(train_on_other_samples, run_dir)
    assert "`fetch` in data.py returns another 'map' of the training samples than on rank 0" in report
    assert not (run_dir / "metrics.jsonl").exists()


@pytest.mark.slow
def test_samples_that_change_while_a_run_is_interrupted(run_dir):
    place = {"strategy": "single"}
    run_job(train_on_other_samples, run_dir, 0, **place)
    longer = "--train.stop_after_steps=2"
    report = failure_of(train_on_other_samples, run_dir, 1, longer, **place)
    assert "'map' of the training samples are not those that the checkpoint was trained with" in report
    changed = "--optimizer.clip_norm=0.5"
    report = failure_of(train_on_other_samples, run_dir, 1, longer, changed, f"--allow-change={changed[2:-4]}", **place)
    assert "'map' of the training samples are not those" in report
    run_job(train_on_other_samples, run_dir, 1, longer, "--allow-change=data", **place)
    assert [line["step"] for line in RunFolder(run_dir).metrics()] == [1, 2]
    assert "data: its samples are not compared" in str(RunFolder(run_dir).history())


class Source:
    """Images with a missing value, a label that all share, and a tensor without numbers; draws from torch's generator.

    Args:
        change: Changes a batch, given the epoch.
    """

    def __init__(self, change=lambda batch, _: batch):
        self.change = change

    def __len__(self):
        return 20

    def fetch(self, indices, epoch):
        torch.rand(1)
        images = np.random.default_rng(1).normal(100, 50, (20, 400))
        images[:, 3] = np.nan
        batch = {"image": torch.from_numpy(images)[indices], "label": torch.full((len(indices),), 3)}
        batch["class"] = torch.arange(1000, 1020)[indices]
        return {"none": torch.empty(len(indices), 0), **self.change(batch, epoch)}

    def weight(self, batch):
        return len(batch["image"])


def check(source, num_workers, expected=None, before=()):
    """The numbers of a source that would be sent, which must be like those that are expected."""
    sent = []

    def from_main_process(function):
        sent.append(function())
        return json.loads(json.dumps(expected or sent[0]))

    backend = SimpleNamespace(raise_on_all_ranks=nullcontext, from_main_process=from_main_process)
    check_same_samples([source, source], num_workers, backend, dict(before))
    return sent[0]


def times(name, factor):
    return lambda batch, _: batch | {name: batch[name] * factor}


class Alone(Source):
    """Samples of different lengths, of which more than one make no tensor, with infinities."""

    def fetch(self, indices, epoch):
        (index,) = indices
        return self.change({"text": torch.full((1, 10 + index), index), "mask": torch.tensor([[1, -np.inf]])}, epoch)

    def weight(self, batch):
        return len(batch["text"])


def test_samples_that_do_not_go_into_one_batch():
    expected = check(Alone(), 0)
    check(Alone(), 1, expected)
    for change in (times("text", 2), lambda batch, _: batch | {"text": batch["text"][:, 1:]}, times("mask", -1)):
        with pytest.raises(DataError, match="of the training samples than on rank 0"):
            check(Alone(change), 0, expected)


def test_no_samples_are_alike():
    class Empty(Source):
        def __len__(self):
            return 0

    assert check(Empty(), 0) == {}


CALLS = itertools.count()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda batch, _: batch | {"image": batch["image"] * np.random.default_rng().uniform(0.9, 1)}, "image"),
        (lambda batch, _: batch | {"image": batch["image"].flip([1] * (torch.rand(1) < 0.5))}, "image"),
        (lambda batch, epoch: batch if epoch == 0 else batch | {"label": batch["label"] + next(CALLS)}, "label"),
    ],
)
def test_what_differs_when_it_is_fetched_again(change, name, num_workers):
    which = "evaluation" if name == "label" else "training"
    told = f"another '{name}' of the {which} samples when it is called again"
    with pytest.raises(DataError, match=told):
        check(Source(change), num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_only_rounds_differently_is_not_refused(num_workers):
    before = torch.get_rng_state()
    expected = check(Source(), num_workers)
    assert sum(len(numbers) for numbers in expected.values()) <= 4 * 400
    check(Source(times("image", 1.01)), num_workers, expected)
    check(Source(times("label", 1 + 1e-6)), num_workers, expected)
    assert torch.equal(torch.get_rng_state(), before)
    for change, said in (
        (lambda batch, _: batch | {"image": batch["image"].flip(1)}, "'image' of the training samples"),
        (lambda batch, epoch: batch if epoch == 0 else times("label", 2)(batch, epoch), "'label' of the evaluation"),
        (lambda batch, _: batch | {"image": batch["image"][:, :-100]}, "'image' of the training samples"),
        (lambda batch, _: {"image": batch["image"]}, "'label' of the training samples"),
        (lambda batch, _: batch | {"class": batch["class"] + 1}, "'class' of the training samples"),
    ):
        with pytest.raises(DataError, match=said):
            check(Source(change), num_workers, expected)
        with pytest.raises(DataError, match=f"{said}.* not those that the checkpoint"):
            check(Source(change), num_workers, before=expected)
