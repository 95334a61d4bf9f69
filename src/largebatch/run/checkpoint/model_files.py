"""The configuration and tokenizer files that go with a model's weights, as `from_pretrained` reads them."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from largebatch.errors import UserError, file_errors
from largebatch.storage.layout import (
    BASE_CONFIG,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    MODEL_CONFIG,
    MORE_CHAT_TEMPLATES,
    PROCESSOR_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    read_json,
)
from largebatch.system.presence import exists
from largebatch.system.regular_file import read_bytes


def model_files(model: nn.Module, pretrained: Path | None, tokenizer: Path | None = None) -> dict[str, bytes]:
    """A checkpoint's `MODEL_FILES`, by name: those of a `transformers` model, and of its adapters.

    Call it before the strategy changes the model's class.

    Args:
        model: The model.
        pretrained: The folder that it was loaded from, whose generation config and processor it keeps; None if none.
        tokenizer: The folder of the tokenizer that it keeps; None if none.
    """
    files_to_copy = []
    if pretrained:
        files_to_copy += [pretrained / name for name in (GENERATION_CONFIG, *PROCESSOR_FILES)]
    if tokenizer:
        files_to_copy += [tokenizer / name for name in TOKENIZER_FILES]
    copied = [file for file in files_to_copy if exists(file)]
    with file_errors("model.path, data.tokenizer: a file cannot be read", "correct or remove it"):
        source = read_json(pretrained / "config.json", follow_links=True) if pretrained else {}
        use_cache = source.get("text_config", source).get("use_cache", True)
        files = {name: text.encode() for name, text in _configurations(model, use_cache).items()}
        files |= {path.name: read_bytes(path, follow_links=True) for path in copied}
        if tokenizer:
            _join_chat_templates(tokenizer, files)
        return files


def _join_chat_templates(tokenizer: Path, files: dict[str, bytes]) -> None:
    """Put all chat templates into the tokenizer's configuration if it has some besides the default, as for tools.

    `from_pretrained` reads them there, too, unless there is a file with the default alone.
    """
    more = sorted((tokenizer / MORE_CHAT_TEMPLATES).glob("*.jinja"))
    if not more:
        return
    templates = {file.stem: read_bytes(file, follow_links=True) for file in more}
    if CHAT_TEMPLATE in files:
        templates["default"] = files.pop(CHAT_TEMPLATE)
    config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    config["chat_template"] = [{"name": name, "template": text.decode()} for name, text in templates.items()]
    files[TOKENIZER_CONFIG] = json.dumps(config, indent=2).encode()


def end_generation_at(tokens: Sequence[int], files: dict[str, bytes]) -> list[int]:
    """Let generation end at these tokens, too, if there is a generation config; return those that are new to it."""
    if GENERATION_CONFIG not in files:
        return []
    try:
        generation = json.loads(files[GENERATION_CONFIG])
        ends = generation.get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UserError(f"model.path: {GENERATION_CONFIG} cannot be read: {error}; correct or remove it") from error
    if ends is None:
        ends = []
    known = ends if isinstance(ends, list) else [ends]
    added = [token for token in tokens if token not in known]
    if added:
        # Otherwise, `transformers` 4 may take the ends of config.json instead.
        generation.pop("_from_model_config", None)
        generation["eos_token_id"] = [*known, *added]
        files[GENERATION_CONFIG] = json.dumps(generation, indent=2).encode()
    return added


def _configurations(model: nn.Module, use_cache: bool) -> dict[str, str]:
    about: dict[str, Any] = {}
    # Importing it takes seconds; a recipe that has a model of `transformers` has imported it.
    transformers = sys.modules.get("transformers")
    config = getattr(model, "config", None)
    if transformers is not None and isinstance(config, transformers.PretrainedConfig):
        about[MODEL_CONFIG] = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
        if isinstance(model, transformers.PreTrainedModel) and model.can_generate():
            about[GENERATION_CONFIG] = json.loads(model.generation_config.to_json_string())
        # Training keeps no keys and values of earlier tokens; whoever generates with the model may.
        for part in (*about.values(), about[MODEL_CONFIG].get("text_config")):
            if isinstance(part, dict) and "use_cache" in part:
                part["use_cache"] = use_cache
    if getattr(model, "peft_config", None):
        (adapters,) = model.peft_config.values()  # type: ignore[operator]
        if MODEL_CONFIG in about:
            about[BASE_CONFIG] = about.pop(MODEL_CONFIG)
        with tempfile.TemporaryDirectory() as folder:
            adapters.save_pretrained(folder)
            about[MODEL_CONFIG] = read_json(Path(folder, "adapter_config.json"))
    return {name: json.dumps(values, indent=2) for name, values in about.items()}
