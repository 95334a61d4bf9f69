"""`largebatch effective-batch`: the batch of a script for another framework, and the same batch in a recipe.

What the frameworks do is documented: torch's DistributedDataParallel and DataParallel, Lightning ("Effective batch
size"), `transformers.TrainingArguments`, DeepSpeed ("Batch Size Related Parameters"), Horovod (`DistributedOptimizer`);
for parameter servers, Dean et al. 2012 and Chen et al. 2016 (arXiv 1604.00981).
"""

import argparse
import json
from typing import NamedTuple

from largebatch.batch.division import nearest_multiples
from largebatch.errors import UserError
from largebatch.tools.options import positive_float, positive_int

DATA_PARALLEL = "dp"  # one process drives all devices of a node, and splits its batch among them
PARAMETER_SERVER = "parameter-server"  # updates the weights with each process's gradients, unless it is told otherwise
FRAMEWORKS = ("ddp", DATA_PARALLEL, "fsdp", "deepspeed", "horovod", PARAMETER_SERVER, "lightning", "hf-trainer")


EPILOG = """examples:
  64 samples shared by 2 nodes of 4 GPUs:
    largebatch effective-batch --from ddp --batch-size 64 --split-batches --nodes 2 --devices 4
  Lightning's batch_size, devices and accumulate_grad_batches:
    largebatch effective-batch --from lightning --batch-size 32 --devices 8 --accumulation 2 --lr 0.1"""


def add_options(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--gradients",
        choices=["average", "sum", "separate"],
        help="how processes combine gradients, if they can choose: Horovod's op, DeepSpeed's gradient_allreduce_op, a "
        "parameter server that waits for all workers (average, sum) or for none (separate, its default)",
    )
    parser.add_argument("--lr", dest="learning_rate", type=positive_float, help="the script's learning rate")


def run(options: argparse.Namespace) -> int:
    """From a script's settings, find how many samples make up an optimizer step, and the batch and learning rate of a
    recipe that trains the same. Needs no torch.
    """
    batch = effective_batch(options)
    size = batch.global_batch_size
    sizes = {"global_batch_size": size, "micro_batch_size": batch.samples_per_process}
    learning_rate = {"base_lr": options.learning_rate or "LR", "reference_batch_size": size, "scaling": "none"}
    print(
        f"effective batch: {size}",
        f"  micro-batch size      {batch.samples_per_process:>8}",
        f"  processes per update  {batch.processes_per_update:>8}",
        f"  accumulation          {batch.accumulation:>8}",
        "in the recipe:",
        f'  "batch": {json.dumps(sizes)},',
        f'  "learning_rate": {json.dumps(learning_rate)}',
        'for another batch, change global_batch_size, and scaling to "linear" (SGD) or "sqrt" (Adam): see the plan',
        sep="\n",
    )
    factor = batch.processes_per_update
    if options.gradients == "sum" and factor > 1:
        print(
            f"the script's gradients are {factor} times as large as the recipe's, which are means: for SGD, multiply "
            f"the learning rate by {factor} and divide the weight decay by {factor}; for clipping, divide the norm by "
            f"{factor}; for Adam, no change"
        )
    return 0


class EffectiveBatch(NamedTuple):
    """What makes up one update of a script's weights."""

    samples_per_process: int  # for one backward pass
    processes_per_update: int  # whose gradients make it up
    accumulation: int  # backward passes of each

    @property
    def global_batch_size(self) -> int:
        """The effective batch in samples."""
        return self.samples_per_process * self.processes_per_update * self.accumulation


def effective_batch(options: argparse.Namespace) -> EffectiveBatch:
    """The effective batch of a script with the numbers of `add_options`.

    Raises:
        UserError: The numbers contradict each other.
    """
    size = options.batch_size
    processes = options.nodes * options.devices
    is_split = options.split_batches
    if options.framework == DATA_PARALLEL:
        if options.nodes > 1 or is_split or options.gradients:
            raise UserError("--from dp has no --nodes, --split-batches or --gradients; remove them, or use --from ddp")
        # In effect, its devices are processes that share the batch, if they get equal shares.
        is_split = True
        if size % processes:
            processes = 1
    if is_split and size % processes:
        raise UserError(
            f"--batch-size {size} --split-batches: not a multiple of the {processes} processes; "
            f"{nearest_multiples(size, processes)}; or remove --split-batches"
        )
    gradients = options.gradients or ("separate" if options.framework == PARAMETER_SERVER else "average")
    return EffectiveBatch(
        samples_per_process=size // processes if is_split else size,
        processes_per_update=1 if gradients == "separate" else processes,
        accumulation=options.accumulation,
    )
