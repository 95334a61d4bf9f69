"""A comparison as a readable table, in lines of at most 110 characters."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from largebatch.config import RecipeConfig
from largebatch.tools.plan.comparison import Json
from largebatch.tools.plan.gpu_memory import GIB

WIDTH, NAME_WIDTH, COLUMN_WIDTH = 110, 28, 16
MOST_COLUMNS = (WIDTH - NAME_WIDTH) // COLUMN_WIDTH
NOTES = (
    "Model states are exact for the fullest process, before the update: weights, reduced gradients, optimizer, and "
    "DeepSpeed's fp32 copies.",
    "Temporary memory is approximate, not all held at once: gradients that accumulate until they are reduced (whole "
    "ones under fsdp and zero1), gathered weights, buckets.",
    "Sent: in rings, where each of n processes sends (n - 1) / n of what is gathered or reduced.",
)


def table(comparison: Json, config: RecipeConfig) -> str:
    """The comparison of a recipe as text."""
    columns, activations = comparison["world_sizes"], comparison["estimated_activation_bytes"]
    lines = [
        f"{comparison['recipe']}: {config.task}, {comparison['parameters']:,} parameters in "
        f"{'fp64' if config.precision == 'fp64' else 'fp32'}, {config.optimizer.name}, "
        f"micro-batches of {config.batch.micro_batch_size:,}"
    ]
    for first in range(0, len(columns), MOST_COLUMNS):
        lines += ["", *_rows(comparison, columns[first : first + MOST_COLUMNS])]
    lines.append("")
    remarks: dict[str, list[int]] = {}
    for column in columns:
        chosen = f"{column['suggested']}: " if column.get("suggested") else ""
        if about := column["problem"] or column["reason"]:
            remarks.setdefault(chosen + about, []).append(column["world_size"])
    for about, world_sizes in remarks.items():
        lines += _wrapped(f"{_processes(world_sizes)}: {about}")
    if trained := next((column for column in columns if not column["problem"]), None):
        lines.append(f"Temporary memory on {_processes([trained['world_size']])}, approximately, in GiB:")
        for name, option in trained["strategies"].items():
            parts = [f"{_size(size)} {reason}" for reason, size in option["bytes_beside_about"].items()]
            lines += textwrap.wrap(f"  {name:<7}{', '.join(parts) or 'nothing'}", WIDTH, subsequent_indent=" " * 9)
    notes = list(NOTES)
    sizes = {size for _, size in config.batch.sizes}
    if len(sizes) > 1:
        notes.append(
            "The batch size changes: accumulation, temporary memory and what is sent are those of the largest, "
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
    notes += [f"{name} is not counted: {reason}" for name, reason in comparison["left_out"].items()]
    return "\n".join([*lines, *(line for note in notes for line in _wrapped(note))]) + "\n"


def _rows(comparison: Json, columns: Sequence[Json]) -> list[str]:
    names = next((column["strategies"] for column in comparison["world_sizes"] if not column["problem"]), ())
    gpu_memory, free = comparison["gpu_memory_bytes"], comparison["kept_back_bytes"]

    def row(name: str, cells: Iterable[str]) -> str:
        return f"{name:<{NAME_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)

    def rows(cell: Callable[[Json], str]) -> Iterator[str]:
        for name in names:
            yield row(
                f"  {name}", ["-" if column["problem"] else cell(column["strategies"][name]) for column in columns]
            )

    accumulation = [column.get("gradient_accumulation_steps") for column in columns]
    lines = [
        row("processes", [f"{column['world_size']:,}" for column in columns]),
        row("accumulation", [f"{steps:,}" if steps else "-" for steps in accumulation]),
        "model states + temporary memory, GiB per process",
        *rows(_states),
    ]
    if gpu_memory is not None:
        known = "with" if comparison["estimated_activation_bytes"] is not None else "without"
        of = f"of {_size(gpu_memory - free)} GiB ({_size(gpu_memory)} less {_size(free)} kept back)"
        lines += [f"estimated total {known} activations, {of}", *rows(_total)]
    lines += ["sent per step, GiB by each process", *rows(_sent)]
    if gpu_memory is not None:
        lines.append(row("suggested", [column.get("suggested", "-") or "none fits" for column in columns]))
    return lines


def _states(option: Json) -> str:
    return f"{_size(option['model_state_bytes']['together'])} + {_size(sum(option['bytes_beside_about'].values()))}"


def _total(option: Json) -> str:
    return f"{_size(option['bytes_together_about'])} {'fits' if option['fits'] else 'does not'}"


def _sent(option: Json) -> str:
    least, most = map(_size, option["sent_bytes_per_step"].values())
    return least if least == most else f"{least} to {most}"


def _size(size: int) -> str:
    """Bytes as GiB, in three digits or fewer."""
    number = size / GIB
    if number < 0.01:
        return "<0.01" if size else "0"
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _processes(world_sizes: Sequence[int]) -> str:
    numbers = ", ".join(f"{world_size:,}" for world_size in world_sizes)
    return f"{numbers} {'process' if world_sizes == [1] else 'processes'}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")
