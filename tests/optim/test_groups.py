"""Weight decay goes to the weights, and to each parameter once."""

import json
import re

import pytest
import torch
from torch import nn

from largebatch.config import load_config
from largebatch.errors import ConfigError
from largebatch.model.building import build_without_weights
from largebatch.optim import build_optimizer, planned_groups
from largebatch.optim.groups import decay_summary
from largebatch.plan import resolve
from paths import DIGITS


def groups_of(model, **options):
    """As planned with these options of the optimizer."""
    words = [f"--optimizer.{name}={json.dumps(value)}" for name, value in options.items()]
    return planned_groups(model, resolve(load_config(DIGITS, words), world_size=1))


def decayed_and_exempt(groups, model):
    """The names of the parameters that have weight decay, and of those that have none."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    decayed, exempt = groups
    assert decayed["weight_decay"] > exempt["weight_decay"] == 0
    return tuple({names[each] for each in group["params"]} for group in groups)


def test_names_are_exempt_where_asked():
    """By their kinds and, as for mamba_ssm's `A_log` and `D`, by their own names; all else decays."""
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "norm": nn.LayerNorm(2), "mixer": nn.Linear(2, 2)})
    model["mixer"].A_log = nn.Parameter(torch.zeros(2, 2))
    groups = groups_of(model, weight_decay=0.1, no_decay=["norm", "bias"], no_decay_names=["*.A_log"])
    decayed = {"embedding.weight", "mixer.weight"}
    exempt = {"norm.weight", "norm.bias", "mixer.bias", "mixer.A_log"}
    assert decayed_and_exempt(groups, model) == (decayed, exempt)
    assert decay_summary(groups) == "none on 4 of 6 parameter tensors"
    _, exempt = decayed_and_exempt(groups_of(model, weight_decay=0.1, no_decay=["embedding"]), model)
    assert exempt == {"embedding.weight"}


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
        groups = groups_of(model, weight_decay=0.1, no_decay=[])
        assert decayed_and_exempt(groups, model) == ({"positions.scale"}, {"positions.table", "rates"})


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigError, match="Linear has no trainable parameter; leave requires_grad of some true"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), resolve(load_config(DIGITS), world_size=1))


def test_no_empty_group():
    """DeepSpeed drops empty groups, and with them the numbering of the others."""
    assert len(groups_of(nn.Linear(2, 2, bias=False))) == 1


# --- rates of their own ---------------------------------------------------------------------------------------------

HEAD = {"parameters": "head.*", "lr_factor": 3}
REST = {"parameters": "*", "lr_factor": 0.5}


def classifier():
    """Two blocks, a norm and a head."""
    blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return nn.ModuleDict({"blocks": blocks, "norm": nn.LayerNorm(2), "head": nn.Linear(2, 3)})


def test_a_parameter_belongs_to_the_first_group_that_matches():
    model = classifier()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = groups_of(model, groups=[HEAD, REST], weight_decay=0.1)
    # ResNet's recipe decays biases.
    assert [({names[each] for each in group.pop("params")}, group) for group in groups] == [
        (
            {f"blocks.{n}.{kind}" for n in (0, 1) for kind in ("weight", "bias")},
            {"weight_decay": 0.1, "lr_factor": 0.5},
        ),
        ({"head.weight", "head.bias"}, {"weight_decay": 0.1, "lr_factor": 3.0}),
        ({"norm.weight", "norm.bias"}, {"weight_decay": 0.0, "lr_factor": 0.5}),
    ]


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
        groups_of(classifier(), **options)


def test_frozen_for_good_is_not_for_patterns():
    model = classifier()
    model["head"].requires_grad_(False)
    with pytest.raises(ConfigError, match=re.escape('"head.*" matches no trainable parameter')):
        groups_of(model, groups=[HEAD])
