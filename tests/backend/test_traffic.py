"""Bytes per optimizer step, counted at the collectives and compared with the theory, to the byte.

Ψ is the bytes of all gradients, which are fp32, as weights are, whatever the precision; A is the number of
micro-batches. A ring of p processes gathers N bytes, or reduces and scatters them, with N (p - 1) / p sent by each; an
all-reduce is both. So they count N, N and 2 N here, which is each process's traffic where there are many.

    strategy                        gathered             reduced     together
    ddp                             0                    2 Ψ         2 Ψ
    fsdp                            2 A Ψ                Ψ           (2 A + 1) Ψ, less what stays gathered
    zero1                           Ψ                    2 Ψ         3 Ψ
    zero2                           Ψ                    2 A Ψ       (2 A + 1) Ψ
    zero1 reductions                Ψ                    Ψ           2 Ψ
    zero2 reductions                Ψ                    A Ψ         (A + 1) Ψ
    zero3 large                     2 A Ψ                A Ψ         3 A Ψ
    zero3 not small                 A Ψ                  A Ψ         2 A Ψ
    zero3                           Ψ                    A Ψ         (A + 1) Ψ

What differs from the ZeRO paper's 2 Ψ, 2 Ψ and 3 Ψ for A = 1 (Rajbhandari et al. 2020, arXiv 1910.02054, section 7):

- DeepSpeed all-reduces the buckets of stages 1 and 2, and throws away what is not its own. With "zero_optimization"
  {"use_multi_rank_bucket_allreduce": false} ("reductions" here) it reduces each part to its owner instead: Ψ less, for
  as many calls to a bucket as it has owners, and, on a GPU with overlap_comm, a wait of the host before each of them.
- ZeRO-3 keeps parameters of at most stage3_param_persistence_threshold elements gathered (1e5; after each update they
  are gathered once), and frees others only if fewer than stage3_max_reuse_distance (1e9) come before they are used
  again: "zero3 large" is what a model is that exceeds both. It gathers what two modules share for each of them.
- FSDP2 keeps two units gathered from the forward to the backward pass: the root, with what is in no block, and what
  Accelerate makes the tail, the final norm with the output layer.
"""

import json
from collections import Counter
from functools import cache, partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from collectives import Recorder, bytes_sent_in, padded, padded_rows, replay
from jobs import run_job, write_zero_config
from paths import PYDOC

# Sizes that neither 2 nor 4 processes divide.
MODEL = ("--model.num_layers=1", "--model.hidden_size=34", "--model.num_heads=2", "--data.block_size=17")
MICRO_BATCH_SIZE = 2
ACCUMULATION = [1, 1, 1, 1, 3, 3]  # of each step; the first and the last are logged
COUNTED = [2, 3, 4]  # ZeRO-3 learns in which order parameters are used from the first two passes
FLOAT = torch.float32.itemsize

REDUCTIONS = {"use_multi_rank_bucket_allreduce": False}
# What a model is to ZeRO-3 that is larger than its thresholds.
LARGE = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
NOT_SMALL = {"stage3_param_persistence_threshold": 0}


# Strategies as shipped, or with other settings in DeepSpeed's "zero_optimization".
ENGINES = {
    "ddp": ("ddp", None),
    "fsdp": ("fsdp", None),
    "fsdp without clipping": ("fsdp", None),
    "zero1": ("zero1", None),
    "zero1 reductions": ("zero1", REDUCTIONS),
    "zero2": ("zero2", None),
    "zero2 reductions": ("zero2", REDUCTIONS),
    "zero3": ("zero3", None),
    "zero3 not small": ("zero3", NOT_SMALL),
    "zero3 large": ("zero3", LARGE),
}
JOBS = [(name, 2) for name in ENGINES] + [(name, 4) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3 large")]


def steps_of_a_run(run_dir, words):
    """The shapes of the model's parameters, each step's collectives, bytes on the sockets, and the losses."""
    from torch import distributed
    from torch.nn.functional import cross_entropy

    from largebatch.config import CausalLMConfig, load_config
    from largebatch.data.text import text_sources
    from largebatch.optim import build_optimizer
    from largebatch.run import Run, RunOptions
    from reference import load_recipe_module

    run = Run(load_config(PYDOC, words, CausalLMConfig), RunOptions(run_dir))
    train_set, _ = run.load(text_sources)
    model = load_recipe_module(PYDOC).build_model(run.config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    model, _ = run.prepare(model, build_optimizer(model, run.plan))
    steps, losses, sent = run.steps(train_set), [], {}

    def take_step():
        step = next(steps)
        for batch in step.micro_batches():
            logits = model(input_ids=batch["input_ids"]).logits
            loss = cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="sum")
            losses.append(float(loss.detach()))
            step.backward(loss)
        step.update()

    def collectives_of_a_step():
        with Recorder() as recorder:
            take_step()
        return recorder.started

    started = [collectives_of_a_step() for _ in ACCUMULATION[:-2]]
    sent["step"] = bytes_sent_in(lambda: started.append(collectives_of_a_step()))
    sent["the same collectives"] = bytes_sent_in(partial(replay, started[-1]))
    sent["nothing"] = bytes_sent_in(lambda: None)
    group = distributed.group.WORLD._get_backend(torch.device("cpu"))
    with Recorder() as recorder:
        group.allreduce([torch.zeros(1)]).wait()
    assert not recorder.started
    sent["one that is not seen"] = bytes_sent_in(lambda: group.allreduce([torch.zeros(1)]).wait())
    return shapes, started, sent, losses


@cache
def steps_by_rank(name, world_size):
    """The result of `steps_of_a_run` in each process of a job with one of ENGINES."""
    strategy, zero_settings = ENGINES[name]
    sizes = [MICRO_BATCH_SIZE * world_size * accumulation for accumulation in ACCUMULATION]
    grows = ACCUMULATION.index(3)
    phases = [{"from": {"steps": 0}, "size": sizes[0]}, {"from": {"steps": grows}, "size": sizes[grows]}]
    words = (
        *MODEL,
        f"--batch.micro_batch_size={MICRO_BATCH_SIZE}",
        f"--batch.global_batch_size={json.dumps(phases)}",
        f"--train.stop_after_steps={len(ACCUMULATION)}",
        "--logging.every=100",
        *(["--optimizer.clip_norm=null"] if name == "fsdp without clipping" else []),
    )
    with TemporaryDirectory() as name_of_folder:
        folder, configs = Path(name_of_folder), None
        if zero_settings is not None:
            write_zero_config(folder, int(strategy[-1]), zero_settings)
            configs = folder
        return run_job(
            steps_of_a_run,
            folder / "run",
            words,
            strategy=strategy,
            world_size=world_size,
            accelerate_configs=configs,
        )


def flat_groups(shapes):
    """Elements of the optimizer's groups: with weight decay, and norms and biases without."""
    return [
        sum(prod(shape) for shape in shapes.values() if len(shape) > 1),
        sum(prod(shape) for shape in shapes.values() if len(shape) == 1),
    ]


def elements_by_hand(name, shapes, world_size, accumulation):
    """Of a step: the volume in elements, and the small collectives beside, by `Collective.short`."""
    psi = sum(prod(shape) for shape in shapes.values())
    # A request to stop; nothing else is ours.
    vote = ("all_reduce", 1, torch.int64)
    # For clipping, DeepSpeed sums the squares of its parts: of each parameter group.
    norms = [("all_reduce", 1, torch.float32)] * 2
    if name == "ddp":
        return 2 * psi, [vote]
    if name.startswith("fsdp"):
        # Each parameter's rows are filled up to a multiple of the processes.
        rows = {parameter: padded_rows(shape, world_size) for parameter, shape in shapes.items()}
        whole = sum(rows.values())
        blocks = sum(size for parameter, size in rows.items() if ".h." in parameter)
        # The blocks are gathered for the backward pass again; positions (the root), and the embedding, which is
        # the output layer too, with the final norm (the tail) are not. Clipping sums one number a parameter.
        norms = [("all_reduce", len(shapes), torch.float32)] if name == "fsdp" else []
        return accumulation * (whole + blocks) + whole, [vote, *norms]
    if name.startswith(("zero1", "zero2")):
        # A group is one flat buffer, whose parts begin at multiples of 2 elements: at 4 bytes for fp16.
        gathered = sum(padded(size, 2 * world_size) for size in flat_groups(shapes))
        reductions = accumulation if name.startswith("zero2") else 1
        return (1 if "reductions" in name else 2) * reductions * psi + gathered, [vote, *norms]
    # Each parameter is filled up to a multiple of the processes.
    whole = sum(padded(prod(shape), world_size) for shape in shapes.values())
    # The embedding is the output layer too, and gathered for either.
    shared = padded(prod(shapes["transformer.wte.weight"]), world_size)
    gathered = {
        "zero3 large": 2 * accumulation * (whole + shared),
        "zero3 not small": accumulation * whole,
        "zero3": whole,
    }[name]
    norms = [("all_reduce", 1, torch.float64)] * 2
    return gathered + accumulation * whole, [vote, *norms]


@pytest.mark.parametrize(("name", "world_size"), JOBS)
def test_a_step_sends_what_the_theory_says(name, world_size):
    """And between log points nothing else but the vote on a stop and the gradient's norm, where it is clipped."""
    for shapes, started, _, _ in steps_by_rank(name, world_size):
        for step in COUNTED:
            volume, beside = elements_by_hand(name, shapes, world_size, ACCUMULATION[step])
            small = [each for each in started[step] if each.elements <= len(shapes)]
            large = [each for each in started[step] if each.elements > len(shapes)]
            assert Counter(each.short for each in small) == Counter(beside), step
            assert {each.dtype for each in large} == {torch.float32}
            assert sum(each.volume for each in large) == volume * FLOAT, (step, large)


@pytest.mark.parametrize(("name", "world_size"), JOBS)
def test_no_collective_escapes_the_count(name, world_size):
    """A step's bytes on the sockets are those of the collectives that were counted in it, made again, on each process.

    A single number that is reduced by a way around what is counted would be seen.
    """
    for _, started, sent, _ in steps_by_rank(name, world_size):
        assert len(started[-1]) > 1
        assert sent["step"] == sent["the same collectives"]
        assert sent["one that is not seen"] > sent["nothing"] > 0


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_deepspeeds_ways_of_reducing_train_alike(stage):
    losses = [[result[-1] for result in steps_by_rank(name, 2)] for name in (stage, f"{stage} reductions")]
    assert losses[0] == losses[1]
    assert len(losses[0][0]) == sum(ACCUMULATION[:-1])
