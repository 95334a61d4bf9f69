"""The audit is silent about loops that are right."""

import gc
import importlib
import json
import re
from types import SimpleNamespace

import pytest
import torch

from largebatch.__main__ import main
from largebatch.tools.audit import observe
from largebatch.tools.local_jobs.jobs import run_job
from largebatch.tools.plan.accelerate_configs import rehearsal_environment
from paths import ROOT

RIGHT = {
    "plain": [],
    "sharded": [
        ("DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))", "sharded()"),
        (
            "def train(",
            "def sharded():\n    from torch.distributed.fsdp import fully_shard\n    torch.manual_seed(1)\n"
            "    return fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))\n\n\ndef train(",
        ),
    ],
    "several optimizers": [
        ("            optimizer.step()", "            optimizer.step()\n            other.step()"),
        ("SGD(model.parameters()", "SGD(model.module[0].parameters()"),
        ("    schedule =", "    other = torch.optim.AdamW(model.module[2].parameters())\n    schedule ="),
        ("optimizer.zero_grad()", "model.zero_grad()"),
        ("parameters(), 1.0)", "parameters(), 0.1)"),
    ],
    "a closure": [
        ("        loss.backward()\n        if number % accumulation == 0", "        if number % accumulation"),
        (":\n            nn.utils", ":\n            loss.backward()\n        else:\n            nn.utils"),
        ("            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),
        ("optimizer.step()", "optimizer.step(closure=loss.backward)"),
    ],
    "the whole batch's targets": [
        (
            "y) / accumulation",
            'y, ignore_index=4, reduction="sum") * dist.get_world_size() / (data[:][1] != 4).sum()',
        ),
        ("def audit(indices,", "Subset.__getitem__ = lambda self, at: self.dataset[[self.indices[i] for i in at]] if "
        "isinstance(at, list) else self.dataset[self.indices[at] if isinstance(at, int) else self.indices]\n\n\n"
        "def audit(indices,"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_loops(name, audit):
    found = audit(*RIGHT[name])
    assert (found["wrong"], found["precision"]) == ([], "float64"), found
    assert [each["gradient"] for each in found["layouts"]] == ["the same"] * 3


LOOPS = ROOT / "tests/tools/audit/right_loops.py"
NAMES = re.findall(r"(?m)^def ([a-z]\w+)\(", LOOPS.read_text())
SAMPLES = 4
# What the audit of that many samples asks of one and of two processes, with one and with two micro-batches.
CALLS = {
    1: [
        *(([sample], 1, 1) for sample in range(SAMPLES)),
        *((indices, 4, 1) for indices in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2], [2, 1, 0], [*range(16)])),
        *((indices, 2, 2) for indices in ([0, 1, 2, 3], [0, 1, 2], [*range(16)])),
    ],
    2: [
        *((indices, 2, 1) for indices in ([0, 1, 2, 3], [0, 1, 2], [*range(16)])),
        *((indices, 1, 2) for indices in ([0, 1, 2, 3], [0, 1, 2])),
    ],
}


def observe_together(calls):
    """What each loop does in each call, all in this process: forked processes for each would take minutes."""
    hooks = []
    register = observe.register_optimizer_step_pre_hook
    observe.register_optimizer_step_pre_hook = lambda hook: hooks.append(register(hook)) or hooks[-1]
    found = {}
    for name in NAMES:
        for indices, *sizes in calls:
            try:
                found[name, *indices, *sizes] = observe.observe(LOOPS, name, "float64", indices, *sizes)
            except Exception as error:
                found[name, *indices, *sizes] = repr(error)
            # The next call begins as in a new process, but for the kernel without dropout.
            hooks.pop().remove()
            importlib.reload(torch.nn.utils.clip_grad)
            torch.library.Library = lambda *_: SimpleNamespace(impl=lambda *_: None)
            gc.collect()
    return found


@pytest.fixture(scope="module")
def observed_together():
    return {
        world_size: run_job(
            observe_together,
            calls,
            world_size=world_size,
            environment=rehearsal_environment(None, world_size),
            folder=ROOT,
            timeout=120,
        )
        for world_size, calls in CALLS.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_right_loops_of_many_kinds(name, observed_together, monkeypatch, capsys):
    def noted(_, __, function, ___, indices, *sizes, world_size, **____):
        return [of_rank[function, *indices, *sizes] for of_rank in observed_together[world_size]]

    monkeypatch.setattr("largebatch.tools.audit.outcome.run_job", noted)
    code = main(["audit", f"{LOOPS}:{name}", "--json", "--batch=4", "--world-sizes=1,2", "--accumulations=1,2"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["wrong"]) == (0, []), found
    assert [each["gradient"] for each in found["layouts"]] == ["the same"] * 3
