"""The weights of a checkpoint as `transformers.from_pretrained` or `peft` reads them, one parameter at a time."""

import glob
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from largebatch.config.optimizers import EMA
from largebatch.errors import UserError, file_errors
from largebatch.model.parts import is_adapter
from largebatch.storage.catalog import entry_at, verify_checksums
from largebatch.storage.files import remove_folder, rename_folder, sync_folder, write_file, write_json_file
from largebatch.storage.layout import (
    BUFFER,
    COPIED_FILES,
    MODEL_CONFIG,
    WEIGHT,
    CheckpointError,
    Manifest,
    read_json,
    read_manifest,
)
from largebatch.storage.run_folder import RunFolder
from largebatch.storage.tensors import Shapes, TensorFiles, common_buffer, save_tensors, whole_weight
from largebatch.system.regular_file import read_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Larger models are cut into several files, as `save_pretrained` does.
MAX_FILE_BYTES = 5 * 10**9


def export(checkpoint: Path, out: Path, dtype: str | None = None, ema: bool = False) -> Manifest:
    """Write the weights and buffers of a checkpoint, and the model's configuration and tokenizer if it has them.

    For a model with adapters, only the adapters and their configuration are written, as `peft` reads them. At most one
    parameter at a time is in memory. The folder appears when it is complete.

    Args:
        checkpoint: A checkpoint's folder, or a run's, whose latest intact checkpoint is used.
        out: The folder to create.
        dtype: The dtype of floating-point numbers, one of `DTYPES`; None keeps the one they were trained in.
        ema: Whether to write the moving averages of the weights and of BatchNorm's running statistics.
    """
    if out.exists():
        raise UserError(f"{out} already exists; name a new folder")
    with file_errors(f"{checkpoint} cannot be exported to {out}", "name another folder"):
        return export_intact(_intact(checkpoint), out, dtype, ema=ema)


def export_intact(
    folder: Path,
    out: Path,
    dtype: str | None = None,
    progress: Callable[[], None] = lambda: None,
    ema: bool = False,
) -> Manifest:
    """As `export`, from the folder of a checkpoint whose checksums need not be verified; an older `out` is replaced.

    `progress` is called before each parameter.
    """
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    try:
        manifest = read_manifest(folder)
        sources = _sources(manifest, ema)
        # What an export left behind that was killed.
        for leftover in out.parent.glob(f".{glob.escape(out.name)}.{'?' * 16}.tmp"):
            remove_folder(leftover)
        temporary.mkdir(parents=True)
        config = read_json(folder / MODEL_CONFIG) if (folder / MODEL_CONFIG).exists() else None
        if not isinstance(config, dict | None):
            raise CheckpointError(f"its {MODEL_CONFIG} is not an object")
        with TensorFiles(folder) as files:
            shapes = _shapes(files, manifest, sources, DTYPES[dtype] if dtype else None)
            write = partial(_write, files, manifest, sources, shapes, progress)
            if config is not None and "peft_type" in config:
                adapters = temporary / "adapter_model.safetensors"
                write(_names_of_adapters(manifest), adapters)
                write_json_file(temporary / "adapter_config.json", config)
            else:
                _write_weights(shapes, temporary, write)
                if config is not None:
                    dtypes = {shapes[name][0] for name in manifest.parameters}
                    # The dtype in which `from_pretrained` loads parameters unless told otherwise.
                    written = {"dtype": str(dtypes.pop()).removeprefix("torch.")} if len(dtypes) == 1 else {}
                    write_json_file(temporary / "config.json", config | written)
            for name in COPIED_FILES:
                if (folder / name).exists():
                    write_file(temporary / name, [memoryview(read_bytes(folder / name))])
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
            stored = files.find(manifest.files[parts[0].file], source).dtype if parts else torch.float32
            shapes[name] = (dtype or stored, manifest.parameters[name].shape)
            continue
        buffer = files.find(manifest.files[manifest.buffers[source][0]], f"{BUFFER}/{source}")
        shapes[name] = (dtype if dtype and buffer.dtype.is_floating_point else buffer.dtype, buffer.shape)
    return shapes


def _write(
    files: TensorFiles,
    manifest: Manifest,
    sources: Mapping[str, str],
    shapes: Shapes,
    progress: Callable[[], None],
    names: Mapping[str, str],
    path: Path,
) -> None:
    """Write parameters and buffers to one file, under other `names` by ours."""

    def tensors() -> Iterator[torch.Tensor]:
        for name in names:
            progress()
            read = whole_weight if name in manifest.parameters else common_buffer
            yield read(files, sources[name], manifest).to(shapes[name][0])

    save_tensors(path, {theirs: shapes[name] for name, theirs in names.items()}, tensors(), {"format": "pt"})


def _write_weights(shapes: Shapes, out: Path, write: Callable[[Mapping[str, str], Path], None]) -> None:
    """Write all weights and buffers, to several files if they are large."""
    split = split_state_dict_into_shards_factory(
        dict(shapes),
        get_storage_size=lambda shape: shape[0].itemsize * torch.Size(shape[1]).numel(),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json_file(out / "model.safetensors.index.json", index)
    for file, names in split.filename_to_tensors.items():
        write({name: name for name in names}, out / file)


def _names_of_adapters(manifest: Manifest) -> dict[str, str]:
    """The adapters' names as `peft` writes them, with the wrapped model's and without the adapter's, by ours."""
    return {
        name: "base_model.model." + name.replace(".default.", ".").removesuffix(".default")
        for name in manifest.parameters
        if is_adapter(name)
    }
