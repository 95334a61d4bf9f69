"""Weight decay goes to the weights, and to each parameter once."""

import dataclasses
import json
import re

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.model.building import build_without_weights
from largebatch.optim import build_optimizer, planned_groups
from largebatch.optim.groups import decay_summary
from largebatch.plan import resolve
from paths import DIGITS, PYDOC


def groups_of(model: nn.Module, recipe=DIGITS, **options) -> list[dict]:
    """As planned with these options of the optimizer."""
    words = [f"--optimizer.{name}={json.dumps(value)}" for name, value in options.items()]
    return planned_groups(model, resolve(load_config(recipe, words), world_size=1))


def names(model: nn.Module, no_decay, **options) -> tuple[set[str], set[str]]:
    of = {parameter: name for name, parameter in model.named_parameters()}
    groups = groups_of(model, weight_decay=0.1, no_decay=no_decay, **options)
    found = {group["weight_decay"]: {of[p] for p in group["params"]} for group in groups}
    return found.get(0.1, set()), found.get(0.0, set())


def test_names_are_exempt_where_asked():
    """As mamba_ssm has it: `A_log`, `D`, biases and norms do not decay; all else does."""
    model = MambaForCausalLM(MambaConfig(vocab_size=11, hidden_size=8, state_size=2, num_hidden_layers=2))
    options = {"no_decay": ["norm", "bias"], "no_decay_names": ["*.A_log", "*.D"]}
    decayed, exempt = names(model, **options)
    mixers = {f"backbone.layers.{layer}.mixer" for layer in range(2)}
    weights = ("conv1d", "in_proj", "x_proj", "dt_proj", "out_proj")
    assert decayed == {f"{mixer}.{name}.weight" for mixer in mixers for name in weights} | {
        "backbone.embeddings.weight"
    }
    assert {f"{mixer}.{name}" for mixer in mixers for name in ("A_log", "D", "dt_proj.bias")} < exempt
    assert decayed | exempt == {name for name, _ in model.named_parameters()}
    # Of 2 blocks with a norm, 5 weights, 2 biases, `A_log` and `D`; the embedding, which is tied; and the last norm.
    assert decay_summary(groups_of(model, **options)) == "none on 11 of 22 parameters"


def test_a_model_declares_what_is_exempt():
    """`_no_weight_decay` of a parameter as in mamba_ssm, and a module's `no_weight_decay` as in timm."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(3, 2))
            self.scale = nn.Parameter(torch.zeros(3, 2))

        def no_weight_decay(self):
            return {"table", "cls_token"}

    def build():
        model = nn.Module()
        model.positions = Positions()
        rates = nn.Parameter(torch.zeros(3, 2))
        rates._no_weight_decay = True
        model.rates = rates
        return model

    for model in (build(), build_without_weights(build, lambda _: False)[0]):
        assert names(model, []) == ({"positions.scale"}, {"positions.table", "rates"})


def test_an_optimizer_decides_its_groups_by_roles():
    """As Muon would: matrices inside blocks in a group of their own; a head that is tied to an embedding is none."""
    plan = resolve(load_config(PYDOC), world_size=1)
    seen = set()

    def group_of(role):
        seen.add(role.kind)
        return {"orthogonal": role.kind is None and len(role.shape) == 2}

    plan = dataclasses.replace(plan, optimizer_entry=dataclasses.replace(plan.optimizer_entry, group_of=group_of))
    for tied, more in ((True, set()), (False, {"output"})):
        seen.clear()
        sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=tied))
        groups = planned_groups(model, plan)
        assert seen == {None, "norm", "bias", "embedding"} | more
        assert [(group["weight_decay"] > 0, group["orthogonal"]) for group in groups] == [
            (True, False),
            (True, True),
            (False, False),
        ]
        assert {id(each) for each in groups[1]["params"]} == {
            id(each.weight) for each in model.transformer.h.modules() if type(each).__name__ == "Conv1D"
        }


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="Linear has no trainable parameter; leave requires_grad of some true"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), resolve(load_config(DIGITS), world_size=1))


def test_no_empty_group():
    """DeepSpeed drops empty groups, and with them the numbering of the others."""
    assert len(groups_of(nn.Linear(2, 2, bias=False))) == 1


# --- rates of their own ---------------------------------------------------------------------------------------------

HEAD = {"parameters": "head.*", "lr_factor": 3}
REST = {"parameters": "*", "lr_factor": 0.5}


class Classifier(nn.Module):
    """Two blocks, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 3)


def settings(groups: list[dict], model: nn.Module) -> dict[str, dict]:
    """By the parameter's name."""
    found = {parameter: group for group in groups for parameter in group["params"]}
    return {
        name: {key: value for key, value in found[each].items() if key != "params"}
        for name, each in model.named_parameters()
    }


def test_a_parameter_belongs_to_the_first_group_that_matches():
    model = Classifier()
    found = settings(groups_of(model, groups=[HEAD, REST], weight_decay=0.1), model)
    assert found.pop("head.weight") == {"weight_decay": 0.1, "lr_factor": 3.0}
    # ResNet's recipe decays biases.
    assert found.pop("head.bias") == {"weight_decay": 0.1, "lr_factor": 3.0}
    assert found.pop("norm.weight") == found.pop("norm.bias") == {"weight_decay": 0.0, "lr_factor": 0.5}
    assert all(each == {"weight_decay": 0.1, "lr_factor": 0.5} for each in found.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": [{"parameters": "haed.*"}]}, '"haed.*" matches no trainable parameter of the model, did you mean'),
        ({"groups": [{"parameters": "blocks.1"}]}, "did you mean blocks.1."),
        (
            {"groups": [HEAD, {"parameters": "head.bias"}]},
            "no trainable parameter of the model that an earlier",
        ),
        ({"no_decay_names": ["haed.*"]}, 'optimizer.no_decay_names: "haed.*" matches no trainable parameter'),
    ],
)
def test_a_pattern_that_matches_nothing(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        groups_of(Classifier(), **options)


def test_frozen_for_good_is_not_for_patterns():
    model = Classifier()
    model.head.requires_grad_(False)
    with pytest.raises(ConfigError, match=re.escape('"head.*" matches no trainable parameter')):
        groups_of(model, groups=[HEAD])
