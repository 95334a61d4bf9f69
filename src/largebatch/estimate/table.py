"""A comparison as readable tables, one for each number of processes, in lines of at most 110 characters."""

from collections.abc import Mapping

from largebatch.config import RecipeConfig
from largebatch.estimate.comparison import Json
from largebatch.estimate.step_time import CONVOLUTION_PASSES, EXPOSED_SHARE, MFU
from largebatch.system.hardware import GIB
from largebatch.words import aligned, counted, digits, span, wrapped

NOTES = (
    "Sizes are in GiB, for the process that holds the most. If the batch size changes, all numbers are of the largest.",
    "States are exact, before the update: weights, reduced gradients, optimizer states, and DeepSpeed's fp32 copies. "
    "Transient: what else is held at a step's peak, at most: accumulated gradients, gathered weights, buckets; see "
    "--json. Total: the most at any one time, which may be when some activations are gone.",
    "Activations of a micro-batch are an estimate: what a forward pass on shapes keeps with CUDA's kernels, without "
    "work space. Fits: 8 % of a GPU, and at least 4 GiB, are left for it, CUDA's context, NCCL and fragmentation.",
    "Sent: by each process per step; of what n processes gather or reduce in a ring, (n - 1) / n. At most, for zero3.",
    "Reduced: with each micro-batch of a step, or with the last. Shards: the processes that states are divided over.",
    "The suggested strategy fits and is within 3 % of the fastest. Of several, it sends the least between nodes, then "
    "shards the least, then sends the least. Without estimated times, only the last two count.",
)


def table(comparison: Json, config: RecipeConfig) -> str:
    """The comparison of a recipe as text."""
    activations = comparison["estimated_activation_bytes"]
    kept = f"unknown ({comparison['not_estimated']})" if activations is None else f"{_size(activations)} GiB"
    estimated = ' (estimated for "auto")' if config.batch.finds_micro_batch_size else ""
    lines = wrapped(
        f"{comparison['recipe']}: {comparison['parameters']:,} parameters, {config.optimizer.name}, micro-batches of "
        f"{comparison['micro_batch_size']:,}{estimated}, activations {kept}"
    )
    for column in comparison["world_sizes"]:
        lines += ["", *wrapped(_title(column)), *wrapped(_whole_run(column, config))]
        rows = {name: _cells(option) for name, option in column.get("strategies", {}).items()}
        lines += aligned(rows)
    notes = [*NOTES]
    if comparison["hardware"]:
        notes.append(assumptions(comparison))
    notes += [f"{name} is not counted: {reason}" for name, reason in comparison["not_counted"].items()]
    lines.append("")
    for note in notes:
        lines += wrapped(note)
    return "\n".join(lines) + "\n"


def assumptions(comparison: Json) -> str:
    """The assumptions behind the time of a step."""
    flops = comparison["micro_batch_flops"]
    hardware = comparison["hardware"]
    if not flops:
        return "The time of a step is not estimated: the operations of this task or model cannot be counted."
    fabric = hardware["fabric"]
    return (
        f"The time of a step is an estimate: {flops:.3g} operations per micro-batch at {_ends(MFU)} of the data "
        f"sheet's {hardware['peak'] / 1e12:g} TFLOP/s (MFU), {fabric['node_bandwidth'] / 1e9:g} GB/s within nodes of "
        f"{fabric['gpus_per_node']} and {fabric['net_bandwidth'] / 1e9:g} GB/s per GPU between them, and "
        f"{_ends(EXPOSED_SHARE)} of the shorter of computation and communication not hidden behind the longer. Of the "
        "optimizer's update, only matrix products (Muon's) are counted, at the peak of bf16. Networks of convolutions "
        f"take at least {_ends(CONVOLUTION_PASSES)} passes over their activations in the GPU's memory."
    )


def _ends(assumed: tuple[float, float]) -> str:
    return "{:g} to {:g}".format(*sorted(assumed))


def _title(column: Json) -> str:
    """A number of processes, and what is suggested for it."""
    processes = counted(column["world_size"], "process")
    if column["problem"]:
        return f"{processes}: {column['problem']}"
    accumulation = f"accumulation {column['gradient_accumulation_steps']:,}"
    return f"{processes}, {accumulation}: {column['suggested'] or 'none fits'}; {column['reason']}"


def _whole_run(column: Json, config: RecipeConfig) -> str:
    """What the whole run takes with the strategy that is suggested; "" if nothing is known of it."""
    option = column.get("strategies", {}).get(column.get("suggested"))
    if option is None or option["step_seconds"] is None:
        return ""
    # A step with fewer samples takes less time.
    size = max(config.batch.sizes)
    hours = [column["samples"] / size * seconds / 3600 for seconds in option["step_seconds"].values()]
    gpu_hours = [column["world_size"] * each for each in hours]
    tokens = config.tokens_processed_per_sample
    rates = [column["samples"] * (tokens or 1) / (3600 * each) for each in reversed(hours)]
    unit = "tokens" if tokens else "samples"
    return f"  The whole run: {span(hours)} hours, {span(gpu_hours)} GPU-hours, {span(rates)} {unit} per second"


def _cells(option: Json) -> Mapping[str, str]:
    """What a strategy costs, by the heading of each column."""
    sent = option["sent_bytes_per_step"]
    between = option["sent_between_nodes_bytes_per_step"]
    cells = {
        "states": _size(option["model_state_bytes"]["total"]),
        "transient": _size(sum(option["transient_bytes_estimate"].values())),
        "total": _size(option["total_bytes_estimate"]),
        "fits": "yes" if option["fits"] else "no",
    }
    if between is None:
        cells["sent"] = _size(sent)
    else:
        cells |= {"in nodes": _size(sent - between), "between": _size(between)}
    if option["step_seconds"]:
        cells["step, s"] = span(option["step_seconds"].values())
    reduced = option["gradients_reduced"].removesuffix("_micro_batch")
    return cells | {"reduced": reduced, "shards": f"{option['shard_group_size']:,}"}


def _size(size: int) -> str:
    """Bytes as GiB."""
    return digits(size / GIB)
