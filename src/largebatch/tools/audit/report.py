"""The layouts that a loop is tried in, and what is said of them."""

import argparse
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.linalg import norm

from largebatch.errors import UserError
from largebatch.tools.audit.causes import faults, faults_of_first_steps
from largebatch.tools.audit.loop import ALONE, Layout, Loop
from largebatch.tools.audit.observe import CONTRACT
from largebatch.tools.audit.outcome import MULTIPLES_OF_NOISE, Outcome, Reference, span
from largebatch.tools.local_jobs.jobs import preload_tasks
from largebatch.words import bulleted, counted, some, wrapped

NUM_FIRST_STEPS = 4
# What rounding may make of an update, as a part of it: Muon's iterations in bf16 differ by 2 % if they are sharded.
UPDATE = 0.1
# What the order of samples may make of a gradient, as a part of it.
MAX_NOISE = 0.02
LINE = "{:>9}{:>14}{:>13}  {}"


def audit(options: argparse.Namespace) -> bool:
    """Try all layouts and print what is wrong; return whether nothing is."""
    # Where sums come out in one order.
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    loop, layouts = _given(options)
    reference = _in_finest_precision(loop)
    loop = reference.loop
    rows: list[dict[str, Any]] = []
    outcomes: dict[Layout, Outcome] = {}
    wrong: list[str] = []
    if not options.json:
        print(
            f"{loop.file.name}: {counted(loop.batch_size, 'sample')} a step in {loop.precision} on the CPU, each "
            "layout against one backward pass of one process\n\n"
            + LINE.format("processes", "accumulation", "micro-batch", "gradient, beside that of one process")
        )
    for layout in layouts:
        try:
            outcomes[layout] = reference.outcome(layout, loop.batch_size)
            said = outcomes[layout].said
        except UserError as error:
            wrong.append(str(error))
            said = "failed"
        rows.append({**asdict(layout), "micro_batch_size": loop.batch_size // layout.parts, "gradient": said})
        if not options.json:
            print(LINE.format(*rows[-1].values()), flush=True)
    wrong += faults(outcomes)
    remarks = list(_remarks(outcomes.values()))
    try:
        steps = range(NUM_FIRST_STEPS * loop.batch_size)
        tried = (each for each in [ALONE, *layouts] if 1 in (each.world_size, each.accumulation))
        # Parameter groups often have one rate.
        wrong += dict.fromkeys(faults_of_first_steps({each: loop.call(each, steps) for each in tried}))
        if not wrong:
            remarks += _short_batch(reference, layouts)
    except UserError as error:
        remarks.append(f"not compared: {error}")
    summary = f"your effective batch is {loop.batch_size} samples a step, and the optimizer gets {_meaning(reference)}"
    sections = {"wrong": wrong, "remarks": remarks}
    if options.json:
        document = {"precision": loop.precision, "batch": loop.batch_size, "layouts": rows, "summary": summary}
        print(json.dumps(document | sections, indent=2))
        return not wrong
    for title, lines in sections.items():
        if lines:
            print(f"\n{title}:" + bulleted("\n    ".join(wrapped(line)) for line in lines))
    print("\n" + "\n".join(wrapped(f"in {'one process' if wrong else 'all layouts'}, {summary}")))
    return not wrong


def _given(options: argparse.Namespace) -> tuple[Loop, list[Layout]]:
    """The loop and the layouts that the options name."""
    file, _, function = options.loop.partition(":")
    for path in filter(None, (Path(file), options.accelerate)):
        if not path.is_file():
            raise UserError(f"{path}: no such file; give a Python file that defines {CONTRACT}")
    if not re.fullmatch(r"[^.]+\.py", Path(file).name):
        raise UserError(f"{file}: Python cannot import a file of this name; rename it, such as train.py")
    loop = Loop(Path(file).resolve(), function or "audit", options.batch, options.accelerate, options.timeout)
    layouts = [Layout(w, a) for w in options.world_sizes for a in options.accumulations if w * a > 1]
    multiple = math.lcm(*(each.parts for each in layouts))
    if not layouts or loop.batch_size % multiple:
        options.refuse(
            f"a batch of {loop.batch_size} cannot be divided over {options.world_sizes} processes with "
            f"{options.accumulations} micro-batches; write a --batch of a multiple of {multiple}, and two layouts or "
            "more"
        )
    if "transformers" in loop.file.read_text(encoding="utf-8", errors="replace"):
        preload_tasks([], "transformers.trainer")
    return loop, layouts


def _in_finest_precision(loop: Loop) -> Reference:
    """What the loop is compared with, in fp64 if its code allows that, or else in fp32."""
    try:
        return _reference(loop)
    except UserError as error:
        if not re.search("double|dtype", str(error), re.IGNORECASE):
            raise
    return _reference(replace(loop, precision="float32"))


def _reference(loop: Loop) -> Reference:
    """One process with one backward pass of the batch, forward and in reverse order, and each sample alone."""
    indices = range(loop.batch_size)
    observed = loop.one_step(indices)
    gradient = observed.unclipped[0]
    if not gradient.any():
        raise UserError("the optimizer gets no gradient; call backward before step")
    reverse = loop.one_step(indices[::-1])
    noise = reverse.unclipped[0] - gradient
    if not norm(noise) < MAX_NOISE * norm(gradient):
        raise UserError(
            f"with the samples in reverse order, the gradient differs by {norm(noise) / norm(gradient):.2g} of itself: "
            "random numbers do not follow from a seed or depend on the order; seed them, turn shuffling and "
            "augmentation off, and train in fp32"
        )
    samples = []
    # A sample alone has no statistics for BatchNorm, and no negatives.
    with suppress(UserError):
        samples = [loop.one_step([sample]).unclipped[0] for sample in indices]
    update_noise = max(UPDATE * norm(observed.update), MULTIPLES_OF_NOISE * norm(reverse.update - observed.update))
    return Reference(loop, observed.parts, gradient, noise, observed.update, update_noise, samples)


def _short_batch(whole: Reference, layouts: Sequence[Layout]) -> Iterator[str]:
    """What the last step of an epoch gets, if an odd number of samples is left."""
    size = whole.loop.batch_size // 2 + 1
    left = f"if {counted(size, 'sample')} are left at the end"
    observed = whole.loop.call(ALONE, range(size))[0]
    if not observed.gradients:
        yield f"{left}, they make no step"
        return
    reference = replace(whole, gradient=observed.unclipped[0], update=observed.update, samples=whole.samples[:size])
    found = {layout: reference.outcome(layout, size).said for layout in layouts}
    if others := "; ".join(f"{layout}: {said}" for layout, said in found.items() if said != "the same"):
        yield (
            f"{left}, {others} (processes or micro-batches of fewer samples weigh as much as the others, or samples "
            "are repeated or dropped)"
        )


def _remarks(outcomes: Collection[Outcome]) -> Iterator[str]:
    """What is not wrong by itself, but worth knowing."""
    if not outcomes:
        return
    first, *others = max((each.by_rank for each in outcomes), key=len)
    if any(each.buffers != first.buffers for each in others):
        yield "buffers, such as BatchNorm's averages, differ between processes at the end; one process's own is saved"
    if first.dropout:
        yield "compared without dropout"
        if first.dropout in (each.dropout for each in others):
            yield "all processes draw the same dropout masks: seed torch with seed + rank before training"
    if first.unused:
        yield f"parameters without a gradient: {some(first.unused)}"


def _meaning(reference: Reference) -> str:
    """What the optimizer gets in one process."""
    weights = reference.weights_in(reference.gradient)
    if weights is None:
        return "a gradient in which samples change each other's, or cannot be told apart"
    for weight, name in ((1 / len(weights), "the mean"), (1, "the sum")):
        if np.allclose(weights, weight, rtol=0.01):
            return f"{name} over them"
    return f"a sum over them with weights of {span(weights)}, as by their targets"
