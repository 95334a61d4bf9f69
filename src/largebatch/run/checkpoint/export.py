"""The weights of a checkpoint as `transformers.from_pretrained` or `peft` reads them, one parameter at a time."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from largebatch.config.optimizers import EMA
from largebatch.errors import UserError, file_errors, reason_of
from largebatch.model.building import build_without_weights
from largebatch.model.parts import is_adapter
from largebatch.storage.catalog import entry_at, verify_checksums
from largebatch.storage.files import remove_folder, rename_folder, sync_folder, write_file, write_json_file
from largebatch.storage.layout import (
    BASE_CONFIG,
    BUFFER,
    COPIED_FILES,
    MODEL_CONFIG,
    WEIGHT,
    CheckpointError,
    Manifest,
    rank_file,
    read_json,
    read_manifest,
)
from largebatch.storage.run_folder import RunFolder
from largebatch.storage.tensors import Shapes, TensorFiles, common_buffer, save_tensors, whole_weight
from largebatch.system.presence import exists
from largebatch.system.regular_file import read_bytes

Store = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Maps one of a model's tensors, by its name, to those that it is stored as."""

# Larger models are cut into several files, as `save_pretrained` does.
MAX_FILE_BYTES = 5 * 10**9


def export(checkpoint: Path, out: Path, dtype: str | None = None, ema: bool = False, merge: bool = False) -> Manifest:
    """Write the weights and buffers of a checkpoint, and the model's configuration and tokenizer if it has them.

    For a model with adapters, only the adapters and their configuration are written, as `peft` reads them, unless they
    are to be merged into the weights. At most one parameter at a time is in memory, or all of them to merge. The folder
    appears when it is complete.

    Args:
        checkpoint: A checkpoint's folder, or a run's, whose latest intact checkpoint is used.
        out: The folder to create.
        dtype: The name of torch's dtype of floating-point numbers; None keeps the one they were trained in.
        ema: Whether to write the moving averages of the weights, with the BatchNorm statistics that go with them.
        merge: Whether to write a model without adapters, which are merged into its weights.
    """
    if exists(out):
        raise UserError(f"{out} already exists; name a new folder")
    with file_errors(f"{checkpoint} cannot be exported to {out}", "name another folder"):
        return export_intact(_intact(checkpoint), out, dtype, ema=ema, merge=merge)


def export_intact(
    folder: Path,
    out: Path,
    dtype: str | None = None,
    progress: Callable[[], None] = lambda: None,
    ema: bool = False,
    merge: bool = False,
) -> Manifest:
    """As `export`, from the folder of a checkpoint whose checksums need not be verified; an older `out` is replaced.

    `progress` is called before each parameter.
    """
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        manifest = read_manifest(folder)
        sources = _sources(manifest, ema)
        # What an export left behind that was killed.
        remove_folder(temporary)
        temporary.mkdir(parents=True)
        config = read_json(folder / MODEL_CONFIG) if exists(folder / MODEL_CONFIG) else {}
        with TensorFiles(folder) as files:
            shapes = dict(_shapes(files, manifest, sources, getattr(torch, dtype) if dtype else None))
            # Sharded strategies need a dimension to divide; a model says what is a number to whoever loads it.
            for name in config.get("scalar_parameters", ()):
                shapes[name] = (shapes[name][0], ())

            def read(name: str) -> torch.Tensor:
                progress()
                read_whole = whole_weight if name in manifest.parameters else common_buffer
                return read_whole(files, sources[name], manifest)

            if merge:
                if not exists(folder / BASE_CONFIG):
                    raise CheckpointError("it has no adapters of a model of transformers; leave out --merge")
                _save_merged(read_json(folder / BASE_CONFIG), config, shapes, read, temporary)
            elif "peft_type" in config:
                adapters = {name: shape for name, shape in shapes.items() if is_adapter(name)}
                _save(
                    adapters, read, _as_peft_stores, lambda stored: {"adapter_model.safetensors": [*stored]}, temporary
                )
                write_json_file(temporary / "adapter_config.json", config)
            else:
                store: Store = dict
                if config:
                    # Imported only here, because it takes seconds.
                    from largebatch.model.transformers_internals import stored_form

                    store = stored_form(config, _without_memory(shapes))
                    dtypes = {shapes[name][0] for name in manifest.parameters}
                    write_json_file(temporary / "config.json", _of_dtype(config, dtypes))
                _save(shapes, read, store, partial(_contents_of_files, out=temporary), temporary)
        for name in COPIED_FILES:
            if exists(folder / name):
                write_file(temporary / name, read_bytes(folder / name))
        sync_folder(temporary)
        remove_folder(out)
        rename_folder(temporary, out)
    except CheckpointError as error:
        raise UserError(f"{folder} cannot be exported: {error}") from error
    finally:
        remove_folder(temporary)
    return manifest


def _intact(checkpoint: Path) -> Path:
    """The folder of the requested checkpoint, with its checksums verified."""
    problems = []
    for entry in RunFolder(checkpoint).checkpoints() or [entry_at(checkpoint)]:
        try:
            verify_checksums(entry.path)
            return entry.path
        except CheckpointError as error:
            problems.append(f"{entry.path}: {error}")
    raise UserError("; ".join(problems))


def _sources(manifest: Manifest, ema: bool) -> dict[str, str]:
    """The vector of each parameter, and the stored name of each buffer: of their averages, if they have some."""
    stored = (*manifest.vectors, *manifest.buffers)
    averages = {name.removeprefix(f"{EMA}/"): name for name in stored if name.startswith(f"{EMA}/")}
    if ema and not averages:
        raise CheckpointError("it has no averaged weights; leave out --ema, or train with optimizer.ema_half_life")
    sources = {name: f"{WEIGHT}/{name}" for name in manifest.parameters}
    sources |= {name: name for name in manifest.buffers if name not in averages.values()}
    return sources | averages if ema else sources


def _shapes(files: TensorFiles, manifest: Manifest, sources: Mapping[str, str], dtype: torch.dtype | None) -> Shapes:
    """Shape of each parameter and buffer, and the dtype in which it is written."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, source in sources.items():
        if name in manifest.parameters:
            parts = manifest.vectors[source]
            stored = files.find(rank_file(parts[0].rank), source).dtype if parts else torch.float32
            shapes[name] = (dtype or stored, manifest.parameters[name].shape)
            continue
        buffer = files.find(rank_file(manifest.buffers[source][0]), f"{BUFFER}/{source}")
        shapes[name] = (dtype if dtype and buffer.dtype.is_floating_point else buffer.dtype, buffer.shape)
    return shapes


def _contents_of_files(shapes: Shapes, out: Path) -> dict[str, list[str]]:
    """The names of all weights and buffers, by the file they go to; if these are several, write their index."""
    split = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda shape: shape[0].itemsize * torch.Size(shape[1]).numel(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json_file(out / "model.safetensors.index.json", index)
    return split.filename_to_tensors


def _of_dtype(config: dict[str, Any], dtypes: set[torch.dtype]) -> dict[str, Any]:
    """A configuration with the dtype in which `from_pretrained` loads parameters unless told otherwise, if it is one;
    those of a model's parts have one each."""
    if len(dtypes) > 1:
        return config
    written = {"dtype": str(*dtypes).removeprefix("torch.")}
    parts = {name: part | written for name, part in config.items() if isinstance(part, dict) and "dtype" in part}
    return config | parts | written


def _as_peft_stores(adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names that `peft` gives adapters: with the wrapped model's and without the adapter's."""
    return {
        "base_model.model." + name.replace(".default.", ".").removesuffix(".default"): tensor
        for name, tensor in adapters.items()
    }


def _without_memory(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in shapes.items()}


def _save(
    shapes: Shapes,
    read: Callable[[str], torch.Tensor],
    store: Store,
    contents_of_files: Callable[[Shapes], dict[str, list[str]]],
    out: Path,
) -> None:
    """Save tensors one by one, each as the one or more that it is stored as."""
    stored = {}
    origin = {}
    for name, tensor in _without_memory(shapes).items():
        for part, values in store({name: tensor}).items():
            stored[part] = (values.dtype, tuple(values.shape))
            origin[part] = name

    def tensors(parts: list[str]) -> Iterator[torch.Tensor]:
        for name, those in groupby(parts, origin.__getitem__):
            dtype, shape = shapes[name]
            values = store({name: read(name).to(dtype).view(shape)})
            yield from map(values.pop, those)

    for file, parts in contents_of_files(stored).items():
        save_tensors(out / file, {part: stored[part] for part in parts}, tensors(parts))


def _save_merged(config: Any, adapters: Any, shapes: Shapes, read: Callable[[str], torch.Tensor], out: Path) -> None:
    """Save a causal language model without adapters that computes what the one with adapters does.

    They are merged in fp32. All weights, which then are in memory, get the dtype of those that have adapters.

    Args:
        config: The configuration of the model without adapters.
        adapters: That of the adapters, as `peft` saves it.
        shapes: Shape of each parameter and buffer of the model with adapters, and the dtype in which it is written.
        read: Returns one of them by its name.
        out: The folder to write to.
    """
    try:
        from peft import get_peft_config, get_peft_model
    except ImportError:
        raise UserError('--merge needs peft: pip install "largebatch[lora]"') from None
    # Imported only here, because it takes seconds.
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        plain = AutoConfig.for_model(**config)
        model, _ = build_without_weights(
            lambda: AutoModelForCausalLM.from_config(plain, trust_remote_code=False), lambda _: False
        )
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        # Its layers get into the model. It would warn that the model's weights are not from where the adapters' were.
        adapted = get_peft_model(model, get_peft_config(adapters | {"base_model_name_or_path": None}))
        if model.config.tie_word_embeddings and ends != [model.get_input_embeddings(), model.get_output_embeddings()]:
            raise CheckpointError(
                "the embedding and the output layer share a weight, and one of them has an adapter; leave out --merge"
            )
        model.load_state_dict({name: read(name) for name in shapes}, strict=False, assign=True)
        model.tie_weights()
        dtype = next(dtype for name, (dtype, _) in shapes.items() if ".base_layer." in name)
        adapted.float().merge_and_unload().to(dtype).save_pretrained(out, max_shard_size=MAX_FILE_BYTES)
    except (CheckpointError, OSError):
        raise
    # Both libraries raise exceptions of many kinds for what they do not support.
    except Exception as error:
        raise CheckpointError(f"its adapters cannot be merged: {reason_of(error)}; leave out --merge") from error
    for file in out.iterdir():
        sync_folder(file)
