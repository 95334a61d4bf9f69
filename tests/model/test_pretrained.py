"""Starting weights from files: the ones that `from_pretrained` reads, or a refusal that says what is wrong."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, ViTConfig, ViTForImageClassification

import tasks
from jobs import run_job
from largebatch.config import load_config
from largebatch.errors import UserError
from largebatch.model.building import build_without_weights
from largebatch.model.pretrained import PretrainedWeights, find_folder
from paths import LLAMA
from starting import TINY_LLAMA, prepared

TIED = "--model.tie_embeddings=true"


def saved(folder, *words, **options):
    """A model with other weights than any seed's, saved by `transformers`."""
    model = tasks.build_model(LLAMA)(load_config(LLAMA, [*TINY_LLAMA, *words]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **options)
    return folder


def prepared_with_draws_that_cannot_be_repeated(run_dir, *words):
    LlamaForCausalLM._init_weights = lambda _, module: [torch.nn.init.trunc_normal_(p) for p in module.parameters()]
    return prepared(run_dir, *words)


@pytest.mark.slow
def test_what_an_earlier_run_has_left(tmp_path):
    """Another run goes on from it, in half precision and without a configuration; how its model would be initialized
    does not matter."""
    folder = saved(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "config.json").unlink()
    save_file({name: tensor.half() for name, tensor in weights.items()}, folder / "model.safetensors")
    words = f"--model.initial_weights={folder}"
    (found,) = run_job(prepared_with_draws_that_cannot_be_repeated, tmp_path / "run", words, strategy="single")
    for name, tensor in weights.items():
        np.testing.assert_array_equal(found[name], tensor.half().float().numpy())


def test_weights_that_are_stored_by_other_names(tmp_path):
    """As those of a ViT, in the files of `save_pretrained` and on the hub."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    in_layers = [name for name, _ in model.named_parameters() if "layers" in name]
    assert not tensors.keys() & {*in_layers}
    weights = PretrainedWeights(tmp_path, model)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read(name, 0, parameter.numel()), parameter.flatten())
    save_file(tensors | {in_layers[0]: torch.ones(8)}, file)
    with pytest.raises(UserError, match=rf"it has both \S+ and \S+, which are {in_layers[0]}"):
        PretrainedWeights(tmp_path, model)


# --- what is refused ----------------------------------------------------------------------------------------------


def read(folder, *words):
    """Check the folder against the recipe's model, and read all of it."""
    config = load_config(LLAMA, (*TINY_LLAMA, *words))
    model, _ = build_without_weights(lambda: tasks.build_model(LLAMA)(config))
    weights = PretrainedWeights(find_folder(str(folder)), model)
    return {name: weights.read(name, 0, parameter.numel()) for name, parameter in model.named_parameters()}


NORM = "model.layers.1.input_layernorm.weight"
# What is changed of the tensors or the configuration, what is told, and overrides of the recipe.
PLANTED = {
    "missing": (
        lambda tensors, _: tensors.pop(NORM),
        rf"weights of a different model:\n  - it has no {NORM}$",
    ),
    "shape": (
        lambda tensors, _: tensors.update({NORM: torch.ones(10, 2)}),
        rf"  - {NORM} is of shape \(10, 2\), but the model's is of shape \(20,\)$",
    ),
    "rotary base": (
        lambda _, config: config["rope_parameters"].update(rope_theta=10000.0),
        r"its config.json has rope_parameters .*10000.0.*, but this model has .*500000.0",
    ),
    "heads": (
        lambda _, config: config.update(num_attention_heads=10),
        "has num_attention_heads 10, but this model has 5",
    ),
    "heads that do not divide": (
        lambda _, config: config.update(num_attention_heads=3),
        r"model: its config\.json does not describe a model: .*hidden size",
    ),
    "both of tied": (
        lambda _, config: config.update(tie_word_embeddings=True),
        "it has both model.embed_tokens.weight and lm_head.weight, which are one",
        TIED,
    ),
    "not tied": (lambda *_: None, "tie_word_embeddings False, but this model has True", TIED),
}


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_folders_are_refused(name, tmp_path):
    plant, message, *words = PLANTED[name]
    folder = saved(tmp_path / "model")
    read(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = json.loads((folder / "config.json").read_text())
    plant(tensors, config)
    save_file(tensors, file)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"(?s)model\.initial_weights: .*" + message):
        read(folder, *words)


def lose(file, _):
    file.unlink()


def replace_by_link_to_zeros(file, _):
    file.unlink()
    file.symlink_to("/dev/zero")


def name_a_tensor_of_another_file(_, files):
    files[min(files)] = files[max(files)]


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lose, r"safetensors is missing"),
        (name_a_tensor_of_another_file, "cannot be read: it has no tensor lm_head.weight"),
        (lambda _, files: files.pop(NORM), f"it has no {NORM}"),
        (lambda _, files: files.update({NORM: "../model.safetensors"}), r"names '\.\./model\.safetensors'; write the"),
        (lambda _, files: files.update({NORM: "/dev/zero"}), r"names '/dev/zero'; write the name of a file in this"),
        (replace_by_link_to_zeros, r"safetensors cannot be read: .*Not a regular file"),
    ],
)
def test_wrong_indices_are_refused(plant, message, tmp_path):
    folder = saved(tmp_path / "model", max_shard_size="10KB")
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    read(folder)
    plant(folder / next(iter(files.values())), files)
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(UserError, match=rf"model\.initial_weights: .*(?s:.)*{message}"):
        read(folder)


def test_an_index_without_a_map_is_refused(tmp_path):
    folder = saved(tmp_path / "model", max_shard_size="10KB")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="has no weight_map"):
        read(folder)


def test_no_such_folder_and_no_such_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"there is no folder './none' \(relative to "):
        find_folder("./none")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"'nobody/nothing' could not be downloaded: .*; write a local folder, or the id"
    ):
        find_folder("nobody/nothing")


def test_a_model_in_the_hubs_cache(tmp_path, monkeypatch):
    """What `huggingface_hub` has downloaded before is found where it put it."""
    revision = "0" * 40
    model = tmp_path / "models--somebody--something"
    folder = saved(model / "snapshots" / revision)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_folder("somebody/something").samefile(folder)
