"""`largebatch critical-batch`: the largest batch that costs no loss at a step of a run, found by branches of it."""

import argparse
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from largebatch.config import task_of
from largebatch.config.sections import Duration
from largebatch.errors import UserError, counted
from largebatch.plan import RunPlan
from largebatch.storage.catalog import entries
from largebatch.storage.files import read_json_lines, replace_json_file
from largebatch.storage.layout import read_object
from largebatch.tools.options import Commands, add_command, positive_float, positive_int, positive_ints
from largebatch.tools.slurm.submit import split_words
from largebatch.tools.sweep import add_options

FILE = "critical_batch.json"
MAX_SEEDS = 1000
CONFIDENCE = 0.95


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "critical-batch",
        run,
        description="Continue a run from one of its checkpoints at several multiples of its batch size, each under the "
        "recipe's rule for the learning rate and for as many samples, and find the largest batch whose loss is within "
        "the tolerance of the run's own (Merrill et al. 2025, arXiv 2505.23971). It is a sweep: the same command "
        "continues it, and `largebatch report FOLDER` has its curves.",
        epilog="""examples:
  largebatch critical-batch runs/gpt_pydoc --at 100 --batches 1,2,4,8 --seeds 3
  largebatch critical-batch runs/gpt2_124m --at 5000 --batches 1,2,4 --seeds 3 --slurm --nodes 4 --time=02:00:00""",
        takes_overrides=True,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--at", type=positive_int, required=True, metavar="STEP", help="step of the checkpoint")
    multiples = "multiples of the batch size at that step; default: 1,2,4,8"
    parser.add_argument("--batches", type=positive_ints, default=[1, 2, 4, 8], metavar="1,2,…", help=multiples)
    length = 'training after the branch, such as {"samples": 50000}; default: 50 steps of the largest batch'
    parser.add_argument("--window", type=duration, metavar="DURATION", help=length)
    difference = "by how much the metric may be worse, in its own unit; default: 0.01"
    parser.add_argument("--tolerance", type=positive_float, default=0.01, help=difference)
    add_options(parser, "RUN/../RUN.critical_batch_at_STEP")


def duration(text: str) -> Duration:
    """Return the duration in a JSON text."""
    try:
        return Duration.model_validate_json(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f'{text!r} is not a duration; write {{"samples": 50000}}') from None


def run(options: argparse.Namespace) -> int:
    """Train the branches that are missing, and say what they allow to; 1 if one fails."""
    from largebatch.tools.sweep.branches import branch_points
    from largebatch.tools.sweep.points import Sweep
    from largebatch.tools.sweep.results import Results, print_tables
    from largebatch.tools.sweep.start import start

    run_dir: Path = options.run_dir
    recorded, history = read_object(run_dir / "config.json"), read_json_lines(run_dir / "history.jsonl")
    recipe = next((Path(line["recipe"]) for line in reversed(history) if line.get("recipe")), None)
    try:
        plan = RunPlan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        plan = None
    if not (recorded and recipe and plan):
        raise UserError(f"{run_dir} is not the folder of a run of this version; give one such as runs/gpt_pydoc")
    if not recipe.is_file():
        raise UserError(f"{run_dir} is of {recipe}, which is not here; go to the folder that the run was started in")
    steps = [entry.step for entry in entries(run_dir / "checkpoints") if entry.problem is None]
    if options.at not in steps:
        known = f"its steps: {', '.join(map(str, sorted(steps))) or 'none'}; checkpoint.keep_every keeps more"
        raise UserError(f"--at {options.at}: the run has no complete checkpoint of this step; {known}")
    options.config, task = recipe, task_of(recipe)
    _, sbatch_options = split_words(options, ())
    multiples = sorted({1, *options.batches})
    points = branch_points(recorded, plan, recipe, task, options.at, multiples, options.window, options.seeds)
    (checkpoint,) = (run_dir / "checkpoints").glob(f"step_*{options.at:08d}")
    about = {
        "metric": options.metric,
        "higher_is_better": options.higher_is_better,
        "start": str(checkpoint.absolute()),
    }
    folder = options.folder or run_dir.with_name(f"{run_dir.name}.critical_batch_at_{options.at}")
    code = start(Sweep(str(recipe), recorded, points, **about), folder, task, options, sbatch_options)
    if options.dry_run or not any(folder.glob("*/plan.json")):
        return code
    results = Results.read(folder)
    print_tables(results.tables())
    losses: dict[int, dict[int, float]] = {point.settings["batch.global_batch_size"]: {} for point in points}
    for place, members in results.groups.items():
        for point, each in members:
            value = results.value_of(each)
            if value is None and each.status.kind == "training":
                value = -math.inf if options.higher_is_better else math.inf
            if value is not None:
                losses[place.batch][point.seed] = -value if options.higher_is_better else value
    batch, text = decide(losses, options.tolerance)
    print(f"\nafter step {options.at:,}: {text}")
    found = {"samples": batch, "standard_error": None, "at_step": options.at, "tolerance": options.tolerance}
    replace_json_file(folder / FILE, found)
    if batch:
        chosen = next(point for point in points if point.settings["batch.global_batch_size"] == batch)
        print("the recipe that follows:\n" + json.dumps(_as_recipe(chosen.overrides), indent=2))
    return code


def decide(losses: Mapping[int, Mapping[int, float]], tolerance: float) -> tuple[int | None, str]:
    """The largest batch size whose loss is within the tolerance of the smallest one's, and the finding in words.

    Both are of the same seeds, so their differences are compared: Student's t, 95 % one-sided, at each size. The first
    size that is clearly worse ends the search, whatever the larger ones reach.

    Args:
        losses: The loss of each seed at each batch size; infinite for a run that diverged.
        tolerance: Largest difference.
    """
    from scipy.stats import t

    reference, *others = sorted(losses)
    largest = reference
    for size in others:
        pairs = [
            losses[size][seed] - losses[reference][seed] for seed in losses[size].keys() & losses[reference].keys()
        ]
        count = len(pairs)
        if any(map(math.isinf, pairs)):
            return largest, f"the critical batch is {largest:,}: at {size:,}, a run diverged"
        if count < 2:
            return None, f"undecided at batch {size:,}: {counted(2 - count, 'more seed')}, at least"
        mean, spread = statistics.fmean(pairs), statistics.stdev(pairs)

        def half_width(seeds: int, spread: float = spread) -> float:
            return float(t.ppf(CONFIDENCE, seeds - 1)) * spread / math.sqrt(seeds)

        shown = f"{mean:+.4g} ± {half_width(count):.2g} at {size:,}"
        if mean - half_width(count) > tolerance:
            return largest, f"the critical batch is {largest:,}; the difference from batch {reference:,} is {shown}"
        if mean + half_width(count) > tolerance:
            away = abs(mean - tolerance)
            needed = next((n for n in range(count + 1, MAX_SEEDS) if half_width(n) <= away), MAX_SEEDS)
            return None, f"undecided: {counted(needed - count, 'more seed')}; the difference is {shown}"
        largest = size
    return largest, f"the critical batch is at least {largest:,}, the largest that was tried"


def _as_recipe(overrides: list[str]) -> dict[str, Any]:
    """Overrides as the JSON of a recipe, but for those that only branches have."""
    recipe: dict[str, Any] = {}
    for word in overrides:
        name, _, text = word.removeprefix("--").partition("=")
        section, _, field = name.partition(".")
        if name in ("seed", "train.stop_after_steps"):
            continue
        if field:
            recipe.setdefault(section, {})[field] = json.loads(text)
        else:
            recipe[section] = json.loads(text)
    return recipe
