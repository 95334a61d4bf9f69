"""An optimizer that a task declares is one like those of the package."""

import dataclasses

import pytest
import torch

import tasks
from largebatch.__main__ import main
from largebatch.config import load_config
from largebatch.errors import ConfigError, UserError
from largebatch.optim import build_optimizer
from largebatch.optim.build import optimizer_over
from largebatch.plan import resolve
from largebatch.task_folders import import_from
from largebatch.tools.plan.accelerate_configs import find_accelerate_configs
from largebatch.tools.schema import recipe_schema
from largebatch.tools.verify.verification import Combination
from own_optimizers import write_own_task
from paths import PYDOC
from planting import plant
from tasks import TINY
from verifying import rows_of

SOFTSIGN = (*TINY, '--optimizer={"name": "softsign", "weight_decay": 0.1, "clip_norm": 1.0}')
MUON = (*TINY, '--optimizer={"name": "muon"}')
ROW_SCALED = (*TINY, '--optimizer={"name": "row_scaled", "weight_decay": 0.1}')


@pytest.fixture(name="own")
def own_recipe(tmp_path):
    """The recipe of a task outside of the repository, whose Config lists two optimizers of its own."""
    return write_own_task(tmp_path / "own")


# --- configs ------------------------------------------------------------------------------------------------------


def test_the_schema_of_its_folder_has_it_and_no_other(own):
    assert "Softsign" in recipe_schema(own.parent)
    assert "Softsign" not in recipe_schema(PYDOC.parent)
    with pytest.raises(ConfigError, match=r'"softsing" is unknown, did you mean softsign\?'):
        load_config(own, ['--optimizer={"name": "softsing"}'])
    with pytest.raises(ConfigError, match=r'optimizer\.name: "softsign" is unknown; write one of'):
        load_config(PYDOC, SOFTSIGN)


# --- entries ------------------------------------------------------------------------------------------------------


def test_two_tasks_declare_an_optimizer_of_the_same_name(own, tmp_path):
    copy = write_own_task(tmp_path / "copy")
    beta = '["softsign"]\n    beta: BelowOne = 0.'
    plant(copy.with_name("config.py"), f"{beta}9", f"{beta}8")
    first, second = (resolve(load_config(recipe, SOFTSIGN), 2) for recipe in (own, copy))
    assert [plan.optimizer_options["beta"] for plan in (first, second)] == [0.9, 0.8]
    for plan, recipe in ((first, own), (second, copy)):
        assert plan.optimizer_entry.section is import_from(recipe.parent, "config").Softsign
        model = torch.nn.Linear(2, 2)
        assert type(build_optimizer(model, plan)) is import_from(recipe.parent, "own_torch").Softsign
    assert first != second
    assert first == resolve(load_config(own, SOFTSIGN), 2)


def test_a_task_may_not_take_the_name_of_a_shipped_one(own):
    plant(own.with_name("config.py"), 'Literal["softsign"]', 'Literal["adamw"]')
    with pytest.raises(ConfigError, match=r"own/config\.py:\d+: .*'adamw' for discriminator 'name' mapped to multiple"):
        load_config(own)


def test_a_task_may_have_a_single_optimizer(own):
    plant(own.with_name("config.py"), "(*SHIPPED, SOFTSIGN, ROW_SCALED)", "(SOFTSIGN,)")
    assert load_config(own, SOFTSIGN).optimizer.name == "softsign"
    with pytest.raises(ConfigError, match=r'optimizer\.name: given "adamw"; must be "softsign"'):
        load_config(own)


def test_constructors_that_are_not_there(own):
    name = "torch.optim:Nothing"
    plan = resolve(load_config(own, SOFTSIGN), world_size=1)
    wrong = dataclasses.replace(plan, optimizer_entry=dataclasses.replace(plan.optimizer_entry, constructor=name))
    with pytest.raises(UserError, match=rf'"softsign" cannot be built by {name}\(groups, lr=0.0, beta=0.9, softn'):
        optimizer_over([], wrong)


# --- every strategy -----------------------------------------------------------------------------------------------


# `test_outside_task.py` compares softsign under every strategy.
@pytest.mark.slow
def test_whole_matrices_are_had_where_parameters_are_whole(own):
    combinations = [Combination(strategy, 2, 4) for strategy in ("ddp", "fsdp", "zero2")]
    rows = rows_of(own, ROW_SCALED, *combinations)
    assert [row.verdict for row in rows] == ["reference", "agrees", "failed", "failed"], rows
    assert rows[2].problem == (
        'optimizer "row_scaled" needs whole matrices, but under fsdp it would step rows of parameters; '
        "launch with ddp, or use another optimizer"
    )
    assert "under zero2 it would step flat pieces of several parameters" in rows[3].problem
    # Only they are compared by default.
    assert [*find_accelerate_configs(None, load_config(own, ROW_SCALED))] == ["ddp"]


@pytest.mark.slow
def test_the_plan_says_which_strategies_cannot_train_it(own, capsys):
    tasks.link_accelerate_configs()
    assert main(["plan", str(own), "--world-sizes=2", "--gpu-memory=80", *ROW_SCALED]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert 'fsdp is not counted: optimizer "row_scaled" needs whole matrices, but under fsdp it would step' in output
    assert " transient" in output
