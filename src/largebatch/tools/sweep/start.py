"""Checks all points of a sweep, and trains those that are not finished: on this machine, or as one Slurm array."""

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError, UserError, counted
from largebatch.plan import resolve
from largebatch.plan.strategies import STRATEGIES
from largebatch.storage.files import remove_folder
from largebatch.storage.layout import read_object
from largebatch.tools.slurm.batch_script import SCRIPTS, BatchScript
from largebatch.tools.slurm.lint import lint_scripts
from largebatch.tools.slurm.submit import settings_of_job, submit_scripts
from largebatch.tools.sweep.points import Point, Sweep

POINTS = "points"
"""In the sweep's folder, a file for each point: its name and the words of its run, a line each, for slurm/launch.sh."""


def start(sweep: Sweep, folder: Path, task: Path, options: argparse.Namespace, sbatch_options: Sequence[str]) -> int:
    """Train the points that are not over; 1 if one fails. `options` are those of `add_options`.

    Raises:
        UserError: A point cannot be trained, or the folder holds something else; nothing was started.
    """
    if sbatch_options and not options.slurm:
        raise UserError(f"{sbatch_options[0]}: an option of sbatch, which needs --slurm, or not a field of the recipe")
    recipe, points = Path(sweep.recipe), sweep.points
    waiting = [number for number, point in enumerate(points) if not _is_over(folder / point.name)]
    at_once = f"%{options.max_parallel}" if options.max_parallel else ""
    array = [f"--array={','.join(map(str, waiting))}{at_once}", f"--output={folder / POINTS}/%a.log"]
    file, environment = SCRIPTS / f"{recipe.stem}.sbatch", settings_of_job(options, folder) if options.slurm else {}
    scripts = [BatchScript(file, [*array, *sbatch_options], each.overrides, environment, task) for each in points]
    found: dict[str, str] = {}
    for point, script in zip(points, scripts, strict=True):
        try:
            resolve(load_config(recipe, point.overrides, task=task), options.num_processes)
            problems = [str(finding) for finding in lint_scripts([script], task=task)] if options.slurm else []
        except ConfigError as error:
            problems = error.problems
        found |= {problem: point.name for problem in problems if problem not in found}
    if found:
        raise ConfigError([f"{name}: {problem}" for problem, name in found.items()], "the sweep; nothing was started")
    print(f"{counted(len(points), 'point')} in {folder}, {len(points) - len(waiting)} of them trained already")
    if not options.dry_run:
        sweep.write(folder)
        (folder / POINTS).mkdir(exist_ok=True)
        for number, point in enumerate(points):
            lines = [f"{line}\n" for line in (point.name, *sweep.options, *point.overrides)]
            (folder / POINTS / str(number)).write_text("".join(lines), encoding="utf-8")
            if sweep.start and not (folder / point.name).exists():
                _branch_off(Path(sweep.start), folder / point.name)
    if not waiting or (options.dry_run and not options.slurm):
        return 0
    if options.slurm:
        return submit_scripts([scripts[number] for number in waiting], options, ["--sweep"])
    return _train_here(sweep, [points[number] for number in waiting], folder, task, options)


def _is_over(run_dir: Path) -> bool:
    """Whether a run has finished, or has failed in a way in which it would fail again: its loss was not finite."""
    status = read_object(run_dir / "status.json")
    return status.get("outcome") == "finished" or status.get("kind") == "training"


def _branch_off(checkpoint: Path, run_dir: Path) -> None:
    """Make the folder of a run that stands at a checkpoint of another run.

    They share its files, which never change; each deletes its own links.

    Raises:
        UserError: The file system does not allow this.
    """
    new = run_dir.with_name(f".{run_dir.name}.new")
    try:
        remove_folder(new)
        shutil.copytree(checkpoint, new / "checkpoints" / checkpoint.name, copy_function=os.link)
        for name in ("plan.json", "config.json"):
            shutil.copy(checkpoint.parent.parent / name, new)
        new.rename(run_dir)
    except OSError as error:
        raise UserError(f"{run_dir}: {error}; choose a --folder on the file system of {checkpoint}") from None


def _train_here(sweep: Sweep, points: Sequence[Point], folder: Path, task: Path, options: argparse.Namespace) -> int:
    """Train points in processes of their own, which are forked from one that has imported what they need."""
    # These import torch.
    from largebatch.backend.accelerate_configs import find_accelerate_configs, launch_environment
    from largebatch.tools.verify.jobs import JobFailed, preload_tasks, run_job
    from largebatch.tools.verify.training import train

    at_once, world_size = options.max_parallel or 1, options.num_processes
    environment: Mapping[str, str] = {}
    if world_size > 1 or options.strategy:
        strategy = options.strategy or next(iter(STRATEGIES))
        config: RecipeConfig = load_config(sweep.recipe, points[0].overrides, task=task)
        environment = launch_environment(find_accelerate_configs(None, [strategy], config)[strategy], world_size)
    preload_tasks([task])
    waiting = iter(points)

    def train_in_turn(share: Mapping[str, str]) -> None:
        for point in waiting:
            logs = folder / "logs" / point.name
            logs.mkdir(parents=True, exist_ok=True)
            try:
                run_job(
                    partial(train, run_dir=(folder / point.name).absolute(), task=task),
                    Path(sweep.recipe).resolve(),
                    *sweep.options,
                    *point.overrides,
                    world_size=world_size,
                    environment={**environment, **share},
                    folder=Path.cwd(),
                    timeout=20 * 24 * 3600,  # poll(2) takes no more than 24 days
                    logs=logs,
                )
                print(f"{point.name}: finished", flush=True)
            except JobFailed as error:
                print(f"{point.name}: {error.in_one_line(task)}; its output is in {logs}", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(train_in_turn, shares_of_machine(at_once, world_size)))
        finally:
            # After Ctrl-C, which the runs have got, too, and stop with a checkpoint, none may follow them.
            list(waiting)
    return int(not all(_is_over(folder / point.name) for point in points))


def shares_of_machine(at_once: int, world_size: int) -> list[dict[str, str]]:
    """The variables with which runs at the same time share the machine: threads, and GPUs if there are enough."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // (at_once * world_size), 1))
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    starts = range(0, at_once * world_size, world_size)
    mine = [gpus[start : start + world_size] if starts.stop <= len(gpus) else gpus for start in starts]
    return [{"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ",".join(each)} for each in mine]
