"""Folders of models: what `plan` reads of a configuration, and a start of weights and their index."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from transformers import LlamaConfig, LlamaForCausalLM

import tasks
from fuzzing.cases import Case
from fuzzing.mutations import damage
from largebatch.config import load_config
from largebatch.optim import build_optimizer
from largebatch.run import Run, RunOptions
from largebatch.run.command_line import user_errors
from largebatch.system.endings import OwnEnding

RECIPE = "recipes/sft/sft_addition.json"
MODEL = '--model={"architecture": "auto", "path": "model"}'


def start(words: Sequence[str]) -> None:
    """A run, until it has read its weights."""
    with user_errors(OwnEnding()):
        run = Run(load_config(Path(RECIPE), words), RunOptions(Path("new")))
        model = run.build(tasks.module("sft", "model").build_model)
        run.prepare(model, build_optimizer(model, run.plan))


def case(random: Random, folder: Path) -> Case:
    """A damaged folder of a model."""
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    size = random.choice(("10KB", "1GB"))
    LlamaForCausalLM(config).save_pretrained(folder / "model", max_shard_size=size)
    damage(random, folder / "model")
    if random.random() < 0.5:
        return Case([MODEL], folder, start)
    return Case(["plan", RECIPE, MODEL, "--world-sizes", "2", "--gpu-memory", "80"], folder)
