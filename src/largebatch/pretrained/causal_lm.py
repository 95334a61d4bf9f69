"""Causal language models through `transformers`' Auto classes, with pretrained weights or random ones."""

import importlib.util

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from largebatch.config.sft import AutoCausalLM, Lora
from largebatch.errors import UserError


def configuration(model: AutoCausalLM) -> PretrainedConfig:
    """The model's own configuration, with all its dropout turned off.

    Raises:
        UserError: There is none at `model.path`, or `model.config` is none.
    """
    try:
        if model.config is not None:
            config = AutoConfig.for_model(**model.config)
        else:
            config = AutoConfig.from_pretrained(model.path)
    # `transformers` raises a great variety of exceptions for configurations that cannot be reached or understood.
    except Exception as error:
        raise _unusable(model, error) from error
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        # "attention_dropout", "resid_pdrop", "layerdrop": every architecture has names of its own.
        if "drop" in name and isinstance(value, float) and value > 0:
            setattr(text, name, 0.0)
    text.use_cache = False
    return config


def load_causal_lm(model: AutoCausalLM) -> PreTrainedModel:
    """The model that a recipe starts from, with adapters where the recipe has them.

    Its weights are of torch's default dtype, which `Run` sets, in however few bits they are stored. On torch's "meta"
    device it has its shapes only, and no weights are read.

    Raises:
        UserError: It cannot be loaded, or `peft` is missing.
    """
    config = configuration(model)
    dtype, is_meta = torch.get_default_dtype(), torch.get_default_device().type == "meta"
    try:
        if model.path is None or is_meta:
            loaded = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model.path, config=config, dtype=dtype)
    except Exception as error:
        raise _unusable(model, error) from error
    if model.lora is not None:
        _add_adapters(loaded, model.lora)
    return loaded


def _add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze the weights and give the named layers adapters, which change nothing before they are trained."""
    if importlib.util.find_spec("peft") is None:
        raise UserError('model.lora: peft is not installed; pip install "largebatch[lora]", or write null')
    from peft import LoraConfig

    adapters = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        model.add_adapter(adapters)
    except ValueError as error:
        raise UserError(
            f"model.lora.target_modules: {error}; write names of the model's linear layers, or all-linear"
        ) from error


def _unusable(model: AutoCausalLM, error: Exception) -> UserError:
    reason = str(error).strip().partition("\n")[0]
    if model.path is None:
        return UserError(f"model.config: transformers cannot build it: {reason} ({type(error).__name__}); correct it")
    return UserError(
        f"model.path: {model.path!r} could not be loaded: {reason} ({type(error).__name__}); write the local folder or "
        "the hub id of a causal language model"
    )
