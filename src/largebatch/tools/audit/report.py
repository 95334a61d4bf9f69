"""The layouts that a loop is tried in, and what is said of them."""

import argparse
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from largebatch.errors import UserError
from largebatch.tools.audit.causes import faults, faults_of_first_steps, shown
from largebatch.tools.audit.loop import ALONE, Layout, Loop
from largebatch.tools.audit.observe import CONTRACT, Observed
from largebatch.tools.audit.outcome import MAX_NOISE, Outcome, Reference
from largebatch.tools.local_jobs.jobs import preload_tasks
from largebatch.words import bulleted, counted, wrapped

NUM_FIRST_STEPS = 4
LINE = "{:>9}{:>14}{:>13}  {}"


def audit(options: argparse.Namespace) -> bool:
    """Try all layouts and print what is wrong; return whether nothing is."""
    # Where sums come out in one order.
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    loop, layouts = _given(options)
    loop, reference = _in_finest_precision(loop)
    show = (lambda *_, **__: None) if options.json else print
    show(
        f"{loop.file.name}: {counted(loop.batch_size, 'sample')} a step in {loop.precision} on the CPU, each layout "
        "against one backward pass of one process\n\n"
        + LINE.format("processes", "accumulation", "micro-batch", "gradient, beside that of one process")
    )
    outcomes: list[Outcome] = []
    wrong: list[str] = []
    for layout in layouts:
        try:
            outcomes.append(Outcome(layout, loop.call(layout, range(loop.batch_size)), reference))
            said = shown(outcomes[-1])
        except UserError as error:
            wrong.append(str(error))
            said = "failed"
        show(LINE.format(layout.world_size, layout.accumulation, loop.batch_size // layout.parts, said), flush=True)
    wrong += faults(outcomes)
    remarks = list(_remarks(outcomes))
    try:
        # Parameter groups often have one rate.
        wrong += dict.fromkeys(faults_of_first_steps(_first_steps(loop, layouts)))
        remarks += [] if wrong else _short_batch(loop, layouts, reference)
    except UserError as error:
        remarks.append(f"not compared: {error}")
    summary = f"your effective batch is {loop.batch_size} samples a step, and the optimizer gets {_meaning(reference)}"
    if options.json:
        tried = [{**asdict(each.layout), "gradient": shown(each)} for each in outcomes]
        document = {"precision": loop.precision, "batch": loop.batch_size, "layouts": tried}
        print(json.dumps({**document, "summary": summary, "wrong": wrong, "remarks": remarks}, indent=2))
    for title, lines in (("wrong", wrong), ("remarks", remarks)):
        if lines:
            show(f"\n{title}:" + bulleted("\n    ".join(wrapped(line)) for line in lines))
    show("\n" + "\n".join(wrapped(f"in {'one process' if wrong else 'all layouts'}, {summary}")))
    return not wrong


def _given(options: argparse.Namespace) -> tuple[Loop, list[Layout]]:
    """The loop and the layouts that the options name."""
    file, _, function = options.loop.partition(":")
    for path in filter(None, (Path(file), options.accelerate)):
        if not path.is_file():
            raise UserError(f"{path}: no such file; give a Python file that defines {CONTRACT}")
    loop = Loop(Path(file).resolve(), function or "audit", options.batch, options.accelerate, options.timeout)
    layouts = [
        Layout(world_size, accumulation)
        for world_size in options.world_sizes
        for accumulation in options.accumulations
        if world_size * accumulation > 1
    ]
    if not layouts or any(loop.batch_size % each.parts for each in layouts):
        options.refuse(
            f"a batch of {loop.batch_size} cannot be divided over {options.world_sizes} processes with "
            f"{options.accumulations} micro-batches; write a --batch of a multiple of "
            f"{math.lcm(2, *(each.parts for each in layouts))}, and two layouts or more"
        )
    if "transformers" in loop.file.read_text(encoding="utf-8", errors="replace"):
        preload_tasks([], "transformers.trainer")
    return loop, layouts


def _in_finest_precision(loop: Loop) -> tuple[Loop, Reference]:
    """The loop in fp64 if its code allows that, or else in fp32."""
    try:
        return loop, _reference(loop)
    except UserError as error:
        if not re.search("double|dtype", str(error), re.IGNORECASE):
            raise
    loop = replace(loop, precision="float32")
    return loop, _reference(loop)


def _reference(loop: Loop) -> Reference:
    """One process with one backward pass of the batch, forward and in reverse order, and each sample alone."""
    indices = range(loop.batch_size)
    observed, reverse = (loop.call(ALONE, each)[0] for each in (indices, indices[::-1]))
    if len(observed.steps) != 1 or len(reverse.steps) != 1:
        raise UserError(
            f"{counted(loop.batch_size, 'sample')} in one micro-batch make {counted(len(observed.steps), 'step')} of a "
            "torch optimizer; train on the given indices alone, once, in micro-batches of micro_batch_size, and step "
            "after `accumulation` of them"
        )
    samples = []
    # A sample alone has no statistics for BatchNorm, and no negatives.
    with suppress(UserError):
        samples = [loop.call(ALONE, [sample])[0] for sample in indices]
    found = observed.steps[0].unclipped
    again = reverse.steps[0].unclipped
    if not found or found.keys() != again.keys():
        raise UserError(
            "the optimizer gets no gradient, or not always of the same parameters; call backward before step"
        )
    noise = {name: again[name] - found[name] for name in found}
    reference = Reference(observed, samples if all(each.steps for each in samples) else [], noise, loop.precision)
    if not reference.relative_noise < MAX_NOISE:
        raise UserError(
            f"with the samples in reverse order, the gradient differs by {reference.relative_noise:.2g} of itself: "
            "random numbers do not follow from a seed or depend on the order; seed them, turn shuffling and "
            "augmentation off, and train in fp32"
        )
    return reference


def _first_steps(loop: Loop, layouts: Sequence[Layout]) -> dict[Layout, list[Observed]]:
    """What each process notes in the first steps, by layout."""
    tried = [ALONE, *(each for each in layouts if 1 in (each.world_size, each.accumulation))]
    return {each: loop.call(each, range(NUM_FIRST_STEPS * loop.batch_size)) for each in tried}


def _short_batch(loop: Loop, layouts: Sequence[Layout], whole_batch: Reference) -> list[str]:
    """What the last step of an epoch gets, if an odd number of samples is left."""
    size = loop.batch_size // 2 + 1
    observed = loop.call(ALONE, range(size))[0]
    if not observed.steps:
        return [f"if {counted(size, 'sample')} are left at the end, they make no step"]
    reference = Reference(observed, whole_batch.samples[:size], whole_batch.noise, loop.precision)
    outcomes = [Outcome(each, loop.call(each, range(size)), reference) for each in layouts]
    others = "; ".join(f"{each.layout}: {found}" for each in outcomes if (found := shown(each)) != "the same")
    cause = (
        "processes or micro-batches of fewer samples weigh as much as the others, or samples are repeated or dropped"
    )
    return [f"if {counted(size, 'sample')} are left at the end, {others} ({cause})"] if others else []


def _remarks(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What is not wrong by itself, but worth knowing."""
    several = [each.by_rank for each in outcomes if each.layout.world_size > 1]
    if any(each.buffers != ranks[0].buffers for ranks in several for each in ranks):
        yield "buffers, such as BatchNorm's averages, differ between processes at the end; one process's own is saved"
    if any(ranks[0].dropout and ranks[0].dropout == ranks[1].dropout for ranks in several):
        yield "all processes draw the same dropout masks: seed torch with seed + rank before training"
    if outcomes and outcomes[0].by_rank[0].dropout:
        yield "compared without dropout"
    if outcomes and outcomes[0].by_rank[0].unused:
        yield f"parameters without a gradient: {', '.join(outcomes[0].by_rank[0].unused)}"


def _meaning(reference: Reference) -> str:
    weights = reference.weights
    if weights is None:
        return "a gradient in which samples change each other's, or cannot be told apart"
    if weights.max() - weights.min() > 0.01 * weights.max():
        return f"a sum over them with weights of {weights.min():.3g} to {weights.max():.3g}, as by their targets"
    means = {1 / len(weights): "the mean", 1: "the sum"}
    near = [said for weight, said in means.items() if np.isclose(weights.mean(), weight, rtol=0.01)]
    return f"{near[0] if near else f'{weights.mean():.4g} times the sum'} over them"
