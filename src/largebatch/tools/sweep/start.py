"""Checks all points of a sweep, and trains those that are not finished: on this machine, or as one Slurm array."""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from largebatch.config import RecipeConfig, load_config
from largebatch.errors import ConfigError, UserError, counted
from largebatch.plan import resolve
from largebatch.plan.strategies import STRATEGIES
from largebatch.storage.layout import read_object
from largebatch.tools.slurm.batch_script import SCRIPTS, BatchScript
from largebatch.tools.slurm.lint import lint_scripts
from largebatch.tools.slurm.rules import config_findings
from largebatch.tools.slurm.submit import settings_of_job, submit_scripts
from largebatch.tools.sweep.points import Point, Sweep

SECONDS = 20 * 24 * 3600  # that a run may take; poll(2) takes no more than 24 days
POINTS = "points"
"""In the sweep's folder, a file for each point: its name and the words of its run, a line each, for slurm/launch.sh."""


def start(sweep: Sweep, folder: Path, task: Path, options: argparse.Namespace, sbatch_options: Sequence[str]) -> int:
    """Train the points that are not over; 1 if one fails. `options` are those of `add_options`.

    Raises:
        UserError: A point cannot be trained, or the folder holds something else; nothing was started.
    """
    if sbatch_options and not options.slurm:
        raise UserError(
            f"{sbatch_options[0]}: an option of sbatch, which needs --slurm; or the recipe has no such field"
        )
    recipe, points = Path(sweep.recipe), sweep.points
    waiting = [number for number, point in enumerate(points) if not _is_over(folder / point.name)]
    at_once = f"%{options.max_parallel}" if options.max_parallel else ""
    array = [f"--array={','.join(map(str, waiting))}{at_once}", f"--output={folder / POINTS}/%a.log"]
    file, environment = SCRIPTS / f"{recipe.stem}.sbatch", settings_of_job(options, folder) if options.slurm else {}
    scripts = [BatchScript(file, [*array, *sbatch_options], each.overrides, environment, task) for each in points]
    if options.slurm:
        problems = [[str(finding) for finding in lint_scripts([script], task=task)] for script in scripts]
    else:
        problems = [_problems(recipe, point, task, options.num_processes) for point in points]
    _refuse(points, problems)
    print(f"{counted(len(points), 'point')} in {folder}, {len(points) - len(waiting)} of them trained already")
    if not options.dry_run:
        sweep.write(folder)
    if not waiting or (options.dry_run and not options.slurm):
        return 0
    if not options.slurm:
        return _train_here(sweep, [points[number] for number in waiting], folder, task, options)
    if not options.dry_run:
        (folder / POINTS).mkdir(exist_ok=True)
        for number, point in enumerate(points):
            lines = "".join(f"{line}\n" for line in (point.name, *sweep.options, *point.overrides))
            (folder / POINTS / str(number)).write_text(lines, encoding="utf-8")
    return submit_scripts([scripts[number] for number in waiting], options, ["--sweep"])


def _problems(recipe: Path, point: Point, task: Path, num_processes: int) -> list[str]:
    found = [str(finding) for finding in config_findings(recipe, point.overrides, task)]
    if not found:
        try:
            resolve(load_config(recipe, point.overrides, task=task), num_processes)
        except ConfigError as error:
            return error.problems
    return found


def _refuse(points: Sequence[Point], problems: Sequence[Sequence[str]]) -> None:
    """Raise an error with each problem once, if there are any."""
    names: dict[str, list[str]] = {}
    for point, found in zip(points, problems, strict=True):
        for problem in found:
            names.setdefault(problem, []).append(point.name)
    if names:
        which = {what: f"{of[0]} and {len(of) - 1} more" if len(of) > 1 else of[0] for what, of in names.items()}
        lines = [f"{which[what]}: {what}" for what in names]
        raise ConfigError(lines, "the sweep, of which nothing was started")


def _is_over(run_dir: Path) -> bool:
    """Whether a run has finished, or has failed in a way in which it would fail again: its loss was not finite."""
    status = read_object(run_dir / "status.json")
    return status.get("outcome") == "finished" or status.get("kind") == "training"


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
    devices: SimpleQueue[Mapping[str, str]] = SimpleQueue()
    for number in range(at_once):
        devices.put(_devices(number, at_once, world_size))
    preload_tasks([task])

    def run(point: Point) -> bool:
        """Whether the point is over."""
        mine, begun, logs = devices.get(), time.monotonic(), folder / "logs" / point.name
        logs.mkdir(parents=True, exist_ok=True)
        failure = None
        try:
            run_job(
                partial(train, run_dir=(folder / point.name).absolute(), task=task),
                Path(sweep.recipe).resolve(),
                *sweep.options,
                *point.overrides,
                world_size=world_size,
                environment={**environment, **mine},
                folder=Path.cwd(),
                timeout=SECONDS,
                logs=logs,
            )
        except JobFailed as error:
            failure = error.in_one_line(task)
        finally:
            devices.put(mine)
        is_over = _is_over(folder / point.name)
        how = "failed" if not is_over else "finished" if failure is None else "diverged"
        because = "" if failure is None else f": {failure}; its output is in {logs}"
        print(f"{point.name}: {how} after {time.monotonic() - begun:.0f} s{because}", flush=True)
        return is_over

    with ThreadPoolExecutor(at_once) as pool:
        runs = [pool.submit(run, point) for point in points]
        try:
            are_over = [each.result() for each in as_completed(runs)]
        except BaseException:
            # Such as Ctrl-C, which the runs have got, too: they stop with a checkpoint.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return 0 if all(are_over) else 1


def _devices(number: int, at_once: int, world_size: int) -> dict[str, str]:
    """The variables with which runs at the same time share the machine: threads, and GPUs if there are enough."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // (at_once * world_size), 1))
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = given if len(given) == count else [str(device) for device in range(count)]
    mine = names[number * world_size : (number + 1) * world_size]
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if at_once > 1 and at_once * world_size <= count else {}
    return {"OMP_NUM_THREADS": threads, **gpus}
