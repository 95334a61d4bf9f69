"""Evaluation of saved weights with `transformers` and plain torch alone."""

import json
from pathlib import Path

import numpy as np

import tasks
from largebatch.config import load_config
from paths import DIGITS, PYDOC


def evaluate_saved(run_dir: Path) -> dict[str, float]:
    """Load the weights of a run by `from_pretrained` and evaluate them on the whole evaluation set at once."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    raw = json.loads((run_dir / "config.json").read_text())
    is_text = "block_size" in raw["data"]
    recipe = PYDOC if is_text else DIGITS
    config = load_config(recipe, ["--data", json.dumps(raw["data"])])
    _, eval_set = tasks.sources(recipe.parent.name)(config)
    batch = eval_set.fetch(np.arange(len(eval_set)), None)
    kind = AutoModelForCausalLM if is_text else AutoModelForImageClassification
    model = kind.from_pretrained(run_dir / "model").eval()
    inputs = batch["input_ids"] if is_text else (batch["pixel_values"] / 255 - 0.3053) / 0.3762
    with torch.no_grad():
        logits = model(inputs).logits
    found = {"loss": cross_entropy(logits.flatten(0, -2), batch["labels"].flatten()).item()}
    if not is_text:
        found["accuracy"] = (logits.argmax(-1) == batch["labels"]).float().mean().item()
    return found
