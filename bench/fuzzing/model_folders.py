"""Folders of models: what `plan` reads of a configuration, and a start of weights and their index."""

import json
import shutil
from pathlib import Path
from random import Random

from fuzzing.cases import Case, Sound
from fuzzing.mutations import damage

CONFIG = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "id2label": {"0": "x"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def case(random: Random, sound: Sound, folder: Path) -> Case:
    """A damaged folder of a model."""
    shutil.copytree(sound.project / "recipes", folder / "recipes")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    damage(random, model)
    words = [
        "plan",
        "recipes/sft/sft_addition.json",
        '--model={"architecture": "auto", "path": "model"}',
        "--world-sizes",
        "2",
        "--gpu-memory",
        "80",
    ]
    return Case(words, folder)
