"""Starts the points of a sweep that are not over: on this machine, or as one Slurm array."""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from largebatch.config import load_config
from largebatch.errors import ConfigError, StorageError, UserError
from largebatch.plan import resolve
from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.slurm.batch_script import SCRIPTS, BatchScript
from largebatch.tools.slurm.lint import lint
from largebatch.tools.slurm.submit import settings_of_job, submit_script
from largebatch.tools.sweep.points import POINTS, Point, Sweep
from largebatch.words import counted


def start(sweep: Sweep, folder: Path, task: Path, options: argparse.Namespace, sbatch_options: Sequence[str]) -> int:
    """Train the points that are not over; 1 if one fails. `options` are those of `add_points`.

    Raises:
        UserError: A point cannot be trained, or the folder holds something else; nothing was started.
    """
    if sbatch_options and not options.slurm:
        raise UserError(f"{sbatch_options[0]}: an option of sbatch, which needs --slurm, or not a field of the recipe")
    sweep = sweep.continued(folder)
    # Asked first: a point that finishes in between is not submitted again.
    queued = _in_queue(folder.resolve()) if options.slurm else set()
    waiting = sweep.waiting(folder)
    missing = [number for number in waiting if number not in queued]
    script = None
    if options.slurm:
        at_once = f"%{options.max_parallel}" if options.max_parallel else ""
        # For Slurm, a percent sign begins a placeholder.
        logs = str(folder / POINTS).replace("%", "%%")
        array = [f"--array={','.join(map(str, missing))}{at_once}", f"--output={logs}/%a.log"]
        file = SCRIPTS / f"{Path(sweep.recipe).stem}.sbatch"
        environment = settings_of_job(options, folder.resolve())
        script = BatchScript(file, [*array, *sbatch_options], environment=environment, task=task)
    _check(sweep, task, options.num_processes, script)
    in_queue = f", {len(queued)} in Slurm's queue" if queued else ""
    trained = len(sweep.points) - len(waiting)
    print(f"{counted(len(sweep.points), 'point')} in {folder}, {trained} of them trained already{in_queue}")
    sweep.write(folder)
    points = [sweep.points[number] for number in missing]
    if points and sweep.start and options.seeds == 1:
        print("note: unless a run diverges, one seed leaves the critical batch undecided; add --seeds", file=sys.stderr)
    if script is None:
        if points:
            _train_here(sweep, points, folder, task, options)
        return int(bool(sweep.waiting(folder)))
    code = 0
    if points:
        code = submit_script(replace(script, overrides=points[0].overrides), options, ["--sweep"])
    if waiting and code == 0:
        print("when all points are trained, the same command shows the result")
    return code


def _in_queue(folder: Path) -> set[int]:
    """The numbers of the points that jobs in Slurm's queue train, or will train.

    Raises:
        UserError: Slurm does not say it.
    """
    # The number in the array, and the script with its words.
    command = ["squeue", "--me", "--array", "--noheader", "--format=%K %o"]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        raise UserError(f"squeue does not say which points are in the queue: {asked.stderr.strip()}; try again")
    jobs = map(str.rstrip, asked.stdout.splitlines())
    numbers = [job.split()[0] for job in jobs if job.endswith(f" --run-dir={folder} --sweep")]
    try:
        return set(map(int, numbers))
    except ValueError as error:
        raise UserError(f"squeue has jobs of {folder} without a point each ({error}); wait, or cancel them") from error


def _check(sweep: Sweep, task: Path, num_processes: int, script: BatchScript | None) -> None:
    """Raise ConfigError if a point cannot be trained here, or by a script: all problems, each with its first point."""
    first_points: dict[str, str] = {}
    for point in sweep.points:
        problems = []
        try:
            resolve(load_config(sweep.recipe, point.overrides, task=task), num_processes)
            if script:
                problems = list(map(str, lint([replace(script, overrides=point.overrides)], task)))
        except ConfigError as error:
            problems = error.problems
        for problem in problems:
            first_points.setdefault(problem, point.name)
    if first_points:
        problems = [f"{name}: {problem}" for problem, name in first_points.items()]
        raise ConfigError(problems, "the sweep; nothing was started")


def _train_here(sweep: Sweep, points: Sequence[Point], folder: Path, task: Path, options: argparse.Namespace) -> None:
    """Train points in processes of their own, which are forked from one that has imported what they need."""
    # These import torch.
    from largebatch.tools.local_jobs.jobs import JobFailed, preload_tasks, run_job
    from largebatch.tools.local_jobs.training import train
    from largebatch.tools.plan.accelerate_configs import find_accelerate_configs, launch_environment

    at_once = options.max_parallel or 1
    world_size = options.num_processes
    environment: Mapping[str, str] = {}
    if world_size > 1 or options.strategy:
        strategy = options.strategy or next(iter(STRATEGIES))
        config = load_config(sweep.recipe, points[0].overrides, task=task)
        environment = launch_environment(find_accelerate_configs([strategy], config)[strategy], world_size)
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
                    timeout=20 * 24 * 3600,  # poll(2) takes no more than 24 days
                    logs=logs,
                )
                print(f"{point.name}: finished", flush=True)
            except JobFailed as error:
                said = f"{point.name}: {error.in_one_line(task)}; its output is in {logs}"
                if error.exit_code == StorageError.exit_code:
                    raise StorageError(said) from None
                print(said, flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(train_in_turn, shares_of_machine(at_once, world_size)))
        finally:
            # After Ctrl-C, which the runs have got, too, and stop with a checkpoint, none may follow them.
            list(waiting)


def shares_of_machine(at_once: int, world_size: int) -> list[dict[str, str]]:
    """The variables with which runs at the same time share the machine: threads, and GPUs if there are enough."""
    import torch

    processes = at_once * world_size
    threads = os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // processes, 1))
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    shares = []
    for first in range(0, processes, world_size):
        mine = gpus[first : first + world_size] if processes <= len(gpus) else gpus
        shares.append({"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ",".join(mine)})
    return shares
