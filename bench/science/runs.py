"""The runs of an experiment, as points of a sweep, and the file of results that its tables are made of."""

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments import Experiment
from largebatch.config import task_of
from largebatch.errors import UserError
from largebatch.storage.files import read_json_lines, replace_file
from largebatch.storage.layout import read_object
from largebatch.tools.sweep import points as sweeps
from largebatch.tools.sweep.results import Results
from largebatch.tools.sweep.start import start

# At the reference batch size all rules are one.
ANY_RULE = "any"
RULE = "rule"  # among the settings of a sweep's point


@dataclass(frozen=True)
class Point:
    """One run of an experiment.

    Args:
        rule: One of the experiment's rules, or `ANY_RULE`.
        batch: Samples per step.
        base_lr: At the reference batch size.
        seed: The seed of initial weights, order and augmentation.
    """

    rule: str
    batch: int
    base_lr: float
    seed: int

    @property
    def name(self) -> str:
        """That of its run folder."""
        rule = re.sub(r"\W+", "_", self.rule)
        return f"{rule}_batch={self.batch}_base_lr={self.base_lr}_seed={self.seed}"


@dataclass(frozen=True)
class Result:
    """The result of a run: an error, as a fraction, or a loss; for a run that diverged, that of guessing."""

    point: Point
    value: float
    diverged: bool


def tuning(experiment: Experiment, seeds: Iterable[int]) -> list[Point]:
    """The runs that the base learning rate is chosen by."""
    return [Point(ANY_RULE, experiment.reference, rate, seed) for rate in experiment.base_lrs for seed in seeds]


def matrix(experiment: Experiment, base_lr: float, seeds: Iterable[int]) -> list[Point]:
    """The runs of every rule at every batch size."""
    points = [Point(ANY_RULE, experiment.reference, base_lr, seed) for seed in seeds]
    for batch in experiment.batches:
        if batch != experiment.reference:
            points += [Point(rule, batch, base_lr, seed) for rule in experiment.rules for seed in seeds]
    return points


def overrides_of(experiment: Experiment, point: Point) -> list[str]:
    """What the recipe is given for a run."""
    rule = next(iter(experiment.rules)) if point.rule == ANY_RULE else point.rule
    return [
        *experiment.overrides,
        *experiment.rules[rule],
        f"--batch.global_batch_size={point.batch}",
        f"--learning_rate.reference_batch_size={experiment.reference}",
        f"--learning_rate.base_lr={point.base_lr}",
        f"--seed={point.seed}",
        "--logging.trackers=[]",
        '--checkpoint={"keep_last": 1}',
    ]


def read_results(file: Path) -> dict[Point, Result]:
    """The results that were recorded."""
    results = {}
    for line in read_json_lines(file):
        point = Point(**line["point"])
        results[point] = Result(point, line["value"], line["diverged"])
    return results


def train(
    experiment: Experiment,
    points: Sequence[Point],
    file: Path,
    folder: Path,
    words: list[str],
    options: argparse.Namespace,
) -> None:
    """Train the points that have no result yet, and record the results.

    Args:
        experiment: The experiment whose recipe is trained.
        points: Its runs.
        file: The record.
        folder: The sweep's; runs in it that an earlier command began are finished, too.
        words: More overrides.
        options: Those of `start`.

    Raises:
        UserError: A point cannot be trained, its run failed other than by a loss that is not finite, or the folder
            holds runs with other overrides.
    """
    known = read_results(file)
    missing = [point for point in points if point not in known]
    if not missing:
        return
    before = sweeps.Sweep.read(folder).points if (folder / sweeps.SWEEP_FILE).exists() else []
    by_name = {point.name: point for point in before}
    for point in points:
        # A result that was recorded elsewhere has no run here; other overrides than those of a run here are refused.
        if point not in missing and point.name not in by_name:
            continue
        settings = {RULE: point.rule, sweeps.BATCH: point.batch, sweeps.RATE: point.base_lr}
        overrides = [*overrides_of(experiment, point), *words]
        by_name[point.name] = sweeps.Point(point.name, settings, point.seed, overrides)
    # Those that differ in their seeds alone follow each other.
    in_order = [by_name[name] for name in sorted(by_name)]
    recipe = experiment.recipe
    sweep = sweeps.Sweep(str(recipe), read_object(recipe), in_order, experiment.metric, experiment.is_error)
    start(sweep, folder, task_of(recipe), options, ())
    results = {result.point: result for result in _results_in(folder, experiment)}
    lines = [*read_json_lines(file), *(asdict(result) for point, result in results.items() if point not in known)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    replace_file(file, text.encode())
    if failed := [point.name for point in missing if point not in results]:
        raise UserError(f"not finished: {', '.join(failed)}; the same command continues")


def _results_in(folder: Path, experiment: Experiment) -> Iterator[Result]:
    """The results of a sweep's runs that are over."""
    for group in Results.read(folder).groups:
        for seed, loss in group.losses.items():
            point = Point(*(group.settings[name] for name in (RULE, sweeps.BATCH, sweeps.RATE)), seed)
            if math.isinf(loss):
                yield Result(point, experiment.diverged, diverged=True)
                continue
            last = group.runs[seed].evaluations[-experiment.last :]
            value = statistics.median(line[experiment.metric] for line in last)
            yield Result(point, 1 - value if experiment.is_error else value, diverged=False)
