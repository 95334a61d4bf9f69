"""The configuration and tokenizer files that go with a model's weights, as `from_pretrained` reads them."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from largebatch.errors import file_errors
from largebatch.storage.layout import BASE_CONFIG, COPIED_FILES, GENERATION_CONFIG, MODEL_CONFIG, read_json
from largebatch.system.regular_file import read_bytes


def model_files(model: nn.Module, pretrained: Path | None) -> dict[str, bytes]:
    """A checkpoint's `MODEL_FILES`, by name: those of a `transformers` model, and of its adapters.

    Call it before the strategy changes the model's class.

    Args:
        model: The model.
        pretrained: The folder that it was loaded from, whose tokenizer and generation config it keeps; None if none.
    """
    copied = [pretrained / name for name in COPIED_FILES if (pretrained / name).exists()] if pretrained else []
    with file_errors(f"model.path: a file of {pretrained} cannot be read", "correct or remove it"):
        source = read_json(pretrained / "config.json", follow_links=True) if pretrained else {}
        use_cache = source.get("text_config", source).get("use_cache", True)
        files = {name: text.encode() for name, text in _configurations(model, use_cache).items()}
        return files | {path.name: read_bytes(path, follow_links=True) for path in copied}


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
