"""Trial steps find wrong optimizers before training, name the cause, and let every correct one pass."""

import dataclasses
import re
from functools import partial
from typing import Literal

import pytest
import torch

import tasks
from jobs import JobFailed, run_job
from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.config.optimizers import ROUNDING, OptimizerEntry
from largebatch.config.optimizers.sections import OptimizerSection
from largebatch.errors import UserError
from largebatch.optim.trial import try_optimizer
from largebatch.plan import resolve
from largebatch.tools.local_jobs.training import train
from own_optimizers import write_own_task
from paths import DIGITS
from planting import plant

MOMENTUM = 0.9


class Own(torch.optim.Optimizer):
    """Momentum with decoupled weight decay; what is wrong with it is named by `bug`."""

    def __init__(self, params, lr, bug=None, weight_decay=0.0):
        self.bug = bug
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        if bug == "refuses":
            raise ValueError("beta must be\nabove 0")

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            rate = group["lr"]
            decay = group["weight_decay"]
            if self.bug == "fixed rate":
                rate = 0.1
            elif self.bug == "squared rate":
                rate = rate**2
            if self.bug == "default decay":
                decay = self.defaults["weight_decay"]
            elif self.bug == "same decay everywhere":
                decay = 0.1
            for parameter in group["params"]:
                state = self.state[parameter]
                if self.bug == "changes gradients":
                    parameter.grad.clamp_(-0.5, 0.5)
                if self.bug == "crash":
                    raise KeyError("no such thing")
                if not state:
                    state["average"] = torch.zeros_like(parameter if self.bug != "rows" else parameter[:, 0])
                    if self.bug == "more":
                        state["more"] = 1
                    # As of some that are correct.
                    if self.bug == "no first step":
                        continue
                average = state["average"].mul_(MOMENTUM).add_(parameter.grad if self.bug != "rows" else 0)
                direction = average / average.norm() if self.bug == "divides by zero" else average
                if self.bug == "local norms":
                    direction = parameter.norm() / (average + decay * parameter).norm().clamp(min=1e-3) * average
                parameter.mul_(1 - rate * decay).sub_(rate * (direction if self.bug != "rows" else 0))


class Section(OptimizerSection):
    """What a recipe might say of them."""

    name: Literal["own"]


def plan_of(constructor, options=None, states=("average",), weight_decay=0.1, needs="elements"):
    """A plan whose optimizer is of a constructor that no entry of the package names."""
    plan = resolve(load_config(DIGITS), world_size=1)

    def declared(_, shape):
        return {name: () if name == "step" else shape for name in states}

    entry = OptimizerEntry(Section, constructor, declared, ROUNDING, needs)
    return dataclasses.replace(
        plan,
        optimizer=plan.optimizer.model_copy(update={"name": "own", "weight_decay": weight_decay}),
        optimizer_options=options or {},
        optimizer_entry=entry,
    )


OWN = f"{__name__}:Own"
REST = "; correct its `step`"
RATE = "does not follow the learning rate of its groups: twice the rate does not make steps twice as long" + REST


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("fixed rate", RATE),
        ("squared rate", RATE),
        ("local norms", "depends on how strategies divide a tensor; see LayerwiseOptimizer, and `needs` of an Optim"),
        ("default decay", "ignores the weight_decay 0.1 of a group: with a gradient of 0, its weights do not move tow"),
        ("same decay everywhere", "moves weights, or makes them NaN, with a gradient of 0 in a group whose weight_dec"),
        ("divides by zero", "moves weights, or makes them NaN, with a gradient of 0 in a group whose weight_decay is"),
        ("more", "{'average': (4, 3), 'more': ()}, but its entry declares {'average': (4, 3)}; correct"),
        ("rows", 'fails in a step of a matrix or, if it `needs` only "elements", of flat pieces: too many indices'),
        ("changes gradients", "changes gradients in its step, which DeepSpeed uses after it; change a copy" + REST),
        ("crash", "flat pieces: 'no such thing' (KeyError)"),
        ("refuses", f"\"own\" cannot be built by {OWN}(groups, lr=0.0, bug='refuses'): beta must be above 0 (ValueErr"),
    ],
)
def test_what_is_wrong_is_named(bug, words):
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        try_optimizer(plan_of(OWN, {"bug": bug}))
    assert "own" in str(caught.value)


@pytest.mark.parametrize(
    ("constructor", "options", "states"),
    [
        (OWN, {}, ["average"]),
        (OWN, {"bug": "no first step"}, ["average"]),
        ("pytorch_optimizer:Lion", {}, ["exp_avg"]),
        ("torch.optim:Adam", {}, ["step", "exp_avg", "exp_avg_sq"]),
        ("torch.optim:RMSprop", {"momentum": 0.9}, ["step", "square_avg", "momentum_buffer"]),
    ],
)
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_correct_ones_pass(constructor, options, states, weight_decay):
    try_optimizer(plan_of(constructor, options, states, weight_decay))


def test_a_step_that_is_counted_in_a_parameter_group_is_lost():
    """As many optimizers outside of torch do it: a checkpoint has states alone."""
    plan = plan_of("pytorch_optimizer:AdaBelief", {}, ["exp_avg", "exp_avg_var"])
    words = (
        r"AdaBelief\) has state outside of `optimizer\.state`, which a resumed run would not have; correct its `step`"
    )
    with pytest.raises(UserError, match=words):
        try_optimizer(plan)


def test_what_needs_whole_tensors_may_depend_on_their_norms():
    try_optimizer(plan_of(OWN, {"bug": "local norms"}, needs="whole matrices"))


def test_a_state_that_is_declared_but_not_kept():
    with pytest.raises(UserError, match=r"shape \(4, 3\): {}, but its entry declares"):
        try_optimizer(plan_of("torch.optim:SGD", {}, ["momentum_buffer"]))


@pytest.mark.parametrize(
    "section",
    [
        '{"name": "sgd", "weight_decay": 1e-6, "nesterov": true}',
        '{"name": "adamw", "weight_decay": 10}',
        '{"name": "adamw", "weight_decay": 0, "betas": [0.0, 0.0]}',
        '{"name": "lars", "weight_decay": 0, "momentum": 0.0, "trust_coefficient": 1.0}',
        *(f'{{"name": "lars", "weight_decay": 0.1, "trust_coefficient": {rate}}}' for rate in (0.1, 1e6)),
        '{"name": "lamb", "weight_decay": 0}',
    ],
)
def test_shipped_ones_pass(section):
    try_optimizer(resolve(load_config(DIGITS, [f"--optimizer={section}"]), world_size=1))


def test_one_that_keeps_no_more_than_its_steps_passes(tmp_path):
    own = write_own_task(tmp_path / "own")
    section = '--optimizer={"name": "softsign", "weight_decay": 0, "beta": 0}'
    try_optimizer(resolve(load_config(own, [section]), world_size=1))


def test_plan_and_verify_try_it_first(tmp_path, capsys):
    own = write_own_task(tmp_path / "own")
    plant(own.with_name("own_torch.py"), '- group["lr"] * group["weight_decay"])', ")")
    section = '--optimizer={"name": "softsign", "weight_decay": 0.1}'
    tasks.link_accelerate_configs()
    for command in (["plan", "--world-sizes=2", "--gpu-memory=80"], ["verify", "--world-sizes=1"]):
        assert main([command[0], str(own), *command[1:], section]) == 2
        assert "own_torch:Softsign) ignores the weight_decay 0.1 of a group" in capsys.readouterr().err
    # A plan alone, and lint, import no torch.
    assert main(["plan", str(own), "--world-size=2", section]) == 0


@pytest.mark.slow
def test_a_run_tries_it_before_it_opens_data(tmp_path):
    own = write_own_task(tmp_path / "own")
    plant(own.with_name("own_torch.py"), 'group["lr"] * direction', "1e-3 * direction")
    own.with_name("data.py").write_text("def sources(*_):\n    raise AssertionError\n")
    with pytest.raises(
        JobFailed, match="does not follow the learning rate of its groups: twice the rate does not make steps"
    ):
        run_job(partial(train, run_dir=tmp_path / "run"), own, '--optimizer={"name": "softsign", "weight_decay": 0.1}')
