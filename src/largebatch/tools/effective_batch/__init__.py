"""`largebatch effective-batch`: the batch of a script for another framework, and the same batch in a recipe."""

import argparse

from largebatch.tools.effective_batch.other_frameworks import FRAMEWORKS
from largebatch.tools.options import Commands, add_command, positive_float, positive_int


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "effective-batch",
        run,
        help="find the effective batch of a script for another framework, and how to write it in a recipe",
        description="From a script's settings, or its DeepSpeed or TrainingArguments JSON, find how many samples make "
        "up an optimizer step, what each process loads, how gradients are combined, and the batch and learning rate of "
        "a recipe that trains the same. Needs no torch.",
        epilog="""examples:
  64 samples shared by 2 nodes of 4 GPUs:
    largebatch effective-batch --from ddp --batch-size 64 --split-batches --nodes 2 --devices 4
  Lightning's batch_size, devices and accumulate_grad_batches, scaled to a batch of 1024:
    largebatch effective-batch --from lightning --batch-size 32 --devices 8 --accumulation 2 \\
        --lr 0.1 --to-global-batch-size 1024 --scaling linear
  a file that contains the batch size:
    largebatch effective-batch ds_config.json --nodes 2 --devices 8
    largebatch effective-batch training_args.json --devices 8""",
    )
    parser.add_argument("file", nargs="?", help="a DeepSpeed or TrainingArguments JSON, instead of the options")
    parser.add_argument(
        "--from", dest="framework", choices=FRAMEWORKS, help="the script's framework; a file implies it"
    )
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        help="the data loader's: Lightning's batch_size, per_device_train_batch_size, train_micro_batch_size_per_gpu",
    )
    parser.add_argument("--devices", type=positive_int, default=1, help="GPUs per node; default: 1")
    parser.add_argument("--nodes", type=positive_int, default=1, help="number of nodes; default: 1")
    parser.add_argument(
        "--accumulation",
        type=positive_int,
        help="backward passes per optimizer step: accumulate_grad_batches, gradient_accumulation_steps; default: 1",
    )
    parser.add_argument(
        "--split-batches",
        action="store_true",
        help="all processes share the batch size: Accelerate's split_batches, or batch_size // world_size in a script",
    )
    parser.add_argument(
        "--loss", choices=["mean", "sum"], default="mean", help="of a backward pass, over its samples; default: mean"
    )
    parser.add_argument(
        "--gradients",
        choices=["average", "sum", "separate"],
        help="how processes combine gradients, if they can choose: Horovod's op, DeepSpeed's gradient_allreduce_op, a "
        "parameter server that waits for all workers (average, sum) or for none (separate, its default)",
    )
    parser.add_argument("--lr", dest="learning_rate", type=positive_float, help="the script's; default: the file's")
    parser.add_argument("--to-global-batch-size", type=positive_int, help="the recipe's; default: the effective batch")
    parser.add_argument("--micro-batch-size", type=positive_int, help="the recipe's; default: the script's per device")
    parser.add_argument("--world-size", type=positive_int, help="the recipe's processes; default: the script's devices")
    parser.add_argument(
        "--scaling", choices=["linear", "sqrt", "none"], help="of the learning rate: linear (SGD), sqrt (Adam) or none"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(options: argparse.Namespace) -> int:
    from largebatch.tools.effective_batch.answer import answer

    print(answer(options))
    return 0
