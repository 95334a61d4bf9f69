"""The final weights and their configuration, as `from_pretrained` reads them."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


def save_weights(model: nn.Module, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write whole weights and buffers by name into `folder`, which is replaced when everything is written.

    A model that has `save_pretrained`, as those of `transformers` have, writes its configuration, too.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(temporary, state_dict=state)  # type: ignore[operator]
    else:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary / "model.safetensors")
    umask = os.umask(0)
    os.umask(umask)
    for file in temporary.iterdir():
        # safetensors creates files that only their owner can read.
        file.chmod(0o666 & ~umask)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def model_config(model: nn.Module) -> str | None:
    """The configuration of a `transformers` model, or of its adapters, as the JSON that `save_pretrained` writes."""
    if getattr(model, "peft_config", None):
        (adapters,) = model.peft_config.values()  # type: ignore[operator]
        with tempfile.TemporaryDirectory() as folder:
            adapters.save_pretrained(folder)
            return Path(folder, "adapter_config.json").read_text(encoding="utf-8")
    # Importing it takes seconds; a recipe that has a model of `transformers` has imported it.
    transformers = sys.modules.get("transformers")
    config = getattr(model, "config", None)
    if transformers is None or not isinstance(config, transformers.PretrainedConfig):
        return None
    return json.dumps(json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}, indent=2)
