"""Each difference between plan and engine that can be planted is found, named, and refuses the run."""

import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from jobs import failure_of, train
from largebatch.backend.base import Backend
from paths import PYDOC
from tasks import SMALL

pytestmark = pytest.mark.slow


def change_deepspeed():
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    from largebatch.backend import zero

    fill_from_plan = zero.fill_from_plan
    initialize = deepspeed.initialize
    changed = {
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 8,
        "communication_data_type": "bf16",
    }
    zero.fill_from_plan = lambda config, plan: fill_from_plan(config, plan) | changed
    DeepSpeedEngine.gradient_accumulation_steps = lambda _: 4

    def with_scheduler(*args, **kwargs):
        kwargs["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)
        return initialize(*args, **kwargs)

    deepspeed.initialize = with_scheduler


def change_the_optimizer():
    prepare = Backend.prepare

    def changed_optimizer(self, model, optimizer):
        optimizer.param_groups[1].update(weight_decay=0.1, maximize=True, lr_factor=2.0)
        optimizer.param_groups[0]["params"].pop()
        return prepare(self, model, optimizer)

    Backend.prepare = changed_optimizer


def add_a_single_number():
    initialize = GPT2LMHeadModel.__init__

    def with_number(self, *arguments, **options):
        initialize(self, *arguments, **options)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    GPT2LMHeadModel.__init__ = with_number


def halve_the_weights():
    prepare = Backend.prepare
    Backend.prepare = lambda self, model, optimizer: prepare(self, model.bfloat16(), optimizer)


def train_with(change, run_dir):
    """Train after a change in this process."""
    change()
    train(PYDOC, *SMALL, "--train.stop_after_steps=1", run_dir=run_dir)


def test_deepspeed(run_dir):
    report = failure_of(train_with, change_deepspeed, run_dir, strategy="zero2")
    for words in (
        "gradient clipping in DeepSpeed: the plan says 1.0, the engine has 0.5",
        "gradient accumulation inside the engine: the plan says 1, the engine has 4",
        "learning-rate scheduler in DeepSpeed: the plan says None",
        "micro-batch size in DeepSpeed: the plan says 8, the engine has 4",
        "gradient reduction in DeepSpeed: the plan says torch.float32, the engine has torch.bfloat16",
    ):
        assert words in report
    assert "exit code 2" in report
    assert "step 1/" not in report


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_optimizer_that_wrapping_changes(strategy, run_dir):
    report = failure_of(train_with, change_the_optimizer, run_dir, strategy=strategy)
    found = report[report.index("hyperparameters per group") :]
    for words in ("'weight_decay': 0.1", "'maximize': True", "'lr_factor': 2.0"):
        assert words in found
    assert " parameters per group: the plan says [" in report
    assert "exit code 2" in report


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("fsdp", "temperature is a single number, of shape (), which fsdp cannot shard"),
        # One process holds it whole. The next check is the one that refuses it: nothing uses it here.
        ("single", "got no gradient, such as temperature"),
    ],
)
def test_a_parameter_that_a_strategy_cannot_cut_up(strategy, words, tmp_path):
    report = failure_of(train_with, add_a_single_number, tmp_path, strategy=strategy)
    assert words in report
    assert "Traceback" not in report


def test_master_weights(run_dir):
    report = failure_of(train_with, halve_the_weights, run_dir, strategy="fsdp")
    assert "master weights: the plan says {'torch.float32'}" in report
