"""The words of the `largebatch` command: subcommands, their options, and what `--help` says of them."""

import argparse
import math
import textwrap
from pathlib import Path

from largebatch import __version__
from largebatch.batch.elsewhere import FRAMEWORKS

WIDTH = 100
EXIT_CODES = "Exit codes: 0 done, 1 a check failed, 2 the input cannot be used."


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. It imports none of the subcommands' modules, so that it takes no time."""
    parser = argparse.ArgumentParser(
        prog="largebatch",
        description="Plan large-batch training recipes, and prove that they train the same everywhere.",
        epilog=f"{EXIT_CODES} largebatch COMMAND --help has examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"largebatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan",
        help="explain the plan of a recipe for a number of processes",
        description="Print what a recipe would do on a number of processes; needs no GPU, no data and no torch. Or, on "
        "several, what each strategy holds and sends, and which to take.",
        epilog="""examples:
  largebatch plan recipes/image_classification/resnet50_imagenet_8k.json --world-size 256
  largebatch plan recipes/causal_lm/llama_8b.json --world-sizes 8,64,512 --gpu-memory 80

Fields are overridden as in a run: --batch.global_batch_size 512.""",
        allow_abbrev=False,
    )
    plan.add_argument("config", type=Path, help="the recipe's JSON file")
    processes = plan.add_mutually_exclusive_group(required=True)
    processes.add_argument("--world-size", type=_positive_int, help="data-parallel processes, one a GPU")
    processes.add_argument(
        "--world-sizes",
        type=_positive_ints,
        help="several, such as 8,64,512: memory and traffic of every strategy side by side instead of the plan; builds "
        "the model without memory, with torch, in some 10 seconds",
    )
    plan.add_argument(
        "--gpu-memory", type=_memory, metavar="GIB", help="what fits, and which strategy to take; with --world-sizes"
    )
    plan.add_argument("--script", type=Path, help="whose build_model to call; default: the train.py beside the recipe")
    plan.add_argument(
        "--accelerate-configs",
        type=Path,
        help="folder of the strategies' YAML files; default: accelerate_configs beside the recipe's folder",
    )
    _take_options_of_a_run(plan)
    plan.add_argument("--json", action="store_true", help="print the resolved plan, or all numbers, as JSON")

    verify = commands.add_parser(
        "verify",
        help="prove that a recipe trains the same on every strategy, number of processes and micro-batch size",
        description="Train the first steps of a recipe under every combination of strategy, number of processes and "
        "micro-batch size, on GPUs where there are enough and on CPU processes elsewhere, and compare loss, gradient "
        "norm, learning rate, weights and evaluation with one process. Exit code 0 only if all agree.",
        epilog="""examples:
  largebatch verify recipes/causal_lm/gpt_pydoc.json --world-sizes 2,4 --micro-batch-sizes 4,8
  largebatch verify recipes/causal_lm/llama_8b.json --stand-in --world-sizes 2 --steps 5

Fields are overridden as in a run: --batch.global_batch_size 64.""",
        allow_abbrev=False,
    )
    verify.add_argument("config", type=Path, help="the recipe's JSON file")
    verify.add_argument(
        "--strategies", type=_words, help="names of Accelerate configs; default: ddp,fsdp,zero1,zero2,zero3"
    )
    verify.add_argument("--world-sizes", type=_positive_ints, default=[1, 2, 4], help="default: 1,2,4")
    verify.add_argument(
        "--micro-batch-sizes",
        type=_positive_ints,
        help="default: the recipe's own and, without BatchNorm and dropout, half of it",
    )
    verify.add_argument(
        "--stand-in",
        action="store_true",
        help="instead of data from a hub train on small ones that are always there, in batches of 32 samples",
    )
    verify.add_argument("--steps", type=_positive_int, default=20, help="optimizer steps to train; default: 20")
    verify.add_argument("--script", type=Path, help="default: the train.py beside the recipe")
    verify.add_argument(
        "--accelerate-configs",
        type=Path,
        help="folder of the strategies' YAML files; default: accelerate_configs beside the recipe's folder",
    )
    verify.add_argument("--output", type=Path, help="the JSON to write; default: runs/RECIPE.verify.json")

    checkpoints = commands.add_parser(
        "checkpoints",
        help="list the checkpoints of a run",
        description="List the checkpoints of a run, the newest first: step, by what they were written, size, age, and "
        "whether they can be used. Needs no torch. Exit code 1 if the newest cannot be resumed from.",
        epilog="""examples:
  largebatch checkpoints runs/resnet_digits --verify""",
        allow_abbrev=False,
    )
    checkpoints.add_argument("run_dir", type=Path, help="the run's folder")
    checkpoints.add_argument("--verify", action="store_true", help="read all files and compare their checksums")

    report = commands.add_parser(
        "report",
        help="write one HTML file on a run, or on several to compare them",
        description="Write a report from what is in run folders, of runs that are finished or not: results, plots "
        "against steps and samples, the plan in words, and what happened; of several runs side by side. One HTML file "
        "that loads nothing, and PNGs in a folder beside it. Needs matplotlib, and no torch.",
        epilog="""examples:
  largebatch report runs/resnet_digits
  largebatch report runs/batch_64 runs/batch_512 --out comparison.html""",
        allow_abbrev=False,
    )
    report.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="a run's folder")
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="default: report.html in the run's folder, or, of several runs, in the current one",
    )

    export = commands.add_parser(
        "export",
        help="write a checkpoint's weights for transformers' from_pretrained",
        description="Write the weights of a checkpoint, from any strategy and number of processes, as safetensors with "
        "the model's config, for from_pretrained. One parameter is in memory at a time.",
        epilog="""examples:
  largebatch export runs/gpt_pydoc gpt_pydoc
  largebatch export runs/gpt_pydoc/checkpoints/step_00000200 gpt_pydoc --dtype bfloat16""",
        allow_abbrev=False,
    )
    export.add_argument("checkpoint", type=Path, help="a checkpoint's folder, or a run's for its newest intact one")
    export.add_argument("out", type=Path, help="the folder to make")
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], help="default: as trained")

    tokenizer = commands.add_parser(
        "train-tokenizer",
        help="train a tokenizer on a recipe's documents",
        description="Train a byte-pair encoding on all documents of a recipe's training split, and save it as "
        "data.tokenizer takes it. The recipe may name the folder already.",
        epilog="""examples:
  largebatch train-tokenizer my_recipe.json --vocab-size 16384 --out my_tokenizer

Fields are overridden as in a run: --data.path json.""",
        allow_abbrev=False,
    )
    tokenizer.add_argument("config", type=Path, help="the recipe's JSON file")
    tokenizer.add_argument("--vocab-size", type=_positive_int, required=True, help="tokens at most; 258 or more")
    tokenizer.add_argument("--out", type=Path, required=True, help="the folder to make")

    preflight = commands.add_parser(
        "preflight",
        help="look at a node before a Slurm job trains on it",
        description="Print what this node finds: versions, GPUs, the shared run folder, the way to the other nodes and "
        "an all-reduce with them.",
        epilog="slurm/launch.sh runs it on every node of a job; docs/slurm.md says what it finds.",
        allow_abbrev=False,
    )
    preflight.add_argument("config", type=Path, help="the recipe's JSON file")
    preflight.add_argument("--accelerate-config", type=Path, required=True, help="the strategy's YAML file")
    preflight.add_argument("--folder", type=Path, required=True, help="a folder that all nodes share")
    preflight.add_argument("--token", required=True, help="what the file `token` in it says")
    preflight.add_argument("--rendezvous", required=True, metavar="HOST:PORT", help="where the processes will meet")
    preflight.add_argument("--gpus", type=int, required=True, help="GPUs of each node; 0 is a job on CPUs")
    preflight.add_argument("--world-size", type=_positive_int, required=True, help="processes of the job")

    _take_options_of_a_run(preflight)

    verdict = commands.add_parser(
        "preflight-verdict",
        help="name the bad nodes from what all nodes found",
        description="Compare the nodes' reports. Exit code 3 if there are bad nodes.",
        epilog="slurm/launch.sh runs it once `preflight` has run on every node.",
        allow_abbrev=False,
    )
    verdict.add_argument("reports", type=Path, help="file with what the nodes printed")
    verdict.add_argument("--nodes", type=_words, required=True, help="the job's nodes, with commas between")
    verdict.add_argument("--bad-nodes", type=Path, required=True, help="file to write the names of bad nodes to")

    lint = commands.add_parser(
        "lint",
        help="find mistakes in recipes, SLURM scripts and configs, before a job waits in the queue",
        description="Check recipes, sbatch scripts, Accelerate and DeepSpeed configs against each other, without a "
        "GPU, a cluster or torch. Each finding has its file and line, why it is wrong, what to write instead, and its "
        "rule's name. Exit code 1 if there are any.",
        epilog="""examples:
  largebatch lint
  largebatch lint slurm/gpt2_124m.sbatch""",
        allow_abbrev=False,
    )
    lint.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILES",
        help="what to check, with what it names; default: the repository that is the current folder",
    )

    submit = commands.add_parser(
        "submit",
        help="plan and check a recipe's SLURM job, submit it, and say how to follow it",
        description="Submit slurm/RECIPE.sbatch with sbatch: shows the batch on that many nodes, checks recipe, script "
        "and configs with the values given here, shows the sbatch line, runs it, and prints job, log and how to follow "
        "it. Exit code 1 if a check speaks against it; then nothing is submitted.",
        epilog="""examples:
  largebatch submit gpt2_124m --nodes 4 --gpus-per-node 8 --dry-run
  largebatch submit gpt2_124m --nodes 4 --gpus-per-node 8 --strategy zero3 --partition=gpu --optimizer.weight_decay 0

Fields of the recipe are overridden as in a run, --resume is the run's; all other options are sbatch's.""",
        allow_abbrev=False,
    )
    submit.add_argument("recipe", metavar="RECIPE", help="the recipe's JSON file, or its name")
    submit.add_argument("--nodes", required=True, help="nodes of the job, such as 4, or 2-4 for as many as there are")
    submit.add_argument("--gpus-per-node", help="default: the script's; without GPUs, one process a CPU")
    submit.add_argument("--strategy", help="the name of an Accelerate config; default: the script's")
    submit.add_argument("--run_dir", "--run-dir", type=Path, help="folder of the run; default: runs/RECIPE")
    submit.add_argument("--dry-run", action="store_true", help="show all that, and submit nothing")

    new = commands.add_parser(
        "new",
        help="copy a recipe as the beginning of a repository of your own",
        description="Copy a recipe, and all that it runs with, into a new folder that stands alone: train.py, JSON, "
        "sbatch script, launch.sh, Accelerate and DeepSpeed configs, a test, requirements and a README that says what "
        "to change first. All commands work there. Nothing is overwritten.",
        epilog="""examples:
  largebatch new my_job --recipe gpt2_124m
  largebatch new my_job --recipe llama_8b --strategy fsdp
  largebatch new my_job --recipe resnet_digits --vendor""",
        allow_abbrev=False,
    )
    new.add_argument("folder", type=Path, metavar="DIR", help="the folder to make; it may be there if it is empty")
    new.add_argument("--recipe", required=True, metavar="NAME", help="such as gpt2_124m, or causal_lm/gpt2_124m")
    new.add_argument("--strategy", help="the one that its script and README begin with; default: the recipe's script's")
    new.add_argument(
        "--vendor", action="store_true", help="copy the package as well, instead of naming it in requirements.txt"
    )

    effective = commands.add_parser(
        "effective-batch",
        help="the effective batch of a script for another framework, and what a recipe says instead",
        description="From the numbers of a script elsewhere, or its DeepSpeed or TrainingArguments JSON: how many "
        "samples an optimizer step is made of, what each process loads, how gradients are combined, and the batch "
        "and learning rate of a recipe that trains the same. Needs no torch.",
        epilog="""examples:
  64 samples shared by 2 nodes of 4 GPUs:
    largebatch effective-batch --from ddp --batch-size 64 --split-batches --nodes 2 --devices 4
  Lightning's batch_size, devices and accumulate_grad_batches, moved to a batch of 1024:
    largebatch effective-batch --from lightning --batch-size 32 --devices 8 --accumulation 2 \\
        --lr 0.1 --to-global-batch-size 1024 --scaling linear
  a file that says the batch:
    largebatch effective-batch ds_config.json --nodes 2 --devices 8
    largebatch effective-batch training_args.json --devices 8""",
        allow_abbrev=False,
    )
    _take_options_of_a_batch_elsewhere(effective)

    schema = commands.add_parser(
        "schema",
        help="print the JSON Schema of recipes",
        description="Print the JSON Schema that recipes name in their $schema, for editors.",
        epilog="""examples:
  largebatch schema > recipes/recipe.schema.json
  largebatch schema --markdown > docs/configuration.md""",
        allow_abbrev=False,
    )
    schema.add_argument("--markdown", action="store_true", help="print the configuration reference instead, to read")
    completion = commands.add_parser(
        "completion",
        help="print a script with which a shell completes this command",
        description="Print a script with which a shell completes subcommands, options, their values and files.",
        epilog="""examples, in a shell or its startup file:
  eval "$(largebatch completion bash)"
""",
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell")

    for command in commands.choices.values():
        # Examples stay as they are written, so that they can be copied.
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.description = textwrap.fill(command.description or "", WIDTH)
        command.epilog = f"{(command.epilog or '').rstrip()}\n\n{EXIT_CODES}"
    return parser


def _take_options_of_a_run(parser: argparse.ArgumentParser) -> None:
    """So that the words of a run can be given here as they are."""
    for name in ("--run_dir", "--resume", "--resume.allow_change"):
        parser.add_argument(name, help=argparse.SUPPRESS)


def _take_options_of_a_batch_elsewhere(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="a DeepSpeed JSON or a TrainingArguments JSON, instead of the options")
    parser.add_argument("--from", choices=FRAMEWORKS, help="where the script is from; a file says it itself")
    parser.add_argument(
        "--batch-size",
        type=_positive_int,
        help="of the loader: Lightning's batch_size, per_device_train_batch_size, train_micro_batch_size_per_gpu",
    )
    parser.add_argument("--devices", type=_positive_int, default=1, help="GPUs of each node; default: 1")
    parser.add_argument("--nodes", type=_positive_int, default=1, help="default: 1")
    parser.add_argument(
        "--accumulation",
        type=_positive_int,
        help="backward passes per optimizer step: accumulate_grad_batches, gradient_accumulation_steps; default: 1",
    )
    parser.add_argument(
        "--split-batches",
        action="store_true",
        help="all processes share the batch size: Accelerate's split_batches, or batch_size // world_size in a script",
    )
    parser.add_argument(
        "--loss", choices=["mean", "sum"], default="mean", help="over the samples of a backward pass; default: mean"
    )
    parser.add_argument(
        "--gradients",
        choices=["average", "sum", "separate"],
        help="how processes combine them, where that can be chosen: Horovod's op, DeepSpeed's gradient_allreduce_op, "
        "a parameter server that waits for all (average, sum) or for none (separate, the default of it)",
    )
    parser.add_argument("--lr", type=_positive_float, help="learning rate there; default: the file's, if it has one")
    parser.add_argument("--to-global-batch-size", type=_positive_int, help="here; default: the effective batch there")
    parser.add_argument(
        "--micro-batch-size", type=_positive_int, help="here; default: as many samples a device as there"
    )
    parser.add_argument("--world-size", type=_positive_int, help="processes here; default: as many devices as there")
    parser.add_argument(
        "--scaling", choices=["linear", "sqrt", "none"], help="of the learning rate: linear (SGD), sqrt (Adam), none"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise argparse.ArgumentTypeError("the list is empty; separate with commas")
    return words


def _positive_ints(text: str) -> list[int]:
    return [_positive_int(word) for word in _words(text)]


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _memory(text: str) -> int:
    """Bytes, of a number of GiB, or one with its unit."""
    number = text.strip()
    unit = 2**30
    for name, size in (("GIB", 2**30), ("GB", 10**9), ("G", 2**30)):
        if number.upper().endswith(name):
            number, unit = number[: -len(name)].strip(), size
            break
    size_in_bytes = _positive_float(number) * unit
    if size_in_bytes == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is more than there is; write it in GiB, such as 80")
    return round(size_in_bytes)
