"""The audit is silent about loops that are right."""

import re

import pytest

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
        ("    for number,", "    targets = (torch.stack([y for _, y in data]) != 4).sum()\n    for number,"),
        ("y) / accumulation", 'y, ignore_index=4, reduction="sum") * dist.get_world_size() / targets'),
    ],
}


LOOPS = ROOT / "tests/tools/audit/right_loops.py"
NAMES = re.findall(r"(?m)^def ([a-z]\w+)\(", LOOPS.read_text())


@pytest.mark.parametrize("name", [*RIGHT, *NAMES])
def test_right_loops(name, audit):
    found = audit(*RIGHT[name]) if name in RIGHT else audit(loop=f"{LOOPS}:{name}")
    assert (found["wrong"], found["precision"]) == ([], "float64"), found
    assert [each["gradient"] for each in found["layouts"]] == ["the same"] * 3


WITH_PROCESSES = """
import multiprocessing

def double(number):
    return 2.0 * number

def audit(indices, size, accumulation):
    import torch
    from torch import distributed, nn
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(double, indices)
    own = torch.tensor(doubled[distributed.get_rank()::distributed.get_world_size()]).view(accumulation, size, 1)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    for batch in own:
        (model(batch).square().mean() / accumulation).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return model
"""


def test_processes_that_a_loop_spawns_find_what_its_file_defines(audit, tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(WITH_PROCESSES)
    assert audit(loop=str(file))["wrong"] == []
