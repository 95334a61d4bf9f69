"""The final weights, in the layout that `from_pretrained` reads, and the configuration that belongs to them."""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import nn


@runtime_checkable
class SavesPretrained(Protocol):
    """A model of `transformers`, or one that saves itself as they do."""

    def save_pretrained(self, save_directory: Path, state_dict: dict[str, torch.Tensor]) -> None: ...


def save_weights(model: nn.Module, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the state, whole weights and buffers by name, into `folder`, which is replaced when all is written.

    A model of `transformers` is saved with its config.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if isinstance(model, SavesPretrained):
        model.save_pretrained(temporary, state_dict=state)
    else:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, temporary / "model.safetensors")
    umask = os.umask(0)
    os.umask(umask)
    for file in temporary.iterdir():
        # safetensors makes files that only their owner can read.
        file.chmod(0o666 & ~umask)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def model_config(model: nn.Module) -> str | None:
    """The configuration of a model of `transformers`, or of its adapters, as JSON, as `save_pretrained` writes it."""
    if getattr(model, "peft_config", None):
        (adapters,) = model.peft_config.values()  # type: ignore[operator]
        with tempfile.TemporaryDirectory() as folder:
            adapters.save_pretrained(folder)
            return Path(folder, "adapter_config.json").read_text(encoding="utf-8")
    # Whoever has a model of `transformers` has imported it; for others it would take seconds.
    transformers = sys.modules.get("transformers")
    config = getattr(model, "config", None)
    if transformers is None or not isinstance(config, transformers.PretrainedConfig):
        return None
    return json.dumps(json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}, indent=2)
