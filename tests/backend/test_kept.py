"""A task's own state comes back from JSON as it was, or is refused in one sentence."""

import json
import re
from collections import OrderedDict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from jobs import run_job
from largebatch.backend.kept import KeptStates
from largebatch.backend.launch import read_launch
from largebatch.backend.start import start
from largebatch.config import load_config
from largebatch.errors import TrainingFailed, UserError
from largebatch.plan import resolve
from paths import DIGITS

alone = SimpleNamespace(gather_objects=lambda value: [value], raise_on_all_ranks=nullcontext)


class Own:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def kept(**states):
    registered = KeptStates()
    for name, state in states.items():
        registered.add(name, state)
    return registered


def test_there_and_back():
    torch.manual_seed(0)
    tensors = [
        torch.randn(3, 2),
        torch.randn(4).double() / 3,
        torch.randn(5).bfloat16(),
        torch.tensor(7),
        torch.zeros(0, 3, dtype=torch.bool),
        torch.tensor([float("nan"), float("inf")]),
    ]
    state = {"step": 3, "rate": 0.1, "best": float("inf"), "name": "x", "none": None, "tensors": tensors, "on": True}
    saved = json.loads(json.dumps(kept(own=Own(state)).check(alone)))
    fresh, schedule = Own({}), torch.nn.BatchNorm1d(2)
    kept(own=fresh).restore(saved)
    for mine, theirs in zip(fresh.state.pop("tensors"), tensors, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        assert mine.shape == theirs.shape
    assert fresh.state == {name: value for name, value in state.items() if name != "tensors"}
    schedule.running_mean += 0.1
    other = torch.nn.BatchNorm1d(2)
    kept(norm=other).restore(kept(norm=schedule).check(alone))
    assert torch.equal(other.running_mean, schedule.running_mean)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [{1: 2}]}, r"own\.a\[0\] \(dict\) cannot be kept"),
        ({"pair": (1, 2)}, r"own\.pair \(tuple\) cannot be kept; a state may have"),
        (OrderedDict(average=torch.zeros(300, 300)), r"own\.average \(Tensor of shape \(300, 300\)\) cannot be kept"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, r"own\.x \(Tensor of shape \(2,\)\)"),
        ({"x": object()}, r"own\.x \(object\)"),
    ],
)
def test_what_cannot_be_kept(state, words):
    with pytest.raises(UserError, match=f"^run.keep: {words}"):
        kept(own=Own(state)).check(alone)


def test_what_is_no_state_and_what_the_checkpoint_does_not_have():
    with pytest.raises(UserError, match=r"run.keep: own is a dict; register an object with state_dict"):
        kept(own={})
    once = kept(own=Own({}))
    with pytest.raises(UserError, match="once, under a name of its own"):
        once.add("own", Own({}))
    with pytest.raises(UserError, match=r"train.py has a state own, but the checkpoint has not"):
        once.restore({})
    with pytest.raises(UserError, match=r"the checkpoint has a state old, but train.py has not"):
        once.restore({"own": {}, "old": {}})


def test_processes_that_differ():
    two = SimpleNamespace(gather_objects=lambda mine: [mine, "another digest"], raise_on_all_ranks=nullcontext)
    with pytest.raises(TrainingFailed, match=re.escape("the state of own is not the same on all processes")):
        kept(own=Own({"seen": 3})).check(two)


@pytest.mark.slow
def test_a_state_that_one_process_cannot_keep_ends_all():
    assert run_job(check_on_the_second_process, timeout=60) == ["run.keep: own.seen (tuple) cannot be kept"] * 2


def check_on_the_second_process():
    plan = resolve(load_config(DIGITS), world_size=2)
    backend = start(read_launch(), plan)
    state = Own({"seen": (1, 2) if backend.rank == 1 else [1, 2]})
    try:
        kept(own=state).check(backend)
    except UserError as error:
        return str(error).removeprefix("on rank 1: ").partition(";")[0]
