"""Initial weights from `safetensors` files of `save_pretrained`; each process reads only the ranges it holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from largebatch.errors import UserError, reason_of
from largebatch.local_folder import local_folder
from largebatch.storage.layout import CheckpointError, read_json
from largebatch.storage.tensors import TensorFiles

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# Fields of a model's configuration that do not change what it computes with the same weights, at least in training.
FREE = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "pretraining_tp",
    "transformers_version",
    "use_cache",
}
MAX_NAMES = 5


def find_folder(where: str) -> Path:
    """A local folder of weights, or the download of a hub id; UserError if there is neither."""
    folder = local_folder(where, "model.initial_weights", "a model")
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(where, allow_patterns=["model*.safetensors", INDEX, CONFIG]))
    # It raises exceptions of many kinds for files that cannot be reached, found or read.
    except Exception as error:
        raise UserError(
            f"model.initial_weights: {where!r} could not be downloaded: {reason_of(error)}; write a local folder, or "
            "the id of a model on the hub"
        ) from error


class PretrainedWeights:
    """The weights in a folder, one file or several with their index, for a model with parameters on the meta device.

    Raises:
        UserError: The weights are those of a different model.
    """

    def __init__(self, folder: Path, model: nn.Module):
        self.checksums: dict[str, str] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self._folder = folder
        self._files = TensorFiles(folder)
        try:
            stored = self._stored()
            problems = [*_config_problems(folder, model), *self._problems(stored, model)]
        except CheckpointError as error:
            raise UserError(f"model.initial_weights: {folder}: {error}") from error
        if problems:
            lines = "\n".join(f"  - {problem}" for problem in problems)
            raise UserError(f"model.initial_weights: {folder} has the weights of a different model:\n{lines}")

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a parameter, in row-major order."""
        file, stored_name = self._places[name]
        try:
            return self._files.read_range(file, stored_name, start, stop)
        except CheckpointError as error:
            raise UserError(f"model.initial_weights: {self._folder}: {error}") from error

    def _stored(self) -> dict[str, str]:
        """The file of each tensor."""
        if not (self._folder / INDEX).exists():
            if not (self._folder / WHOLE).exists():
                raise CheckpointError(f"it has neither {WHOLE} nor {INDEX}")
            return dict.fromkeys(self._files.names(WHOLE), WHOLE)
        index = read_json(self._folder / INDEX, follow_links=True)
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{INDEX} has no weight_map from names to files")
        return files

    def _problems(self, stored: dict[str, str], model: nn.Module) -> Iterator[str]:
        """Differences between the stored tensors and the model's; records where each of the model's is stored."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        missing = []
        for parameter, aliases in names.items():
            found = [name for name in aliases if name in stored]
            if not found:
                missing.append(aliases[0])
                continue
            if len(found) > 1:
                yield f"it has both {found[0]} and {found[1]}, which are one parameter in this model"
            file, shape = stored[found[0]], tuple(parameter.shape)
            self._places[aliases[0]] = (file, found[0])
            stored_tensor = self._files.find(file, found[0])
            if stored_tensor.shape != shape:
                yield f"{found[0]} is of shape {stored_tensor.shape}, but the model's is of shape {shape}"
            self.checksums[aliases[0]] = f"{file}, {(self._folder / file).stat().st_size} bytes, {stored_tensor}"
        known = {name for aliases in names.values() for name in aliases} | {name for name, _ in model.named_buffers()}
        for what, lacking in (("it has no", missing), ("the model has no", [n for n in stored if n not in known])):
            if lacking:
                more = f" and {len(lacking) - MAX_NAMES} more" if len(lacking) > MAX_NAMES else ""
                yield f"{what} {', '.join(lacking[:MAX_NAMES])}{more}"


def _config_problems(folder: Path, model: nn.Module) -> Iterator[str]:
    """Differences from the configuration next to the weights that shapes may not show: heads, rotary frequencies."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or not (folder / CONFIG).exists():
        return
    raw = read_json(folder / CONFIG, follow_links=True)
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind != config.model_type:
        yield f"its {CONFIG} is for a model of type {kind}, but this one is of type {config.model_type}"
        return
    try:
        theirs: dict[str, Any] = type(config).from_dict(raw).to_dict()
    # For values that it does not understand `transformers` raises exceptions of many kinds.
    except Exception as error:
        raise CheckpointError(f"its {CONFIG} does not describe a model: {reason_of(error)}") from error
    for name, mine in config.to_dict().items():
        if name not in FREE and not name.startswith("_") and theirs.get(name) != mine:
            yield f"its {CONFIG} has {name} {theirs.get(name)}, but this model has {mine}"
