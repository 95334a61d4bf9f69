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

from largebatch.batch.division import nearest_multiples
from largebatch.errors import UserError
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
  Lightning's batch_size, devices and accumulate_grad_batches:
    largebatch effective-batch --from lightning --batch-size 32 --devices 8 --accumulation 2 --lr 0.1""",
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
    parser.add_argument("--accumulation", type=positive_int, default=1, help="backward passes per step; default: 1")
    parser.add_argument("--split-batches", action="store_true", help="all processes share the batch, as in Accelerate")
    parser.add_argument("--loss", choices=["mean", "sum"], default="mean", help="of a backward pass; default: mean")
    parser.add_argument(
        "--gradients",
        choices=["average", "sum", "separate"],
        help="how processes combine gradients, if they can choose: Horovod's op, DeepSpeed's gradient_allreduce_op, a "
        "parameter server that waits for all workers (average, sum) or for none (separate, its default)",
    )
    parser.add_argument("--lr", dest="learning_rate", type=positive_float, help="the script's learning rate")


def run(options: argparse.Namespace) -> int:
    script = OtherBatch(**{field.name: getattr(options, field.name) for field in fields(OtherBatch)})
    print(*answer(script), sep="\n")
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
        """Processes that have a loader each. So have DataParallel's devices, in effect, if they get equal shares."""
        if self.framework == DATA_PARALLEL and self.batch_size % self.devices:
            return 1
        return self.nodes * self.devices

    @property
    def samples_per_process(self) -> int:
        """Samples that a process loads for one backward pass."""
        is_split = self.split_batches or self.framework == DATA_PARALLEL
        return self.batch_size // self.processes if is_split else self.batch_size

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
        of_a_loss = self.batch_size if self.framework == DATA_PARALLEL else self.samples_per_process
        return (of_a_loss if self.loss == "sum" else 1) * (self.processes_per_update if self.gradients == "sum" else 1)


def answer(script: OtherBatch) -> Iterator[str]:
    """Yield the effective batch, what it is the product of, and the recipe's lines."""
    size = script.global_batch_size
    yield f"effective batch: {size}"
    yield f"  micro-batch size      {script.samples_per_process:>8}"
    yield f"  processes per update  {script.processes_per_update:>8}"
    yield f"  accumulation          {script.accumulation:>8}"
    batch = {"global_batch_size": size, "micro_batch_size": script.samples_per_process}
    learning_rate = {"base_lr": script.learning_rate or "LR", "reference_batch_size": size, "scaling": "none"}
    yield "in the recipe:"
    yield f'  "batch": {json.dumps(batch)},'
    yield f'  "learning_rate": {json.dumps(learning_rate)}'
    yield 'for another batch, change global_batch_size, and scaling to "linear" (SGD) or "sqrt" (Adam): see the plan'
    if (k := script.gradient_factor) > 1:
        yield (
            f"the script's gradients are {k} times as large as the recipe's, which are means: for SGD, multiply the "
            f"learning rate by {k} and divide the weight decay by {k}; for clipping, divide the norm by {k}; for Adam, "
            "no change"
        )
