"""Weights at export, against the files of `save_pretrained`, whose names and shapes other libraries read."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_merge import GPT2, LLAMA, checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from largebatch.run.checkpoint.export import export_intact

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {"hidden_size": 16, "intermediate_size": 16, "image_size": 8, "patch_size": 4, **HEADS}
TEXT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8, "num_key_value_heads": 1, **HEADS}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, **TEXT}
GEMMA3 = {"model_type": "gemma3", "text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4}


@pytest.mark.parametrize(
    ("config", "renames"),
    [
        (LLAMA | {"tie_word_embeddings": True}, False),
        (GPT2, False),
        (MIXTRAL, True),  # experts, which the model stacks
        (GEMMA3, True),
        (VISION | {"model_type": "vit"}, True),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_tensors_are_those_of_save_pretrained(config, renames, tmp_path):
    torch.manual_seed(0)
    kind = AutoModelForImageClassification if config["model_type"] == "vit" else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path / "expected")
    export_intact(checkpoint(tmp_path, model), tmp_path / "exported")
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "exported"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert renames == (found.keys() - model.state_dict().keys() != set())
    again = kind.from_pretrained(tmp_path / "exported").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_a_dtype_is_that_of_all_parts(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GEMMA3), dtype=torch.float32)
    export_intact(checkpoint(tmp_path, model), tmp_path / "exported", dtype="bfloat16")
    config = AutoConfig.from_pretrained(tmp_path / "exported")
    assert config.dtype == config.text_config.dtype == config.vision_config.dtype == torch.bfloat16


def test_weights_are_exported_even_if_their_configuration_makes_no_model(tmp_path, capsys):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTRAL))
    folder = checkpoint(tmp_path, model)
    file = folder / "model_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["AutoModel"]}))
    export_intact(folder, tmp_path / "exported")
    assert load_file(tmp_path / "exported/model.safetensors").keys() == dict(model.named_parameters()).keys()
    assert "because transformers cannot build AutoModel: " in capsys.readouterr().err
