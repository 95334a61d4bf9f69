"""The configuration and tokenizer files that go with a model's weights, as `from_pretrained` reads them."""

import json
import sys
import tempfile
from pathlib import Path

from torch import nn

from largebatch.errors import file_errors
from largebatch.storage.layout import COPIED_FILES, GENERATION_CONFIG, MODEL_CONFIG
from largebatch.system.regular_file import read_bytes


def model_files(model: nn.Module, pretrained: Path | None) -> dict[str, bytes]:
    """A checkpoint's `MODEL_FILES`, by name: those of a `transformers` model, or of its adapters.

    Call it before the strategy changes the model's class.

    Args:
        model: The model.
        pretrained: The folder that it was loaded from, whose tokenizer and generation config it keeps; None if none.
    """
    files = {name: text.encode() for name, text in _configurations(model).items()}
    copied = [pretrained / name for name in COPIED_FILES if (pretrained / name).exists()] if pretrained else []
    with file_errors(f"model.path: a file of {pretrained} cannot be read", "correct or remove it"):
        return files | {path.name: read_bytes(path, follow_links=True) for path in copied}


def _configurations(model: nn.Module) -> dict[str, str]:
    if getattr(model, "peft_config", None):
        (adapters,) = model.peft_config.values()  # type: ignore[operator]
        with tempfile.TemporaryDirectory() as folder:
            adapters.save_pretrained(folder)
            return {MODEL_CONFIG: Path(folder, "adapter_config.json").read_text(encoding="utf-8")}
    # Importing it takes seconds; a recipe that has a model of `transformers` has imported it.
    transformers = sys.modules.get("transformers")
    config = getattr(model, "config", None)
    if transformers is None or not isinstance(config, transformers.PretrainedConfig):
        return {}
    about = {MODEL_CONFIG: json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}}
    if isinstance(model, transformers.PreTrainedModel) and model.can_generate():
        about[GENERATION_CONFIG] = json.loads(model.generation_config.to_json_string())
    # Training keeps no keys and values of earlier tokens; whoever generates with the model should.
    for part in (*about.values(), about[MODEL_CONFIG].get("text_config")):
        if isinstance(part, dict) and "use_cache" in part:
            part["use_cache"] = True
    return {name: json.dumps(values, indent=2) for name, values in about.items()}
