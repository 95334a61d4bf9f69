"""A task's own state comes back from JSON as it was, or is refused in one sentence."""

import json
import re
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
from largebatch.run.checkpoint.load import load
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
    state = {"step": 3, "rate": 0.1, "best": float("inf"), "name": "x", "none": None, "all": [1.5, [True]]}
    live = Own(state | {"seen": [1]})
    saved = kept(own=live).check(alone)
    # A checkpoint is written while training goes on.
    live.state["seen"].append(2)
    fresh = Own({})
    kept(own=fresh).restore(json.loads(json.dumps(saved)))
    assert fresh.state == state | {"seen": [1]}


@pytest.mark.parametrize(
    "state",
    [{"a": [{1: 2}]}, {"pair": (1, 2)}, {"average": torch.zeros(3)}, {"x": object()}, {"x": float("nan")}],
)
def test_what_cannot_be_kept(state):
    with pytest.raises(UserError, match=r"^run.keep: the state of own cannot be kept; .* write tensor.tolist\(\)"):
        kept(own=Own(state)).check(alone)


def test_what_is_no_state_and_what_the_checkpoint_does_not_have():
    with pytest.raises(UserError, match=r"run.keep: own is a dict; register an object with state_dict"):
        kept(own={})
    once = kept(own=Own({}))
    with pytest.raises(UserError, match="once, under a name of its own"):
        once.add("own", Own({}))
    with pytest.raises(UserError, match=r"the checkpoint has no state own; remove it again, or --resume none starts"):
        once.restore({})
    with pytest.raises(UserError, match=r"train.py has no state old; register it, or --resume none starts over"):
        once.restore({"own": {}, "old": {}})


def test_processes_that_differ():
    """Each is told which states differ, and no others; also one that only another process has registered."""
    states = {"same": Own([1]), "seen": Own([3]), "best": Own(2.5)}

    def others_digests(mine):
        return [mine, mine | {"seen": "another digest", "extra": "a digest"}]

    two = SimpleNamespace(gather_objects=others_digests, raise_on_all_ranks=nullcontext)
    with pytest.raises(TrainingFailed, match=re.escape("the state of extra, seen is not the same on all processes")):
        kept(**states).check(two)


@pytest.mark.slow
def test_a_state_that_one_process_cannot_keep_or_load_ends_all():
    cannot_be_kept = "run.keep: the state of own cannot be kept"
    refused = "run.keep: own refuses its state in the checkpoint: 'unseen' (KeyError)"
    assert run_job(use_on_the_second_process) == [[cannot_be_kept, refused]] * 2


def use_on_the_second_process():
    backend = start(read_launch(), resolve(load_config(DIGITS), world_size=2))
    state = Own({"seen": (1, 2) if backend.rank == 1 else [1, 2]})
    backend.kept.add("own", state)
    if backend.rank == 1:
        state.load_state_dict = lambda saved: saved["unseen"]
    manifest = SimpleNamespace(parameters={}, vectors={}, kept={"own": {}})
    said = []
    for use in (lambda: backend.kept.check(backend), lambda: load(backend, None, manifest)):
        with pytest.raises(UserError) as caught:
            use()
        said.append(str(caught.value).removeprefix("on rank 1: ").partition(";")[0])
    return said
