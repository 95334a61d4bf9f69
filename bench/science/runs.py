"""Recipe runs on this machine, each a line of a file that an interrupted program goes on with."""

import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments import ROOT, Experiment
from largebatch.storage.files import read_json_lines
from largebatch.tools.verify.jobs import JobFailed, run_job
from largebatch.tools.verify.training import train

PATIENCE = 24 * 3600  # seconds that one run may take
# In the message of a run whose loss, gradient or evaluation is not finite.
DIVERGED = re.compile(r"error: .*\b(nan|inf)\b")
# At the reference batch size all rules are one.
ANY_RULE = "any"


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


@dataclass(frozen=True)
class Result:
    """The result of a run: an error, as a fraction, or a loss; for a run that diverged, that of guessing."""

    point: Point
    value: float
    diverged: bool
    seconds: float


def sweep(experiment: Experiment, seeds: Iterable[int]) -> list[Point]:
    """The runs that the base learning rate is chosen by."""
    return [Point(ANY_RULE, experiment.reference, rate, seed) for rate in experiment.base_lrs for seed in seeds]


def matrix(experiment: Experiment, base_lr: float, seeds: Iterable[int]) -> list[Point]:
    """The runs of every rule at every batch size."""
    points = [Point(ANY_RULE, experiment.reference, base_lr, seed) for seed in seeds]
    for batch in experiment.batches:
        if batch != experiment.reference:
            points += [Point(rule, batch, base_lr, seed) for rule in experiment.rules for seed in seeds]
    return points


def overrides_of(experiment: Experiment, point: Point) -> tuple[str, ...]:
    """What the recipe is given for a run."""
    rule = next(iter(experiment.rules)) if point.rule == ANY_RULE else point.rule
    return (
        *experiment.overrides,
        *experiment.rules[rule],
        f"--batch.global_batch_size={point.batch}",
        f"--learning_rate.reference_batch_size={experiment.reference}",
        f"--learning_rate.base_lr={point.base_lr}",
        f"--seed={point.seed}",
        "--logging.trackers=[]",
        '--checkpoint={"keep_last": 1}',
    )


def read_results(file: Path) -> dict[Point, Result]:
    """The runs that were made before."""
    results = {}
    for line in read_json_lines(file) if file.exists() else []:
        point = Point(**line.pop("point"))
        results[point] = Result(point, **line)
    return results


def make_runs(
    experiment: Experiment, points: Iterable[Point], file: Path, words: tuple[str, ...], jobs: int
) -> Iterator[Result]:
    """Make the runs that `file` does not have yet, so many at once, and add each to it as it ends."""
    known = read_results(file)
    # A program that was killed may have left half a line.
    file.write_text("".join(_line(result) for result in known.values()), encoding="utf-8")
    missing = [point for point in dict.fromkeys(points) if point not in known]
    with ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(make_run, experiment, point, words) for point in missing]
        for run in as_completed(runs):
            result = run.result()
            with file.open("a", encoding="utf-8") as lines:
                lines.write(_line(result))
            yield result


def _line(result: Result) -> str:
    return json.dumps(asdict(result)) + "\n"


def make_run(experiment: Experiment, point: Point, words: tuple[str, ...]) -> Result:
    """Train the recipe once, in a process of its own.

    Args:
        experiment: The experiment whose recipe is run.
        point: The run's batch size, rule, rate and seed.
        words: More overrides.

    Raises:
        JobFailed: The run failed, other than by a loss that is not finite.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        arguments = (experiment.recipe, (*overrides_of(experiment, point), *words), run_dir)
        try:
            run_job(
                train_recipe,
                *arguments,
                world_size=1,
                environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                folder=ROOT,
                timeout=PATIENCE,
            )
        except JobFailed as failure:
            if not DIVERGED.search(str(failure)):
                raise
            return Result(point, experiment.diverged, diverged=True, seconds=time.monotonic() - started)
        evaluations = read_json_lines(run_dir / "evaluations.jsonl")[-experiment.last :]
    value = statistics.median(evaluation[experiment.metric] for evaluation in evaluations)
    return Result(
        point,
        1 - value if experiment.is_error else value,
        diverged=False,
        seconds=round(time.monotonic() - started, 1),
    )


def train_recipe(recipe: Path, words: tuple[str, ...], run_dir: Path) -> None:
    """The recipe's own script, in this process."""
    train(recipe, *words, run_dir=run_dir)
