"""The weights of a checkpoint as `transformers.from_pretrained` or `peft` reads them, one parameter at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from largebatch.checkpoint.assemble import common_buffer, whole_weight
from largebatch.errors import UserError
from largebatch.storage.catalog import entries, entry_at, verify_checksums
from largebatch.storage.files import remove_folder, rename_folder, sync_folder, write_json_file
from largebatch.storage.layout import BUFFER, MODEL_CONFIG, WEIGHT, CheckpointError, Manifest, read_json, read_manifest
from largebatch.storage.tensors import TensorFiles, save_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# As `save_pretrained` cuts up larger models.
LARGEST_FILE_BYTES = 5 * 10**9

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def export(checkpoint: Path, out: Path, dtype: str | None = None, largest_file: int = LARGEST_FILE_BYTES) -> Manifest:
    """Write the weights and buffers of a checkpoint, and the model's configuration if it has one.

    From a model with adapters, only these and their configuration are written, as `peft` reads them. At most one
    parameter is in memory. The folder appears when it is complete.

    Args:
        checkpoint: A checkpoint's folder, or a run's, whose newest intact checkpoint is used.
        out: The folder to make.
        dtype: The dtype of floating-point numbers, one of `DTYPES`; None keeps the one they were trained in.
        largest_file: Bytes of weights in one file.
    """
    if out.exists():
        raise UserError(f"{out} exists; write a folder that does not")
    if not out.absolute().parent.is_dir():
        raise UserError(f"there is no folder {out.absolute().parent}; make it, or write another place")
    return export_intact(_intact(checkpoint), out, dtype, largest_file)


def export_intact(
    folder: Path, out: Path, dtype: str | None = None, largest_file: int = LARGEST_FILE_BYTES
) -> Manifest:
    """As `export`, from a checkpoint's folder whose checksums need not be verified."""
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        manifest = read_manifest(folder)
        remove_folder(temporary)
        temporary.mkdir()
        config = read_json(folder / MODEL_CONFIG) if (folder / MODEL_CONFIG).exists() else None
        with TensorFiles(folder) as files:
            if config is not None and "peft_type" in config:
                _write_adapters(files, manifest, temporary, DTYPES[dtype] if dtype else None)
                write_json_file(temporary / "adapter_config.json", config)
            else:
                dtypes = _write_weights(files, manifest, temporary, DTYPES[dtype] if dtype else None, largest_file)
                # What `from_pretrained` makes of parameters unless told otherwise.
                written = {"dtype": str(dtypes.pop()).removeprefix("torch.")} if len(dtypes) == 1 else {}
                if config is not None:
                    write_json_file(temporary / "config.json", config | written)
        sync_folder(temporary)
        rename_folder(temporary, out)
    except CheckpointError as error:
        raise UserError(f"{folder} cannot be exported: {error}") from error
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}") from error
    finally:
        remove_folder(temporary)
    return manifest


def _intact(checkpoint: Path) -> Path:
    """The checkpoint that is meant, with its checksums verified."""
    if (checkpoint / "checkpoints").is_dir():
        candidates = entries(checkpoint / "checkpoints")
    elif checkpoint.is_dir():
        candidates = [entry_at(checkpoint)]
    else:
        raise UserError(f"there is no folder {checkpoint}; write the folder of a checkpoint or of a run")
    problems = []
    for entry in candidates:
        problem = entry.problem or verify_checksums(entry.path)
        if problem is None:
            return entry.path
        problems.append(f"{entry.path}: {problem}")
    raise UserError("; ".join(problems) or f"{checkpoint} has no checkpoint")


def _write_adapters(files: TensorFiles, manifest: Manifest, out: Path, dtype: torch.dtype | None) -> None:
    """Write the adapters under the names that `peft` gives them: of the wrapped model, without the adapter's own."""
    theirs = {name: name.replace(".default.", ".").removesuffix(".default") for name in manifest.parameters}
    adapters = {
        f"base_model.model.{theirs[name]}": whole_weight(files, name, manifest)
        for name in manifest.parameters
        if ".lora_" in name
    }
    shapes = {name: (dtype or tensor.dtype, tuple(tensor.shape)) for name, tensor in adapters.items()}
    converted = (tensor.to(shapes[name][0]) for name, tensor in adapters.items())
    save_tensors(out / "adapter_model.safetensors", shapes, converted, {"format": "pt"})


def _write_weights(
    files: TensorFiles, manifest: Manifest, out: Path, dtype: torch.dtype | None, largest_file: int
) -> set[torch.dtype]:
    """Write all weights and buffers; returns the dtypes of the weights."""
    shapes: Shapes = {}
    for name, parameter in manifest.parameters.items():
        vector = f"{WEIGHT}/{name}"
        parts = manifest.vectors[vector]
        stored = files.find(parts[0].file, vector).dtype if parts else torch.float32
        shapes[name] = (dtype or stored, parameter.shape)
    for name, holders in manifest.buffers.items():
        buffer = files.find(holders[0], f"{BUFFER}/{name}")
        shapes[name] = (dtype if dtype and buffer.dtype.is_floating_point else buffer.dtype, buffer.shape)

    def tensors(names: Mapping[str, object]) -> Iterator[torch.Tensor]:
        for name in names:
            is_weight = name in manifest.parameters
            value = whole_weight(files, name, manifest) if is_weight else common_buffer(files, name, manifest)
            yield value.to(shapes[name][0])

    groups = _groups(shapes, largest_file)
    file_names = ["model.safetensors"]
    if len(groups) > 1:
        file_names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        index = {
            "metadata": {"total_size": sum(_size(shape) for shape in shapes.values())},
            "weight_map": {name: file for file, group in zip(file_names, groups, strict=True) for name in group},
        }
        write_json_file(out / "model.safetensors.index.json", index)
    for file_name, group in zip(file_names, groups, strict=True):
        save_tensors(out / file_name, group, tensors(group), {"format": "pt"})
    return {shapes[name][0] for name in manifest.parameters}


def _groups(shapes: Shapes, largest_file: int) -> list[Shapes]:
    """The tensors cut into files."""
    groups: list[Shapes] = [{}]
    size = 0
    for name, shape in shapes.items():
        if groups[-1] and size + _size(shape) > largest_file:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += _size(shape)
    return groups


def _size(shape: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return shape[0].itemsize * torch.Size(shape[1]).numel()
