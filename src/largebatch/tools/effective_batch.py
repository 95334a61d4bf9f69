"""`largebatch effective-batch`: the batch of a script for another framework, and the same batch in a recipe.

What the frameworks do is documented: torch's DistributedDataParallel and DataParallel, Lightning ("Effective batch
size"), `transformers.TrainingArguments`, DeepSpeed ("Batch Size Related Parameters"), Horovod (`DistributedOptimizer`);
for parameter servers, Dean et al. 2012 and Chen et al. 2016 (arXiv 1604.00981).
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from largebatch.batch.division import gradient_accumulation_steps, nearest_multiples
from largebatch.batch.scaling import ScalingRule, scaling_factor
from largebatch.errors import UserError, counted
from largebatch.tools.options import Commands, add_command, positive_float, positive_int

Gradients = Literal["average", "sum", "separate"]

DATA_PARALLEL = "dp"  # one process drives all devices of a node, and splits its batch among them
PARAMETER_SERVER = "parameter-server"  # updates the weights with each process's gradients, unless it is told otherwise
FRAMEWORKS = ("ddp", DATA_PARALLEL, "fsdp", "deepspeed", "horovod", PARAMETER_SERVER, "lightning", "hf-trainer")


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "effective-batch",
        run,
        description="From a script's settings, find how many samples make up an optimizer step, and the batch and "
        "learning rate of a recipe that trains the same. Needs no torch.",
        epilog="""examples:
  64 samples shared by 2 nodes of 4 GPUs:
    largebatch effective-batch --from ddp --batch-size 64 --split-batches --nodes 2 --devices 4
  Lightning's batch_size, devices and accumulate_grad_batches, scaled to a batch of 1024:
    largebatch effective-batch --from lightning --batch-size 32 --devices 8 --accumulation 2 \\
        --lr 0.1 --to-global-batch-size 1024 --scaling linear""",
    )
    parser.add_argument("--from", dest="framework", choices=FRAMEWORKS, required=True, help="the script's framework")
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        required=True,
        help="batch size of the data loader (per_device_train_batch_size, train_micro_batch_size_per_gpu)",
    )
    parser.add_argument("--devices", type=positive_int, default=1, help="GPUs per node; default: 1")
    parser.add_argument("--nodes", type=positive_int, default=1, help="number of nodes; default: 1")
    parser.add_argument(
        "--accumulation",
        type=positive_int,
        default=1,
        help="backward passes per optimizer step: accumulate_grad_batches, gradient_accumulation_steps; default: 1",
    )
    parser.add_argument(
        "--split-batches",
        action="store_true",
        help="all processes share the batch size: Accelerate's split_batches, or batch_size // world_size in a script",
    )
    parser.add_argument("--loss", choices=["mean", "sum"], default="mean", help="of a backward pass; default: mean")
    parser.add_argument(
        "--gradients",
        choices=["average", "sum", "separate"],
        help="how processes combine gradients, if they can choose: Horovod's op, DeepSpeed's gradient_allreduce_op, a "
        "parameter server that waits for all workers (average, sum) or for none (separate, its default)",
    )
    parser.add_argument("--lr", dest="learning_rate", type=positive_float, help="the script's learning rate")
    parser.add_argument("--to-global-batch-size", type=positive_int, help="of the recipe; default: the effective batch")
    parser.add_argument("--scaling", choices=["linear", "sqrt", "none"], help="of the rate: linear (SGD), sqrt (Adam)")


def run(options: argparse.Namespace) -> int:
    script = OtherBatch(**{field.name: getattr(options, field.name) for field in fields(OtherBatch)})
    print(answer(script, options.to_global_batch_size or script.global_batch_size, options.scaling))
    return 0


@dataclass(frozen=True)
class OtherBatch:
    """A script's numbers.

    Raises:
        UserError: The numbers contradict each other.
    """

    framework: str  # one of `FRAMEWORKS`
    batch_size: int  # the loader's; without `split_batches`, that of each process's loader
    devices: int = 1  # GPUs per node that share the samples
    nodes: int = 1
    accumulation: int = 1  # backward passes per optimizer step
    split_batches: bool = False  # whether all processes share the loader's batch
    loss: Literal["mean", "sum"] = "mean"  # over the samples of one backward pass, before division by accumulation
    gradients: Gradients | None = None  # how the processes' gradients are combined; None means the framework's default
    learning_rate: float | None = None  # None if it is not known

    def __post_init__(self) -> None:
        if self.framework == DATA_PARALLEL and (self.nodes > 1 or self.split_batches or self.gradients):
            raise UserError(
                "--from dp: DataParallel is one process on one node, which splits its batch and sums the gradients of "
                "its devices; remove --nodes, --split-batches and --gradients, or use --from ddp"
            )
        if self.split_batches and self.batch_size % self.processes:
            raise UserError(
                f"--batch-size {self.batch_size} --split-batches: not a multiple of the {self.processes} processes; "
                f"{nearest_multiples(self.batch_size, self.processes)}; or remove --split-batches"
            )

    @property
    def processes(self) -> int:
        """Processes that have a loader each."""
        return 1 if self.framework == DATA_PARALLEL else self.nodes * self.devices

    @property
    def samples_per_process(self) -> int:
        """Samples that a process loads for one backward pass."""
        return self.batch_size // self.processes if self.split_batches else self.batch_size

    @property
    def processes_per_update(self) -> int:
        """Processes whose gradients make up one update of the weights."""
        usual: Gradients = "separate" if self.framework == PARAMETER_SERVER else "average"
        return 1 if (self.gradients or usual) == "separate" else self.processes

    @property
    def global_batch_size(self) -> int:
        """Samples that make up one update of the weights: the effective batch."""
        return self.samples_per_process * self.processes_per_update * self.accumulation

    @property
    def gradient_factor(self) -> int:
        """The gradient of an update, as a multiple of the gradient of the mean loss over the global batch."""
        of_a_process = self.samples_per_process if self.loss == "sum" else 1
        return of_a_process * (self.processes_per_update if self.gradients == "sum" else 1)

    @property
    def recipe_layout(self) -> tuple[int, int]:
        """The micro-batch size and the number of processes of a recipe: a process for each device, if they can."""
        if self.framework == DATA_PARALLEL and self.batch_size % self.devices == 0:
            return self.batch_size // self.devices, self.devices
        return self.samples_per_process, self.processes_per_update


def answer(script: OtherBatch, global_batch_size: int, scaling: ScalingRule | None) -> str:
    """Return the effective batch, a table of script and recipe, and the recipe's lines.

    Raises:
        UserError: The recipe's batch is another one, and `scaling` does not say how to scale the learning rate.
        ConfigError: The recipe's batch does not divide evenly.
    """
    reference = script.global_batch_size
    if scaling is None and global_batch_size != reference:
        raise UserError(
            f"--to-global-batch-size {global_batch_size}: the script's batch is {reference}, and how to scale the "
            "learning rate is your choice; add --scaling linear (SGD), sqrt (Adam) or none"
        )
    rule: ScalingRule = scaling or "none"
    batch = {"global_batch_size": global_batch_size, "micro_batch_size": script.recipe_layout[0]}
    # The rate as it was tuned: a rate that is already scaled would be scaled again.
    learning_rate = {"base_lr": script.learning_rate or "LR", "reference_batch_size": reference, "scaling": rule}
    processes = counted(script.processes_per_update, "process", "processes")
    lines = [
        f"effective batch: {script.samples_per_process} samples x {processes} x accumulation {script.accumulation} = "
        f"{reference}",
        *_table(script, global_batch_size, scaling_factor(rule, global_batch_size, reference)),
        "in the recipe:",
        f'  "batch": {json.dumps(batch)},',
        f'  "learning_rate": {json.dumps(learning_rate)}',
    ]
    if (k := script.gradient_factor) > 1:
        lines.append(
            f"the script's gradients are {k} times as large as the recipe's, which are means: for SGD, multiply the "
            f"learning rate by {k} and divide the weight decay by {k}; for clipping, divide the norm by {k}; for Adam, "
            "no change"
        )
    return "\n".join(lines)


def _table(script: OtherBatch, global_batch_size: int, factor: float) -> Iterator[str]:
    micro_batch_size, world_size = script.recipe_layout
    accumulation = gradient_accumulation_steps(global_batch_size, micro_batch_size, world_size)
    rate = script.learning_rate
    rows: list[tuple[str, object, object]] = [
        ("", "script", "recipe"),
        ("global batch size", script.global_batch_size, global_batch_size),
        ("micro-batch size", script.samples_per_process, micro_batch_size),
        ("processes per update", script.processes_per_update, world_size),
        ("accumulation", script.accumulation, accumulation),
        ("learning rate", f"{rate:g}" if rate else "LR", f"{rate * factor:g}" if rate else f"LR x {factor:g}"),
    ]
    yield from (f"{name:<22}{theirs:>10}{ours:>12}" for name, theirs, ours in rows)
