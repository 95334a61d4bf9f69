"""Loops whose mistake is known: the audit names it, and is silent about loops that are right."""

import gc
import importlib
import json
import re
from types import SimpleNamespace

import pytest
import torch

from largebatch.__main__ import main
from largebatch.tools.audit import observe
from largebatch.tools.audit.report import LINE
from largebatch.tools.local_jobs.jobs import JobTimedOut, run_job
from largebatch.tools.plan.accelerate_configs import rehearsal_environment
from paths import ROOT

PAGE = (ROOT / "docs/audit.md").read_text()
EXAMPLES = {re.match(r"# (\w+)\.py", block)[1]: block for block in re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE)}
ROWS = [row.split(" | ") for row in re.findall(r"(?m)^\| (`.*) \|$", PAGE)]
CONFIGS = ROOT / "recipes/accelerate_configs"


@pytest.fixture
def audit(tmp_path, capsys):
    """Audit a file with this text; its exit code and what it says as JSON, or the error."""

    def audited(text, *words, batch=4):
        (tmp_path / "loop.py").write_text(text)
        small = [f"--batch={batch}", "--world-sizes=1,2", "--accumulations=1,2"]
        code = main(["audit", str(tmp_path / "loop.py"), "--json", *small, *map(str, words)])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else err

    return audited


def changed(text, *changes):
    """A text in which each first part is replaced by the second one."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(("old", "new", "said"), ROWS, ids=[said for *_, said in ROWS])
def test_what_the_page_says_of_a_change(old, new, said, audit):
    new = "" if new == "nothing" else new.strip("`")
    code, found = audit(changed(EXAMPLES["train"], (old.strip("`"), new)))
    assert code == 1
    assert said in " ".join(found["wrong"])


OTHERS = {
    # Goyal et al. 2017, section 3, remark 3: the mean over all processes' samples, not per-process means added up.
    "sums": (
        [("y) / accumulation", 'y, reduction="sum") * dist.get_world_size() / accumulation')],
        r"1/A times .*W = 2, A = 2: 0\.5",
    ),
    "the same samples": (
        [("DistributedSampler(data, shuffle=False)", "DistributedSampler(data, rank=0, shuffle=False)")],
        "W = 2, A = 1; W = 2, A = 2: without samples 1, 3 of 4, counted from 0; processes train on the same samples",
    ),
    "clipped by itself": (
        [
            ("DistributedDataParallel(nn.S", "(nn.S"),
            (
                "parameters(), 1.0)",
                "parameters(), 0.1)\n            [dist.all_reduce(p.grad) for p in model.parameters()]",
            ),
        ],
        "gradients are clipped before they are averaged",
    ),
    "only the first process steps": (
        [("            optimizer.step()", "            dist.get_rank() or optimizer.step()")],
        "the number of steps is not that of one process .*W = 2, A = 1: 0",
    ),
    "synchronized once": (
        [
            (
                "            optimizer.zero_grad()",
                "            optimizer.zero_grad()\n            model.require_backward_grad_sync = False",
            )
        ],
        "W = 2, A = 1, step 2: each process steps with a gradient of its own",
    ),
    "the rate of a second group": (
        [
            ("SGD(model.parameters(), lr=0.1", "SGD(groups, lr=0.1"),
            ("    optimizer =", "    groups = [{'params': [each]} for each in model.parameters()]\n    optimizer ="),
            ("    schedule =", "    groups[1]['lr'] = 0.1 * dist.get_world_size()\n    schedule ="),
            ("LinearLR(optimizer", "LinearLR(torch.optim.SGD(model.parameters())"),
            ("    groups[1]['lr']", "    optimizer.param_groups[1]['lr']"),
        ],
        "it is W times that of one process",
    ),
    "the rate times all that divides the batch": (
        [("lr=0.1", "lr=0.1 * dist.get_world_size() * accumulation")],
        r"the same, but the update is 2 times as large in W = 1, A = 2; .*: it is W·A times that of one process",
    ),
    "a random part in each process": (
        [
            (
                "DistributedSampler(data, shuffle=False)",
                "torch.randperm(len(data), generator=torch.Generator().manual_seed(dist.get_rank()))"
                "[: len(data) // dist.get_world_size()].tolist()",
            )
        ],
        "without samples .* draw no order in each process",
    ),
    "tied weights counted twice": (
        [
            ("DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))", "tied()"),
            (
                "def train(",
                "def tied():\n    torch.manual_seed(1)\n    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))\n"
                "    model[1].weight = model[0].weight\n    return model\n\n\ndef train(",
            ),
            ("/ accumulation", "/ accumulation / dist.get_world_size()"),
            (
                "            nn.utils",
                "            for _, each in model.named_parameters(remove_duplicate=False):\n"
                "                dist.all_reduce(each.grad)\n            nn.utils",
            ),
        ],
        r"the gradient of 0\.weight alone is W times",
    ),
    "clipped by a shard's norm": (
        [("(model.parameters(), 1.0)", "(list(model.parameters())[dist.get_rank() :: dist.get_world_size()], 0.1)")],
        r"W = 2, A = 1; W = 2, A = 2: the same, but the update .* clipped \(a shard's own",
    ),
    "clipped after each micro-batch": (
        [
            (
                "        if number % accumulation == 0:\n            nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                # Large enough to change nothing in this batch.
                "        nn.utils.clip_grad_norm_(model.parameters(), 1e3)\n        if number % accumulation == 0:",
            )
        ],
        "^W = 1, A = 2; W = 2, A = 2: gradients are clipped after each micro-batch: clip their sum once",
    ),
    "clipped after each micro-batch, to another gradient": (
        [
            (
                "        if number % accumulation == 0:\n            nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n        if number % accumulation == 0:",
            )
        ],
        "^W = 1, A = 2; W = 2, A = 2: gradients are clipped after each micro-batch: clip their sum once, before the "
        "optimizer's step$",
    ),
    "a setting of the optimizer": (
        [("lr=0.1", "lr=0.1, weight_decay=1e-9 * dist.get_world_size()")],
        r"the optimizer has weight_decay 1e-09 in one process \(W = 2, A = 1: 2e-09\)",
    ),
    "other weights in each process": (
        [
            ("    model = DistributedDataParallel(nn.S", "    torch.manual_seed(dist.get_rank())\n    model = (nn.S"),
            (
                "            nn.utils",
                "            for each in model.parameters():\n                dist.all_reduce(each.grad)\n"
                "                each.grad /= dist.get_world_size()\n            nn.utils",
            ),
        ],
        "W = 2, A = 1; W = 2, A = 2: that of other weights; weights differ .* set the same seed in each process",
    ),
    "unequal targets, and added": (
        [("y) / accumulation", "y, ignore_index=4)")],
        r"samples count .* targets count for more .* the mean weight of samples is A times that .* \(W = 1, A = 2: 2;",
    ),
    "another number of steps at the end": (
        [
            (
                "(data, micro_batch_size, sampler=DistributedSampler(data, shuffle=False))",
                "(Subset(data, range(dist.get_rank(), len(data), dist.get_world_size())), micro_batch_size)",
            )
        ],
        "^if 3 samples are left at the end, training fails: W = 2, A = 2: rank 0: .* others had returned: all "
        "processes must make the same calls; drop them",
    ),
    "divided by the optimizer": (
        [
            ("torch.optim.SGD(", "Divided("),
            (
                "def train(",
                "class Divided(torch.optim.SGD):\n    def step(self):\n"
                "        for each in self.param_groups[0]['params']:\n"
                "            each.data -= each.grad / dist.get_world_size()\n\n\ndef train(",
            ),
        ],
        r"W = 2, A = 1; W = 2, A = 2: the same, but the update is 0\.5 times as large",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_mistakes(name, audit):
    changes, said = OTHERS[name]
    code, found = audit(changed(EXAMPLES["train"], *changes))
    assert code == 1
    assert re.search(said, " ".join(found["wrong"])), found["wrong"]


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
    code, found = audit(changed(EXAMPLES["train"], *RIGHT[name]))
    assert (code, found["wrong"], found["precision"]) == (0, [], "float64"), found
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


def test_dropout_and_bf16(audit):
    changes = [
        ("nn.Tanh()", "nn.Dropout(0.5)"),
        ("= nn.functional.cross", "= torch.autocast('cpu')(nn.functional.cross"),
    ]
    text = changed(EXAMPLES["train"], *changes, ("entropy(model(x)", "entropy)(torch.autocast('cpu')(model)(x)"))
    code, found = audit(text)
    assert (code, found["wrong"]) == (0, [])
    assert "compared without dropout" in found["remarks"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("factor", "said"),
    [
        ("1", []),
        ("accumulation", ["the gradient is A times"]),
        # Too small to be seen.
        ("1.005 ** (accumulation - 1)", []),
    ],
)
def test_weights_of_low_precision(dtype, factor, said, audit):
    code, found = audit(
        changed(
            EXAMPLES["train"],
            ("nn.Linear(8, 6))", f"nn.Linear(8, 6)).to(torch.{dtype})"),
            ("model(x), y)", f"model(x.to(torch.{dtype})), y) * {factor}"),
        )
    )
    assert [line[:23] for line in found["wrong"]] == said, found
    assert code == bool(said)
    assert any(f"are torch.{dtype}: differences of less than" in line for line in found["remarks"])


def test_layers_of_several_precisions(audit):
    layers = "nn.Linear(6, 8).bfloat16(), Cast(torch.float32), nn.LayerNorm(8).float(), Cast(torch.bfloat16)"
    mixed = changed(
        EXAMPLES["train"],
        ("nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)", f"{layers}, nn.Linear(8, 6).bfloat16()"),
        ("model(x)", "model(x.bfloat16())"),
        (
            "def train(",
            "class Cast(nn.Module):\n    def __init__(self, dtype):\n        super().__init__()\n"
            "        self.dtype = dtype\n\n    def forward(self, x):\n        return x.to(self.dtype)\n\n\ndef train(",
        ),
    )
    code, found = audit(mixed)
    assert (code, found["wrong"]) == (0, [])
    code, found = audit(changed(mixed, ("/ accumulation", "* dist.get_world_size() / accumulation")))
    assert code == 1
    assert found["wrong"][0].startswith("the gradient is W times")


@pytest.mark.parametrize(("factor", "said"), [("1", []), ("accumulation", ["the gradient is A times"])])
def test_complex_weights_alone(factor, said, audit):
    code, found = audit(
        changed(
            EXAMPLES["train"],
            ("DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))", "complex_layer()"),
            ("model(x), y)", f"model(x.cfloat()).abs(), y) * {factor}"),
            (
                "def train(",
                "def complex_layer():\n    torch.manual_seed(1)\n"
                "    return DistributedDataParallel(nn.Linear(6, 6, dtype=torch.cfloat))\n\n\ndef train(",
            ),
        )
    )
    assert [line[:23] for line in found["wrong"]] == said, found
    assert code == bool(said)
    assert found["summary"].endswith("the mean over them")


def test_weights_that_are_not_trained_hide_no_update(audit):
    """Frozen ones of low precision, and an index, which the optimizer has, too."""
    optimizer = "    optimizer = torch.optim.SGD("
    base = "    model.base = nn.Linear(64, 64).bfloat16().requires_grad_(False)\n"
    index = "    model.index = nn.Parameter(torch.arange(3), requires_grad=False)\n"
    frozen = changed(EXAMPLES["train"], (optimizer, base + index + optimizer))
    code, found = audit(frozen)
    assert (code, found["wrong"]) == (0, [])
    assert not any("bfloat16" in line for line in found["remarks"])
    code, found = audit(changed(frozen, ("lr=", "lr=dist.get_world_size() * ")))
    assert code == 1


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, "fsdp"])
def test_accelerate(config, audit):
    words = ["--accelerate", CONFIGS / f"{config}.yaml"] if config else []
    code, found = audit(EXAMPLES["accelerate_loop"], *words)
    assert (code, found["wrong"]) == (0, [])


@pytest.mark.slow
def test_deepspeed(audit, tmp_path):
    engine = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "zero.json").write_text(json.dumps(engine | {"gradient_accumulation_steps": "auto"}))
    (tmp_path / "zero.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nuse_cpu: true\nnum_processes: 2\n"
        f"deepspeed_config:\n  deepspeed_config_file: {tmp_path / 'zero.json'}\n  zero3_init_flag: false\n"
    )
    code, found = audit(EXAMPLES["accelerate_loop"], "--accelerate", tmp_path / "zero.yaml")
    assert (code, found["wrong"]) == (0, [])
    wrong = changed(
        EXAMPLES["accelerate_loop"], ("cross_entropy(model(x), y)", "cross_entropy(model(x), y) * accumulation")
    )
    code, found = audit(wrong, "--accelerate", tmp_path / "zero.yaml")
    assert code == 1
    assert found["wrong"][0].startswith("the gradient is A times")


@pytest.mark.slow
def test_trainer(audit):
    code, found = audit(EXAMPLES["trainer_loop"])
    assert (code, found["wrong"]) == (0, [])
    assert found["summary"].endswith("the mean over them")


BAD = {
    "raise ValueError('a bad sample')": "rank 1: ValueError: a bad sample",
    "exit(3)": "rank 1: exit code 3",
    "import time; time.sleep(100)": "rank 1: no result within 5 s; give it a longer --timeout",
}


@pytest.mark.parametrize("line", BAD)
def test_a_process_that_does_not_return(line, audit):
    ends = f"    if dist.get_rank() == 1:\n        {line}\n    return model"
    code, found = audit(changed(EXAMPLES["train"], ("    return model", ends)), "--timeout=5")
    assert code == 1
    assert found["wrong"][0].startswith(f"W = 2, A = 1: {BAD[line]}")


def test_a_loop_that_hangs_is_tried_once(audit, monkeypatch):
    tried = []

    def hangs(*arguments, **_):
        tried.append(arguments)
        raise JobTimedOut([(0, "no result within 5 s", "")])

    monkeypatch.setattr("largebatch.tools.audit.outcome.run_job", hangs)
    code, error = audit(EXAMPLES["train"])
    assert (code, len(tried)) == (2, 1)
    assert "no result within 5 s" in error


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def audit(", "def fit(", "loop.py has no function audit"),
        ("return model\n", "return None\n", "it returned NoneType without parameters"),
        ("            optimizer.step()", "            pass", "no step of a torch optimizer was made"),
        ("/ accumulation", "* float('nan')", "the gradient is not finite"),
        ("def audit(", "train(data, 4, 1)\n\n\ndef audit(", "loop.py trains when it is imported"),
        (
            "import torch\n",
            "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('x')\n"
            "parser.parse_args()\nimport torch\n",
            "gets no arguments",
        ),
        ("return model\n", "exit(0)\n", "called exit(0) before the function had returned"),
        ("model(x)", "model(x.cuda())", "the audit is on the CPU: choose the device"),
        ("model(x)", "model(x + torch.rand(1))", "with the samples in reverse order, the gradient differs by"),
        ("(Subset(data, indices)", "(data", "4 samples in one micro-batch make 25 steps"),
        ("parameters(), lr=0.1", "parameters(), lr=0.1 if indices else", "SyntaxError"),
    ],
)
def test_what_cannot_be_audited(old, new, said, audit):
    code, error = audit(
        changed(EXAMPLES["train"], (old, new)).replace("torch.rand(1)", "__import__('os').urandom(1)[0] / 9")
    )
    assert code == 2
    assert said in error


def test_options_that_do_not_fit(audit, tmp_path, capsys):
    with pytest.raises(SystemExit):
        audit(EXAMPLES["train"], batch=6)
    assert "write a --batch of a multiple of 4" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        audit(EXAMPLES["train"], "--world-sizes=1", "--accumulations=1")
    assert "nothing to compare with one process and one micro-batch" in capsys.readouterr().err
    assert main(["audit", str(tmp_path / "absent.py")]) == 2
    assert "absent.py is not a file" in capsys.readouterr().err


def test_progress_is_shown_beside_json(tmp_path, capsys):
    (tmp_path / "loop.py").write_text(EXAMPLES["train"])
    main(["audit", str(tmp_path / "loop.py"), "--json", "--batch=2", "--world-sizes=1", "--accumulations=1,2"])
    out, err = capsys.readouterr()
    assert json.loads(out)["wrong"] == []
    assert err.startswith("training 2 samples in one process, together and each alone, then in 1 layout\n")
    assert LINE.format(1, 2, 1, "the same") in err
