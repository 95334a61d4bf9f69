"""Initial weights from `safetensors` files of `save_pretrained`; each process reads only the ranges it holds."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from largebatch.errors import UserError, reason_of
from largebatch.model.building import SeededWeights
from largebatch.model.parts import is_adapter, without_adapter
from largebatch.model.transformers_internals import loaded_names, without_ignored
from largebatch.storage.layout import (
    COPIED_FILES,
    MORE_CHAT_TEMPLATES,
    TOKENIZER_FILES,
    CheckpointError,
    read_json,
    reading,
)
from largebatch.storage.tensors import TensorFiles
from largebatch.system.regular_file import open_to_read
from largebatch.system.repositories import find
from largebatch.words import bulleted, some

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# Fields of a model's configuration that do not change what it computes with the same weights, at least in training.
IGNORED_CONFIG_FIELDS = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "pretraining_tp",
    "scalar_parameters",
    "transformers_version",
    "use_cache",
}


def find_folder(where: str, field: str = "model.initial_weights") -> Path:
    """A local folder of weights or a tokenizer, or the download of a hub id.

    Raises:
        UserError: There is neither; it names the field.
    """
    place = find(where, field)
    if place.folder is not None:
        return place.folder
    from huggingface_hub import snapshot_download

    try:
        wanted = ["model*.safetensors", INDEX, CONFIG, *COPIED_FILES]
        if field == "data.tokenizer":
            wanted = [*TOKENIZER_FILES, f"{MORE_CHAT_TEMPLATES}/*.jinja"]
        return Path(snapshot_download(place.name, revision=place.revision, allow_patterns=wanted))
    # It raises exceptions of many kinds for files that cannot be reached, found or read.
    except Exception as error:
        raise UserError(
            f"{field}: {where!r} could not be downloaded: {reason_of(error)}; write a local folder, or "
            "the id of a model on the hub"
        ) from error


def load_whole(path: str, config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model at `model.path`, as `from_pretrained` loads it, in torch's default dtype.

    Raises:
        UserError: The weights are not in regular files of a folder, or are those of a different model.
        Exception: Of any kind, from `transformers`: they cannot be loaded.
    """
    folder = find_folder(path, "model.path")
    try:
        for file in set((_weight_map(folder) or {"": WHOLE}).values()):
            with reading(file), open_to_read(folder / file, follow_links=True), safe_open(folder / file, "pt"):
                # It has checked the header, and `from_pretrained` would not name the file.
                pass
    except CheckpointError as error:
        raise UserError(f"model.path: {folder}: {error}") from error
    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.get_default_dtype(),
        output_loading_info=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    # `transformers` has given random values to what is missing, and left out what is unknown.
    problems = [*_differences(info["missing_keys"], without_ignored(loaded, info["unexpected_keys"]))]
    # Two matrices that differ stay two, but the exported configuration would make them one again.
    for one, other in loaded.get_expanded_tied_weights_keys(all_submodels=True).items():
        if loaded.get_parameter(one) is not loaded.get_parameter(other):
            problems.append(f"{one} and {other} differ, but are one parameter by tie_word_embeddings")
    if problems:
        raise UserError(
            f"model.path: {folder} does not have exactly the weights of the {type(loaded).__name__} in its {CONFIG}:"
            f"{bulleted(problems)}\nCorrect {CONFIG}, or write the folder or hub id of a whole causal language model"
        )
    return loaded


class PretrainedWeights:
    """The weights in a folder, one file or several with their index, for a model with parameters on the meta device.

    Args:
        folder: The folder, named by `model.initial_weights`, or by `model.path` if there are `adapters`.
        model: The model; with `adapters`, one of `transformers` that was built from the configuration in the folder.
        adapters: What the model has besides the stored weights. The stored names are then understood as
            `from_pretrained` does, and what needs more than reading is refused.

    Raises:
        UserError: The weights are those of a different model, or `from_pretrained` would not just read them.
    """

    def __init__(self, folder: Path, model: nn.Module, adapters: SeededWeights | None = None):
        self.checksums: dict[str, str] = {} if adapters is None else adapters.checksums
        self.buffers: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self._folder = folder
        self._adapters = adapters
        self._field = "model.initial_weights" if adapters is None else "model.path"
        self._files = TensorFiles(folder)
        try:
            files = _weight_map(folder) or dict.fromkeys(self._files.names(WHOLE), WHOLE)
            of_kind = _config_problems(folder, model) if adapters is None else _loading_problems(model)
            problems = [*of_kind, *self._problems(files, model)]
        except CheckpointError as error:
            raise UserError(f"{self._field}: {folder}: {error}") from error
        if problems:
            what = "the weights of a different model" if adapters is None else "tensors that cannot be read in parts"
            raise UserError(f"{self._field}: {folder} has {what}:{bulleted(problems)}")

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a parameter, in row-major order."""
        if self._adapters is not None and is_adapter(name):
            return self._adapters.read(name, start, stop)
        file, stored_name = self._places[without_adapter(name)]
        try:
            return self._files.read_range(file, stored_name, start, stop)
        except CheckpointError as error:
            raise UserError(f"{self._field}: {self._folder}: {error}") from error

    def _problems(self, files: dict[str, str], model: nn.Module) -> Iterator[str]:
        """Differences between the stored tensors and the model's; records where each of the model's is stored."""
        stored: dict[str, tuple[str, str]] = {}
        for stored_name, name in loaded_names(model, files).items():
            if name is None:
                yield f"transformers merges or splits {stored_name} when it loads it"
                return
            if name in stored:
                yield f"it has both {stored[name][1]} and {stored_name}, which are {name} in this model"
            stored[name] = (files[stored_name], stored_name)
        names: dict[nn.Parameter, list[str]] = {}
        # The files of a base model lack the prefix that it has inside a causal language model.
        prefix = "" if self._adapters is None else f"{getattr(model, 'base_model_prefix', '')}."
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if self._adapters is None or not is_adapter(name):
                plain = without_adapter(name)
                names.setdefault(parameter, []).extend(dict.fromkeys([plain, plain.removeprefix(prefix)]))
        missing = []
        for parameter, aliases in names.items():
            found = [name for name in aliases if name in stored]
            if not found:
                missing.append(aliases[0])
                continue
            if len(found) > 1:
                yield f"it has both {found[0]} and {found[1]}, which are one parameter in this model"
            file, stored_name = stored[found[0]]
            shape = tuple(parameter.shape)
            self._places[aliases[0]] = (file, stored_name)
            stored_tensor = self._files.find(file, stored_name)
            is_single_number = shape == (1,) and stored_tensor.shape == ()
            if stored_tensor.shape != shape and not is_single_number:
                yield f"{stored_name} is of shape {stored_tensor.shape}, but the model's is of shape {shape}"
            self.checksums[aliases[0]] = f"{file}, {(self._folder / file).stat().st_size} bytes, {stored_tensor}"
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name not in saved:
                continue
            if name not in stored:
                missing.append(name)
                continue
            value = self._files.read(*stored[name])
            if value.shape != buffer.shape:
                yield f"{name} is of shape {tuple(value.shape)}, but the model's is of shape {tuple(buffer.shape)}"
            self.buffers[name] = value
        known = {name for aliases in names.values() for name in aliases} | {name for name, _ in model.named_buffers()}
        unknown = [name for name in stored if name not in known]
        if self._adapters is not None:
            unknown = without_ignored(model, unknown)
        yield from _differences(missing, unknown)


def _differences(missing: Iterable[str], unknown: Iterable[str]) -> Iterator[str]:
    for what, names in (("it has no", missing), ("the model has no", unknown)):
        if names:
            yield f"{what} {some(sorted(names))}"


def _weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor in a folder; None if all are in one."""
    if not (folder / INDEX).exists():
        if not (folder / WHOLE).exists():
            raise CheckpointError(
                f"it has neither {WHOLE} nor {INDEX}, and other files may hold code; convert weights that you trust: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        return None
    files = read_json(folder / INDEX, follow_links=True).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{INDEX} has no weight_map from names to files")
    if paths := [file for file in files.values() if Path(file).name != file]:
        raise CheckpointError(f"{INDEX} names {paths[0]!r}; write the name of a file in this folder, without a path")
    return files


def _loading_problems(model: nn.Module) -> Iterator[str]:
    """What `from_pretrained` does besides reading the model's parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if buffers := [name for name in model.state_dict() if name not in parameters]:
        yield f"the buffer {buffers[0]} is part of the weights"


def _config_problems(folder: Path, model: nn.Module) -> Iterator[str]:
    """Differences from the configuration next to the weights that shapes may not show: heads, rotary frequencies."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or not (folder / CONFIG).exists():
        return
    raw = read_json(folder / CONFIG, follow_links=True)
    if (kind := raw.get("model_type")) != config.model_type:
        yield f"its {CONFIG} is for a model of type {kind}, but this one is of type {config.model_type}"
        return
    try:
        theirs: dict[str, Any] = type(config).from_dict(raw).to_dict()
    # For values that it does not understand `transformers` raises exceptions of many kinds.
    except Exception as error:
        raise CheckpointError(f"its {CONFIG} does not describe a model: {reason_of(error)}") from error
    stored = dict(_fields(theirs))
    for name, mine in _fields(config.to_dict()):
        if stored.get(name) != mine:
            yield f"its {CONFIG} has {name} {stored.get(name)}, but this model has {mine}"


def _fields(config: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a configuration that matter, those of its parts with the part's name."""
    for name, value in config.items():
        if name in IGNORED_CONFIG_FIELDS or name.startswith("_"):
            continue
        if name.endswith("_config") and isinstance(value, dict):
            yield from _fields(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value
