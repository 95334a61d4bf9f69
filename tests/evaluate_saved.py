"""Evaluation of saved weights with `transformers` and plain torch alone."""

import json
from pathlib import Path

import numpy as np


def evaluate_saved(run_dir: Path) -> dict[str, float]:
    """Load the weights of a run by `from_pretrained` and evaluate them on the whole evaluation set at once."""
    config = json.loads((run_dir / "config.json").read_text())
    return _digits(run_dir / "model") if "num_layers" not in config["model"] else _pydoc(run_dir / "model", config)


def _digits(model_dir: Path) -> dict[str, float]:
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForImageClassification

    data = load_digits()
    pixels = np.round(data.images * 255 / 16)[::5].repeat(4, axis=1).repeat(4, axis=2)
    model = AutoModelForImageClassification.from_pretrained(model_dir).eval()
    with torch.no_grad():
        values = torch.from_numpy((pixels - 0.3053 * 255) / (0.3762 * 255)).float().unsqueeze(1)
        logits = model(pixel_values=values).logits
    labels = torch.from_numpy(data.target[::5]).long()
    accuracy = (logits.argmax(-1) == labels).float().mean().item()
    return {"loss": cross_entropy(logits, labels).item(), "accuracy": accuracy}


def _pydoc(model_dir: Path, config: dict) -> dict[str, float]:
    from pydoc_data.topics import topics

    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    size = config["data"]["block_size"]
    first = config["data"]["num_train_samples"] * size
    stop = first + config["data"]["num_eval_samples"] * size
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    with torch.no_grad():
        logits = model(input_ids=text[first:stop].view(-1, size)).logits
    return {"loss": cross_entropy(logits.flatten(0, 1), text[first + 1 : stop + 1]).item()}
