"""Weight decay goes to the weights, and to each parameter once."""

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from largebatch.config import load_config
from largebatch.optim import build_optimizer, parameter_groups
from largebatch.optim.lamb import Lamb
from largebatch.optim.lars import Lars
from largebatch.plan import resolve
from paths import DIGITS


def names(model: nn.Module, no_decay) -> tuple[set[str], set[str]]:
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 0.1, no_decay)
    found = {group["weight_decay"]: {by_identity[id(p)] for p in group["params"]} for group in groups}
    return found.get(0.1, set()), found.get(0.0, set())


def gpt() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def test_gpt2():
    decayed, exempt = names(gpt(), ["norm", "bias"])
    weights = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert decayed == {f"transformer.h.0.{name}.weight" for name in weights} | {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }
    assert decayed | exempt == {name for name, _ in gpt().named_parameters()}


def test_embeddings_are_exempt_where_asked():
    decayed, exempt = names(gpt(), ["norm", "bias", "embedding"])
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= exempt
    assert not any("wte" in name or "wpe" in name for name in decayed)


def test_a_vision_transformers_class_token_and_positions_are_embeddings():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))
    loose = {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}
    assert loose <= names(model, ["norm", "bias"])[0]
    decayed, exempt = names(model, ["norm", "bias", "embedding"])
    assert loose <= exempt
    matrices = {f"attention.{part}_proj" for part in "qkvo"} | {"mlp.fc1", "mlp.fc2"}
    assert decayed == {f"vit.layers.0.{name}.weight" for name in matrices} | {
        "vit.embeddings.patch_embeddings.projection.weight",
        "classifier.weight",
    }


def test_goyal_exempts_batch_norm_alone():
    model = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3)
    )
    decayed, exempt = names(model, ["norm"])
    assert all("normalization" in name for name in exempt)
    assert "classifier.1.bias" in decayed
    assert not any("normalization" in name for name in decayed)


def test_shared_and_frozen_parameters():
    model = gpt()  # the output layer shares the embedding's weight
    model.transformer.wpe.weight.requires_grad_(False)
    parameters = [p for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert len(parameters) == len({id(p) for p in parameters}) == sum(p.requires_grad for p in model.parameters())


def test_no_empty_group():
    """DeepSpeed drops empty groups, and with them the numbering of the others."""
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


def test_optimizers_get_their_hyperparameters():
    sgd = built('{"name": "sgd", "momentum": 0.8, "nesterov": true, "weight_decay": 0.01}')
    adamw = built('{"name": "adamw", "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.01}')
    lars = built('{"name": "lars", "momentum": 0.8, "trust_coefficient": 0.02, "weight_decay": 0.01}')
    lamb = built('{"name": "lamb", "betas": [0.8, 0.9], "weight_decay": 0.01}')
    assert isinstance(sgd, torch.optim.SGD)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [(g["momentum"], g["nesterov"], g["weight_decay"]) for g in sgd.param_groups] == [
        (0.8, True, 0.01),
        (0.8, True, 0.0),
    ]
    assert [(g["betas"], g["eps"], g["weight_decay"]) for g in adamw.param_groups] == [
        ((0.8, 0.9), 1e-6, 0.01),
        ((0.8, 0.9), 1e-6, 0.0),
    ]
    assert isinstance(lars, Lars)
    assert isinstance(lamb, Lamb)
    # The bias is not adapted.
    assert [(g["momentum"], g["trust_coefficient"], g["weight_decay"], g["layerwise"]) for g in lars.param_groups] == [
        (0.8, 0.02, 0.01, True),
        (0.8, 0.02, 0.0, False),
    ]
    assert [(g["betas"], g["eps"], g["weight_decay"], g["layerwise"]) for g in lamb.param_groups] == [
        ((0.8, 0.9), 1e-6, 0.01, True),
        ((0.8, 0.9), 1e-6, 0.0, False),
    ]


def built(optimizer: str) -> torch.optim.Optimizer:
    plan = resolve(load_config(DIGITS, [f"--optimizer={optimizer}"]), world_size=1)
    return build_optimizer(nn.Linear(2, 2), plan)
