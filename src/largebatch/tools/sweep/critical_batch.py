"""`largebatch critical-batch`: the largest batch that costs no loss at a step of a run, found by branches of it."""

import argparse
import json
from pathlib import Path

from largebatch.config import RecipeConfig, load_config, override_words, task_of
from largebatch.errors import UserError
from largebatch.plan import resolve
from largebatch.storage.catalog import entries
from largebatch.storage.files import read_json_lines, replace_json_file
from largebatch.storage.layout import read_manifest
from largebatch.tools.options import Commands, add_command, positive_float, positive_int, positive_ints
from largebatch.tools.slurm.submit import split_words
from largebatch.tools.sweep import add_options


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "critical-batch",
        run,
        description="Continue a run from a checkpoint at several multiples of its batch size, under the recipe's rule, "
        "and find the largest whose loss is within the tolerance of the run's own (Merrill et al. 2025, arXiv "
        "2505.23971). It is a sweep: the same command continues it, and `largebatch report FOLDER` has its curves.",
        epilog="""examples:
  largebatch critical-batch runs/gpt_pydoc --at 100 --batches 1,2,4,8 --seeds 3
  largebatch critical-batch runs/gpt2_124m --at 5000 --batches 1,2,4 --seeds 3 --slurm --nodes 4 --time=02:00:00""",
        takes_overrides=True,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--at", type=positive_int, required=True, metavar="STEP", help="step of the checkpoint")
    parser.add_argument("--batches", type=positive_ints, default=[1, 2, 4, 8], help="multiples of its batch size there")
    parser.add_argument("--window", type=positive_int, help="samples of each; default: 50 steps of the largest batch")
    parser.add_argument("--tolerance", type=positive_float, default=0.01, help="in the metric's unit; default: 0.01")
    add_options(parser, "RUN/../RUN.critical_batch_at_STEP")


def run(options: argparse.Namespace) -> int:
    """Train the branches that are missing, and say what they allow to; 1 if one fails."""
    from largebatch.tools.sweep.branches import branch_points, branch_sections
    from largebatch.tools.sweep.points import BATCH, Sweep
    from largebatch.tools.sweep.results import Results
    from largebatch.tools.sweep.start import start
    from largebatch.tools.sweep.verdicts import largest_within

    run_dir: Path = options.run_dir
    history = read_json_lines(run_dir / "history.jsonl")
    recipe = next((Path(line["recipe"]) for line in reversed(history) if line.get("recipe")), Path("none"))
    if not recipe.is_file():
        raise UserError(f"{run_dir}: not a run's folder, or its recipe, {recipe}, is not here; go where it was started")
    checkpoints = {entry.step: entry.path for entry in entries(run_dir / "checkpoints") if entry.problem is None}
    if options.at not in checkpoints:
        known = f"its steps: {', '.join(map(str, sorted(checkpoints))) or 'none'}; checkpoint.keep_every keeps more"
        raise UserError(f"--at {options.at}: the run has no complete checkpoint of this step; {known}")
    options.config, task = recipe, task_of(recipe)
    _, sbatch_options = split_words(options, ())
    recorded = read_manifest(checkpoints[options.at]).config
    del recorded["task"]
    config: RecipeConfig = load_config(recipe, override_words(recorded), task=task)
    plan = resolve(config, 1)
    points = branch_points(options, task, recorded, plan)
    checkpoint = str(checkpoints[options.at].absolute())
    sweep = Sweep(str(recipe), recorded, points, options.metric, options.higher_is_better, checkpoint)
    folder = options.folder or run_dir.with_name(f"{run_dir.name}.critical_batch_at_{options.at}")
    code = start(sweep, folder, task, options, sbatch_options)
    if options.dry_run:
        return code
    results = Results.read(folder)
    losses = {group.settings[BATCH]: group.losses for group in results.groups}
    batch, text = largest_within(losses, options.tolerance)
    print(f"\n{results.table()}\n\nafter step {options.at:,}: {text}")
    finding = {"samples": batch, "standard_error": None, "at_step": options.at, "tolerance": options.tolerance}
    replace_json_file(folder / "critical_batch.json", finding)
    if batch:
        sections = branch_sections(recorded, plan.timeline, options.at, batch)
        print(f"the recipe that follows:\n{json.dumps(sections, indent=2)}")
    return code
