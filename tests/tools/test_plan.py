"""`largebatch plan --world-sizes`: what is printed and refused."""

import json
import shutil

import pytest

import tasks
from jobs import write_zero_config
from paths import ACCELERATE_CONFIGS, DIGITS, ROOT

# A recipe of somebody's own, with a model of plain torch that looks at numbers, and prints, while it is built.
OWN_MODEL = """
from __future__ import annotations

import dataclasses

import torch
from torch import nn

from .widths import WIDTH

print("it is imported")


@dataclasses.dataclass
class Widths:
    first: int = WIDTH


def build_model(config):
    print("it is built")
    width = Widths().first
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 2)]
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Dropout(rate)) for rate in rates])
"""


TWO = ("--world-sizes", "2", "--gpu-memory", "80")


@pytest.fixture(autouse=True)
def _at_the_top(monkeypatch):
    monkeypatch.chdir(ROOT)


def recipe_with_model(folder, text):
    recipe = tasks.copy("image_classification", folder) / DIGITS.name
    recipe.with_name("model.py").write_text(text)
    return recipe


def test_json_has_every_number(run_command):
    code, output, errors = run_command("plan", DIGITS, "--world-sizes", "2,3", "--gpu-memory", "16", "--json")
    assert (code, errors) == (0, "")
    data = json.loads(output)
    assert data["gpu_memory_bytes"] == 16 * 2**30
    two, three = data["world_sizes"]
    assert "nearest" in three["problem"]
    assert "hsdp" not in two["strategies"]  # it takes a node
    assert two["suggested"] == "ddp"
    # SGD with momentum: weights, gradients and momentum of 78,394 parameters.
    ddp = two["strategies"]["ddp"]["model_state_bytes"]
    assert [ddp[kind] for kind in ("weights", "gradients", "optimizer", "masters")] == [4 * 78_394] * 3 + [0]
    # Both send half of 2 Ψ.
    assert two["strategies"]["ddp"]["sent_bytes_per_step"] == 4 * 78_394


def test_a_model_of_ones_own_and_what_it_prints(run_command, tmp_path):
    recipe = recipe_with_model(tmp_path, OWN_MODEL)
    recipe.with_name("widths.py").write_text("WIDTH = 10\n")
    _, output, errors = run_command("plan", recipe, *TWO, "--json")
    assert errors.startswith("it is imported\nit is built\n")
    data = json.loads(output)
    assert data["parameters"] == 2 * (10 * 10 + 10)
    assert data["estimated_activation_bytes"] is None


def test_activations_of_images_in_fp64(output_of):
    single, double = (
        json.loads(output_of("plan", DIGITS, *TWO, "--json", "--precision", precision))["estimated_activation_bytes"]
        for precision in ("fp32", "fp64")
    )
    # Places of pooling are whole numbers in both.
    assert 1.8 * single < double <= 2 * single


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit", "FILE:1: SystemExit; move what only a run does below if __name__"),
        (
            "def build_model(config): return None",
            "FILE: build_model(config) returned NoneType; return a torch.nn.Module",
        ),
        ("build_modle = 1", "FILE: AttributeError: module "),
        ("\ndef build_model(config): return config.nothing", "FILE:2: AttributeError: 'Config' object has no "),
        ("import torch\ndef build_model(config): return torch.nn.ReLU()", "ReLU has no trainable parameter; "),
    ],
)
def test_a_file_without_a_model_that_can_be_counted(refusal_of, tmp_path, text, message):
    recipe = recipe_with_model(tmp_path, text)
    assert message.replace("FILE", str(recipe.with_name("model.py"))) in refusal_of("plan", recipe, *TWO)


def test_a_task_without_model_py(refusal_of, tmp_path):
    recipe = recipe_with_model(tmp_path, "")
    recipe.with_name("model.py").unlink()
    said = f"{recipe.with_name('model.py')}: ModuleNotFoundError: No module named "
    assert said in refusal_of("plan", recipe, *TWO)


def test_a_folder_without_strategies_is_refused(refusal_of, tmp_path):
    recipe = tasks.copy("image_classification", tmp_path) / DIGITS.name
    (tmp_path / "accelerate_configs").mkdir()
    said = f"there is no {tmp_path}/accelerate_configs/ddp.yaml; known: none"
    assert said in refusal_of("plan", recipe, *TWO)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # A batch that divides over none is one message.
        ("--world-sizes 3,5 --gpu-memory 80", "--world-sizes 5: batch: global_batch_size 64 is not a multiple"),
        ("--world-size 2 --gpu-memory 80", "require --world-sizes"),
        ("--world-sizes 2 --world-size 2", "not allowed with argument"),
        ("--world-sizes 2", "--world-sizes requires --gpu-memory"),
        ("--world-sizes 2 --gpu h1000 --network 400G/gpu", "invalid choice: 'h1000'"),
        ("", "one of the arguments --world-size --world-sizes is required"),
    ],
)
def test_refused(refusal_of, words, message):
    assert message in refusal_of("plan", DIGITS, *words.split())


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer"),
        ({"reduce_bucket_size": "auto"}, 'reduce_bucket_size "auto"'),
    ],
)
def test_a_strategy_whose_states_are_not_known_is_left_out(output_of, tmp_path, setting, shown):
    recipe = tasks.copy("image_classification", tmp_path) / DIGITS.name
    configs = tmp_path / "accelerate_configs"
    configs.mkdir()
    shutil.copy(ACCELERATE_CONFIGS["ddp"], configs)
    write_zero_config(configs, 2, setting)
    output = output_of("plan", recipe, *TWO)
    assert f"zero2 is not counted: its DeepSpeed JSON has zero_optimization.{shown}" in output
    assert "  ddp" in output
