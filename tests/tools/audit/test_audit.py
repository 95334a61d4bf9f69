"""Loops whose mistake is known: the audit names it."""

import json
import re
from functools import partial

import pytest

from audited_loops import EXAMPLES, PAGE, changed
from largebatch.__main__ import main
from largebatch.tools.audit.report import LINE
from paths import ROOT

ROWS = [row.split(" | ") for row in re.findall(r"(?m)^\| (`.*) \|$", PAGE)]
CONFIGS = ROOT / "recipes/accelerate_configs"


@pytest.mark.parametrize(("old", "new", "said"), ROWS, ids=[said for *_, said in ROWS])
def test_what_the_page_says_of_a_change(old, new, said, audit):
    new = "" if new == "nothing" else new.strip("`")
    assert said in " ".join(audit((old.strip("`"), new))["wrong"])


OTHERS = {
    # Also of a sample alone, and in all later steps.
    "a mean over no targets": (
        [
            (
                "cross_entropy(model(x), y)",
                "cross_entropy(model(x), y, reduction='none') @ (1.0 * (y != 4)) / (y != 4).sum()",
            )
        ],
        "W = 2, A = 2: not finite; a micro-batch without targets is divided by their number: [^;]*$",
    ),
    # Goyal et al. 2017, section 3, remark 3: the mean over all processes' samples, not per-process means added up.
    "sums": (
        [("y) / accumulation", 'y, reduction="sum") * dist.get_world_size() / accumulation')],
        r"1/A times .*W = 2, A = 2: 0\.5\): .* a sum over samples is not divided",
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
        "the number of steps is not that of one process .*W = 2, A = 1: 0.* not all processes step",
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
        r"the gradient of 0\.weight alone is W times ",
    ),
    "clipped by a norm that is given": (
        [
            ("(model(x), y) / accumulation", "(model(x), y)"),
            (
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "norm = nn.utils.get_total_norm([each.grad for each in model.parameters()])\n"
                "            nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, total_norm=norm)",
            ),
        ],
        "A times",
    ),
    "clipped by a shard's norm": (
        [("(model.parameters(), 1.0)", "(list(model.parameters())[dist.get_rank() :: dist.get_world_size()], 0.1)")],
        r"W = 2, A = 1; W = 2, A = 2: the same, but the update .* clipped \(a shard's own",
    ),
    "clipped by the norm of all copies": (
        [
            ("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "scaled([each.grad for each in model.parameters()])"),
            (
                "def train(",
                "def scaled(grads):\n    square = sum(each.square().sum() for each in grads)\n"
                "    dist.all_reduce(square)\n    for each in grads:\n        each /= square.sqrt()\n\n\ndef train(",
            ),
        ],
        r"the gradient is 1/√W times .*: it is clipped by a norm that is added up over processes",
    ),
    "clipped by a shard's norm, in FSDP2": (
        [
            ("DistributedDataParallel(nn.S", "torch.distributed.fsdp.fully_shard(nn.S"),
            ("(model.parameters(), 1.0)", "([each.grad.to_local() for each in model.parameters()])"),
            ("nn.utils.clip_grad_norm_", "scaled"),
            (
                "def train(",
                "def scaled(grads):\n    for each in grads:\n"
                "        each /= torch.stack([each.norm() for each in grads]).norm()\n\n\ndef train(",
            ),
            ("    model = ", "    import torch.distributed.fsdp\n    torch.manual_seed(1)\n    model = "),
        ],
        "W = 2, A = 1; W = 2, A = 2: another gradient of .* clips its part of the gradient by that part's norm",
    ),
    "clipped after each micro-batch": (
        [
            (
                "        if number % accumulation == 0:\n            nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                # Large enough to change nothing in this batch.
                "        nn.utils.clip_grad_norm_(model.parameters(), 1e3)\n        if number % accumulation == 0:",
            )
        ],
        "^W = 1, A = 2; W = 2, A = 2: clipped 2 times; gradients are clipped after each micro-batch: clip their",
    ),
    "clipped after each micro-batch, to another gradient": (
        [
            (
                "        if number % accumulation == 0:\n            nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n        if number % accumulation == 0:",
            )
        ],
        "^W = 1, A = 2; W = 2, A = 2: clipped 2 times; gradients are clipped after each micro-batch: clip their sum "
        "once, before the optimizer's step$",
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
        "samples count .* targets count for more",
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


# By what is wrong: the loss, what is said of it, and the loss after the remedy.
LOSS = "nn.functional.cross_entropy(model(x), y) / accumulation"
SUM = "nn.functional.cross_entropy(model(x), y, ignore_index=4, reduction='sum')"
MEAN = SUM.replace(", reduction='sum'", "")
COUNT = """step = [*loader][(number - 1) // accumulation * accumulation :][:accumulation]
        targets = sum((each != 4).sum() for _, each in step)
        dist.all_reduce(targets)
        loss = """
REMEDIES = {
    "A/W": (
        f"{MEAN} / dist.get_world_size()".replace(", ignore_index=4", ""),
        "A/W times .*: divide by the accumulation steps instead",
        LOSS,
    ),
    "1/(W·A)": (
        f"{SUM} / accumulation",
        r"1/\(W·A\) times .*: multiply the loss by W·A",
        f"{SUM} / accumulation * (accumulation * dist.get_world_size())",
    ),
    "unequal": (
        f"{MEAN} / accumulation",
        r"divide sums by the number .* of the whole batch's targets per process \(all_reduce it .* and divide by W;",
        f"{SUM} / (targets / dist.get_world_size())",
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_remedies(name, audit):
    """The loop that follows one is right."""
    wrong, said, right = REMEDIES[name]
    found = audit(("loss = ", COUNT), (LOSS, wrong), batch=8)["wrong"]
    assert re.search(said, " ".join(found)), found
    assert audit(("loss = ", COUNT), (LOSS, right), batch=8)["wrong"] == []


@pytest.mark.parametrize("name", OTHERS)
def test_other_mistakes(name, audit):
    changes, said = OTHERS[name]
    wrong = audit(*changes)["wrong"]
    assert re.search(said, " ".join(wrong)), wrong


def test_dropout_and_bf16(audit):
    found = audit(
        ("nn.Tanh()", "nn.Dropout(0.5)"),
        ("= nn.functional.cross", "= torch.autocast('cpu')(nn.functional.cross"),
        ("entropy(model(x)", "entropy)(torch.autocast('cpu')(model)(x)"),
    )
    assert found["wrong"] == []
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
    found = audit(
        ("nn.Linear(8, 6))", f"nn.Linear(8, 6)).to(torch.{dtype})"),
        ("model(x), y)", f"model(x.to(torch.{dtype})), y) * {factor}"),
    )
    assert [line[:23] for line in found["wrong"]] == said, found
    assert any(f"are torch.{dtype}: differences of less than" in line for line in found["remarks"])


def test_layers_of_several_precisions(audit):
    layers = "nn.Linear(6, 8).bfloat16(), Cast(torch.float32), nn.LayerNorm(8).float(), Cast(torch.bfloat16)"
    mixed = [
        ("nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)", f"{layers}, nn.Linear(8, 6).bfloat16()"),
        ("model(x)", "model(x.bfloat16())"),
        (
            "def train(",
            "class Cast(nn.Module):\n    def __init__(self, dtype):\n        super().__init__()\n"
            "        self.dtype = dtype\n\n    def forward(self, x):\n        return x.to(self.dtype)\n\n\ndef train(",
        ),
    ]
    assert audit(*mixed)["wrong"] == []
    found = audit(*mixed, ("/ accumulation", "* dist.get_world_size() / accumulation"))
    assert found["wrong"][0].startswith("the gradient is W times")


@pytest.mark.parametrize(("factor", "said"), [("1", []), ("accumulation", ["the gradient is A times"])])
def test_complex_weights_alone(factor, said, audit):
    found = audit(
        (
            "    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))",
            "    torch.manual_seed(1)\n    model = DistributedDataParallel(nn.Linear(6, 6, dtype=torch.cfloat))",
        ),
        ("model(x), y)", f"model(x.cfloat()).abs(), y) * {factor}"),
    )
    assert [line[:23] for line in found["wrong"]] == said, found
    assert found["summary"].endswith("the mean over them")


def test_weights_that_are_not_trained_hide_no_update(audit):
    """Frozen ones of low precision, and an index, which the optimizer has, too."""
    optimizer = "    optimizer = torch.optim.SGD("
    base = "    model.base = nn.Linear(64, 64).bfloat16().requires_grad_(False)\n"
    index = "    model.index = nn.Parameter(torch.arange(3), requires_grad=False)\n"
    frozen = (optimizer, base + index + optimizer)
    found = audit(frozen)
    assert found["wrong"] == []
    assert not any("bfloat16" in line for line in found["remarks"])
    assert audit(frozen, ("lr=", "lr=dist.get_world_size() * "))["wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, "fsdp"])
def test_accelerate(config, audit_in_new_processes):
    words = ["--accelerate", CONFIGS / f"{config}.yaml"] if config else []
    assert audit_in_new_processes(loop="accelerate_loop", words=words)["wrong"] == []


@pytest.mark.slow
def test_deepspeed(audit_in_new_processes, tmp_path):
    engine = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    (tmp_path / "zero.json").write_text(json.dumps(engine | {"gradient_accumulation_steps": "auto"}))
    (tmp_path / "zero.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nuse_cpu: true\nnum_processes: 2\n"
        f"deepspeed_config:\n  deepspeed_config_file: {tmp_path / 'zero.json'}\n  zero3_init_flag: false\n"
    )
    audited = partial(audit_in_new_processes, loop="accelerate_loop", words=["--accelerate", tmp_path / "zero.yaml"])
    assert audited()["wrong"] == []
    found = audited(("cross_entropy(model(x), y)", "cross_entropy(model(x), y) * accumulation"))
    assert found["wrong"][0].startswith("the gradient is A times")


@pytest.mark.slow
def test_trainer(audit_in_new_processes):
    found = audit_in_new_processes(loop="trainer_loop")
    assert found["wrong"] == []
    assert found["summary"].endswith("the mean over them")


def test_progress_is_shown_beside_json(tmp_path, capsys):
    (tmp_path / "loop.py").write_text(changed(EXAMPLES["train"], ("/ accumulation", "")))
    main(["audit", str(tmp_path / "loop.py"), "--json", "--batch=2", "--world-sizes=1", "--accumulations=1,2"])
    out, err = capsys.readouterr()
    assert len(json.loads(out)["wrong"]) == 1
    assert err.startswith("training 2 samples in one process, together and each alone, then in 1 layout\n")
    assert LINE.format(1, 2, 1, "2 times") in err
    # That row is of one process, too.
    assert "\nin one process without accumulation, your effective batch is 2 samples a step" in err
