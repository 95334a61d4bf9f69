"""The layouts that a loop is tried in, and what is said of them."""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from largebatch.errors import UserError
from largebatch.tools.audit.causes import faults, faults_of_first_steps
from largebatch.tools.audit.observe import CONTRACT
from largebatch.tools.audit.outcome import (
    ALONE,
    TOLERANCES,
    Layout,
    Loop,
    NotTogether,
    Outcome,
    Reference,
    reference_of,
    span,
)
from largebatch.tools.local_jobs.jobs import preload_tasks
from largebatch.words import bulleted, counted, some, wrapped

NUM_FIRST_STEPS = 4
LINE = "{:>11}{:>16}{:>13}  {}"


def audit(options: argparse.Namespace) -> bool:
    """Try all layouts and print what is wrong; return whether nothing is."""
    # Where sums come out in one order.
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    loop, layouts = _given(options)
    progress = partial(print, flush=True, file=sys.stderr)
    show = progress if options.json else partial(print, flush=True)
    progress(
        f"training {counted(loop.batch_size, 'sample')} in one process, together and each alone, then in "
        f"{counted(len(layouts), 'layout')}"
    )
    reference = reference_of(loop)
    loop = reference.loop
    show(
        f"{loop.file.name}: {counted(loop.batch_size, 'sample')} a step in {loop.precision} on the CPU, each layout "
        "against one backward pass of one process\n\n"
        + LINE.format("processes W", "accumulation A", "micro-batch", "gradient, beside that of one process")
    )
    rows = []
    outcomes: dict[Layout, Outcome] = {}
    wrong: list[str] = []
    for layout in layouts:
        said = "failed"
        try:
            outcomes[layout] = reference.outcome(layout, loop.batch_size)
            said = outcomes[layout].said
        except UserError as error:
            wrong.append(str(error))
        rows.append({**asdict(layout), "micro_batch_size": loop.batch_size // layout.parts, "gradient": said})
        show(LINE.format(*rows[-1].values()))
    wrong += faults(outcomes)
    remarks = list(_remarks(outcomes.values()))
    if reference.tolerance > TOLERANCES[torch.float32]:
        remarks.append(
            f"weights are {reference.whole.dtype}: differences of less than {reference.tolerance:.0%} of a "
            "parameter's gradient are not seen, and rounding may make more where samples' gradients cancel"
        )
    try:
        steps = range(NUM_FIRST_STEPS * loop.batch_size)
        tried = [each for each in [ALONE, *outcomes] if 1 in (each.world_size, each.accumulation)]
        progress(f"training the first {NUM_FIRST_STEPS} steps in {counted(len(tried), 'layout')}")
        wrong += faults_of_first_steps({each: loop.call(each, steps) for each in tried})
        if not wrong:
            progress("training what may be left at the end of an epoch")
            remarks += _short_batch(reference, outcomes, wrong)
    except UserError as error:
        remarks.append(f"not compared: {error}")
    summary = f"your effective batch is {loop.batch_size} samples a step, and the optimizer gets {_meaning(reference)}"
    sections = {"wrong": wrong, "remarks": remarks}
    for title, lines in sections.items():
        if lines:
            show(f"\n{title}:" + bulleted("\n    ".join(wrapped(line)) for line in lines))
    show("\n" + "\n".join(wrapped(f"in {'one process without accumulation' if wrong else 'all layouts'}, {summary}")))
    if options.json:
        document = {"precision": loop.precision, "batch": loop.batch_size, "layouts": rows, "summary": summary}
        print(json.dumps(document | sections, indent=2))
    return not wrong


def _given(options: argparse.Namespace) -> tuple[Loop, list[Layout]]:
    """The loop and the layouts that the options name."""
    file, _, function = options.loop.partition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"{path} is not a file; give a Python file that defines {CONTRACT}")
    if not re.fullmatch(r"[^.]+\.py", path.name):
        raise UserError(f"{file}: Python cannot import a file of this name; rename it, such as train.py")
    loop = Loop(path, function or "audit", options.batch, options.accelerate, options.timeout)
    layouts = [Layout(w, a) for w in options.world_sizes for a in options.accumulations if w * a > 1]
    multiple = math.lcm(*(each.parts for each in layouts))
    if not layouts:
        options.refuse("nothing to compare with one process and one micro-batch; write more of one of them")
    if loop.batch_size % multiple:
        options.refuse(
            f"a batch of {loop.batch_size} cannot be divided over {options.world_sizes} processes with "
            f"{options.accumulations} micro-batches; write a --batch of a multiple of {multiple}"
        )
    if "transformers" in loop.file.read_text(encoding="utf-8", errors="replace"):
        preload_tasks([], "transformers.trainer")
    return loop, layouts


def _short_batch(whole: Reference, layouts: Collection[Layout], wrong: list[str]) -> Iterator[str]:
    """What the last step of an epoch gets, if an odd number of samples is left; `wrong` gets where it fails."""
    size = whole.loop.batch_size // 2 + 1
    left = f"if {counted(size, 'sample')} are left at the end of an epoch"
    forward, reverse = (whole.loop.call(ALONE, indices)[0] for indices in (range(size), range(size)[::-1]))
    if not forward.gradients:
        yield f"{left}, they make no step"
        return
    if not np.isfinite(forward.gradient).all():
        yield f"{left}, the gradient is not finite in one process, too"
        return
    short = replace(whole, whole=forward, reverse=reverse, samples=whole.samples[:, :size])
    found = {}
    for layout in layouts:
        try:
            found[layout] = short.outcome(layout, size)
        except NotTogether as error:
            wrong.append(f"{left}, training fails: {error}; drop them, or pad them")
            break
    if others := "; ".join(f"{layout}: {each.said}" for layout, each in found.items() if each.kind != "same"):
        yield (
            f"{left}, unlike in one process: {others} (processes or micro-batches of fewer samples weigh as much as "
            "the others, or samples are repeated or dropped); drop_last of a DataLoader leaves them out"
        )


def _remarks(outcomes: Collection[Outcome]) -> Iterator[str]:
    """What is not wrong by itself, but worth knowing."""
    if not outcomes:
        return
    first, *others = max((each.by_rank for each in outcomes), key=len)
    if any(each.buffers != first.buffers for each in others):
        yield (
            "buffers, such as BatchNorm's averages, differ between processes at the end: one process's own is saved, "
            "and whatever training computes from them differs, too"
        )
    if first.dropout:
        yield "compared without dropout"
        if first.dropout in (each.dropout for each in others):
            yield "all processes draw the same dropout masks: seed torch with seed + rank before training"
    if first.unused:
        yield f"parameters without a gradient: {some(first.unused)}"


def _meaning(reference: Reference) -> str:
    """What the optimizer gets in one process."""
    weights = reference.weights_in(reference.whole.gradient)
    if weights is None:
        return "a gradient in which samples change each other's, or cannot be told apart"
    for weight, name in ((1 / len(weights), "the mean"), (1, "the sum")):
        if np.allclose(weights, weight, rtol=max(0.01, reference.tolerance)):
            return f"{name} over them"
    return f"a sum over them with weights of {span(weights)}, as by their targets or by clipping"
