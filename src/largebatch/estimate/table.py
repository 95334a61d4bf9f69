"""A comparison as a readable table, in lines of at most 110 characters."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

from largebatch.config import RecipeConfig
from largebatch.estimate.comparison import Json
from largebatch.estimate.hardware import GIB
from largebatch.estimate.memory import MAX_FRACTION_OF_GPU
from largebatch.plan.strategies import POLICY_WORDS, Policy, find_strategy

WIDTH, NAME_WIDTH, COLUMN_WIDTH = 110, 28, 16
MAX_COLUMNS = (WIDTH - NAME_WIDTH) // COLUMN_WIDTH
NOTES = (
    "Model states are exact for the fullest process, before the update: weights, reduced gradients, optimizer, and "
    "DeepSpeed's fp32 copies.",
    "Transient memory is approximate, not all held at once: gradients that accumulate until they are reduced, gathered "
    "weights, buckets (--json has each).",
    "Sent: in rings, where each of n processes sends (n - 1) / n of what is gathered or reduced; under zero3 at most.",
)


def table(comparison: Json, config: RecipeConfig) -> str:
    """The comparison of a recipe as text."""
    columns, activations = comparison["world_sizes"], comparison["estimated_activation_bytes"]
    lines = [
        f"{comparison['recipe']}: {config.task}, {comparison['parameters']:,} parameters in "
        f"{'fp64' if config.precision == 'fp64' else 'fp32'}, {config.optimizer.name}, "
        f"micro-batches of {config.batch.micro_batch_size:,}"
    ]
    for first in range(0, len(columns), MAX_COLUMNS):
        lines += ["", *_rows(comparison, columns[first : first + MAX_COLUMNS])]
    lines.append("")
    remarks: dict[str, list[int]] = {}
    for column in columns:
        chosen = f"{column['suggested']}: " if column.get("suggested") else ""
        if about := column["problem"] or column["reason"]:
            remarks.setdefault(chosen + about, []).append(column["world_size"])
    for about, world_sizes in remarks.items():
        lines += _wrapped(f"{_processes(world_sizes)}: {about}")
    notes = [*NOTES, *_about_reductions(columns)]
    if halved := comparison["parameters_gathered_in_bf16"]:
        share = 100 * halved / comparison["parameters"]
        notes.append(f"fsdp and hsdp gather {share:.3g} % of the weights in bf16, and the others in fp32.")
    sizes = {size for _, size in config.batch.sizes}
    if len(sizes) > 1:
        notes.append(
            "The batch size changes: accumulation, transient memory and the bytes sent are those of the largest, "
            f"{max(sizes):,} samples."
        )
    if activations is None:
        notes.append("Activations are not estimated for this task or model: leave room for them.")
    else:
        how = "with" if config.compute.activation_checkpointing else "without"
        notes.append(
            f"Activations are an estimate: {_size(activations)} GiB for a micro-batch {how} activation "
            "checkpointing, what autograd keeps with CUDA's kernels in a forward pass on shapes alone, without work "
            "space."
        )
    if comparison["gpu_memory_bytes"] is not None:
        notes.append(
            f"{_size(comparison['kept_back_bytes'])} GiB of the GPU's memory are kept back for CUDA's context, NCCL, "
            "work space and fragmentation: 8 %, and at least 4 GiB."
        )
    if hardware := comparison["hardware"]:
        notes.append(_assumptions(hardware))
    notes += [f"{name} is not counted: {reason}" for name, reason in comparison["not_counted"].items()]
    return "\n".join([*lines, *(line for note in notes for line in _wrapped(note))]) + "\n"


def _about_reductions(columns: Sequence[Json]) -> Iterator[str]:
    """When each strategy reduces gradients, and over which groups."""
    reduced: dict[str, dict[Policy, list[int]]] = {}
    groups: dict[str, int] = {}
    for column in columns:
        for name, option in column.get("strategies", {}).items():
            reduced.setdefault(name, {}).setdefault(option["gradients_reduced"], []).append(column["world_size"])
            groups[name] = max(groups.get(name, 0), option["shard_group_size"])
    for policy in get_args(Policy):
        under = [
            name if len(policies) == 1 else f"{name} on {_processes(policies[policy])}"
            for name, policies in reduced.items()
            if policy in policies
        ]
        if under:
            yield f"Gradients are reduced with {POLICY_WORDS[policy]} under {', '.join(under)}."
    for name, size in groups.items():
        entry = find_strategy(name)
        if entry.replicates_shards:
            yield (
                f"{name} shards over groups of {size} processes, and sums over the groups with the last micro-batch; "
                f"it is counted for multiples of {size} processes only."
            )
        elif len(entry.reduces) > 1:
            yield (
                f'With compute.reduce_gradients "auto", {name} keeps whole gradients until the last micro-batch if '
                f"states and transient memory then take at most {100 * MAX_FRACTION_OF_GPU:g} % of the GPU's memory."
            )


def _assumptions(hardware: Json) -> str:
    """The assumptions behind the time of a step."""
    fabric, flops = hardware["fabric"], hardware["micro_batch_flops"]
    if not flops:
        return "The time of a step is not estimated: the operations of this task or model cannot be counted."
    mfu, exposed = ("{:g} to {:g}".format(*hardware[name]) for name in ("mfu", "exposed_share"))
    return (
        f"The time of a step is an estimate: {flops:.3g} operations per micro-batch at {mfu} of the data sheet's "
        f"{hardware['peak'] / 1e12:g} TFLOP/s (MFU), {fabric['node_bandwidth'] / 1e9:g} GB/s within nodes of "
        f"{fabric['gpus_per_node']} and {fabric['net_bandwidth'] / 1e9:g} GB/s per GPU between them, and {exposed} of "
        "the shorter of computation and communication not hidden behind the longer. Efficiency is the fraction of a "
        "step that computation alone would take, including recomputation."
    )


def _rows(comparison: Json, columns: Sequence[Json]) -> list[str]:
    names = dict.fromkeys(name for column in comparison["world_sizes"] for name in column.get("strategies", ()))
    gpu_memory, free = comparison["gpu_memory_bytes"], comparison["kept_back_bytes"]

    def row(name: str, cells: Iterable[str]) -> str:
        return f"{name:<{NAME_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)

    def rows(cell: Callable[[Json], str]) -> Iterator[str]:
        for name in names:
            options = [column.get("strategies", {}).get(name) for column in columns]
            yield row(f"  {name}", [cell(option) if option else "-" for option in options])

    accumulation = [column.get("gradient_accumulation_steps") for column in columns]
    lines = [
        row("processes", [f"{column['world_size']:,}" for column in columns]),
        row("accumulation", [f"{steps:,}" if steps else "-" for steps in accumulation]),
        "model states + transient memory, GiB per process",
        *rows(_states),
    ]
    if gpu_memory is not None:
        known = "with" if comparison["estimated_activation_bytes"] is not None else "without"
        of = f"of {_size(gpu_memory - free)} GiB ({_size(gpu_memory)} less {_size(free)} kept back)"
        lines += [f"estimated total {known} activations, {of}", *rows(_total)]
    if hardware := comparison["hardware"]:
        lines += [
            f"sent within nodes of {hardware['fabric']['gpus_per_node']} per step, GiB by each process",
            *rows(_sent_within),
            "sent between nodes per step, GiB by each process",
            *rows(lambda option: _size(option["sent_between_nodes_bytes_per_step"])),
        ]
        if hardware["micro_batch_flops"]:
            lines += ["time of a step, s", *rows(lambda option: _to(option["step_seconds"], _seconds))]
            lines += ["efficiency", *rows(lambda option: _to(option["efficiency"], "{:.2f}".format))]
    else:
        lines += ["sent per step, GiB by each process", *rows(lambda option: _size(option["sent_bytes_per_step"]))]
    if gpu_memory is not None:
        lines.append(row("suggested", [column.get("suggested", "-") or "none fits" for column in columns]))
    return lines


def _states(option: Json) -> str:
    return f"{_size(option['model_state_bytes']['total'])} + {_size(sum(option['transient_bytes_estimate'].values()))}"


def _total(option: Json) -> str:
    return f"{_size(option['total_bytes_estimate'])} {'fits' if option['fits'] else 'does not'}"


def _sent_within(option: Json) -> str:
    return _size(option["sent_bytes_per_step"] - option["sent_between_nodes_bytes_per_step"])


def _to(ends: Json, write: Callable[[Any], str]) -> str:
    least, most = map(write, ends.values())
    return least if least == most else f"{least} to {most}"


def _size(size: int) -> str:
    """Bytes as GiB, in three digits or fewer."""
    number = size / GIB
    return ("<0.01" if size else "0") if number < 0.01 else _digits(number)


def _digits(number: float) -> str:
    """A number with three digits, or a whole number if it has more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _seconds(number: float) -> str:
    return _digits(number) if number >= 1 else f"{number:.2g}"


def _processes(world_sizes: Sequence[int]) -> str:
    numbers = ", ".join(f"{world_size:,}" for world_size in world_sizes)
    return f"{numbers} {'process' if world_sizes == [1] else 'processes'}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")
