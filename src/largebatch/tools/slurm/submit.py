"""`largebatch submit`: a recipe's job, planned, checked and handed to sbatch. The script is not changed."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path

from largebatch.config import config_class_of, task_of
from largebatch.errors import UserError
from largebatch.plan import explain, notes_on, resolve
from largebatch.storage.run_folder import RunFolder
from largebatch.storage.source_code import take_snapshot
from largebatch.tools.options import add_recipe
from largebatch.tools.slurm.batch_script import OPTION, SCRIPTS, BatchScript, site_environment
from largebatch.tools.slurm.lint import lint

EPILOG = """examples:
  largebatch submit gpt2_124m --nodes 4 --gpus-per-node 8 --dry-run
  largebatch submit gpt2_124m --nodes 4 --gpus-per-node 8 --strategy zero3 --partition=gpu --optimizer.weight_decay 0

Fields of the recipe are overridden as in a run. All other options, written --name=value, go to sbatch."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--nodes", required=True, help="number of nodes, such as 4, or 2-4 for as many as are free")
    parser.add_argument("--gpus-per-node", help="default: the script's; without GPUs, one process per CPU")
    parser.add_argument("--strategy", help="the name of an Accelerate config; default: the script's")
    parser.add_argument("--run-dir", type=Path, help="folder of the run; default: runs/RECIPE")
    parser.add_argument("--resume", help="passed on to the run")
    parser.add_argument("--allow-change", help="passed on to the run")
    parser.add_argument("--dry-run", action="store_true", help="show all this, and what Slurm says, but submit nothing")


def run(options: argparse.Namespace) -> int:
    """Submit slurm/RECIPE.sbatch with sbatch: show the plan on that many nodes, check recipe, script and configs with
    the values given here, copy what the job runs to RUN_DIR/jobs, show the sbatch line, run it, and print job, log and
    how to follow it. SBATCH_* variables and slurm/site.sh count as they do for the job. Exit code 1 if a check fails,
    also in a dry run; nothing is submitted then.
    """
    task, overrides, sbatch_options = task_and_words(options)
    environment = settings_of_job(options, options.run_dir)
    script = BatchScript(SCRIPTS / f"{options.config.stem}.sbatch", sbatch_options, overrides, environment, task)
    return submit_script(script, options, overrides)


def task_and_words(options: argparse.Namespace) -> tuple[Path, list[str], list[str]]:
    """The task's folder, the overrides of the recipe, and the options of sbatch; UserError if there is no recipe."""
    recipe: Path = options.config
    if not recipe.is_file():
        raise UserError(f"{recipe}: no such file; give the path of a recipe's JSON, or its name")
    task = task_of(recipe, options.task)
    return task, *split_words(options, config_class_of(task, recipe).model_fields)


def settings_of_job(options: argparse.Namespace, run_dir: Path | None) -> dict[str, str]:
    """The environment that a job is submitted in."""
    environment = site_environment()
    if options.strategy:
        environment["STRATEGY"] = options.strategy
    if run_dir:
        environment["RUN_DIR"] = str(run_dir)
    # A copy, so that edits do not change what runs while the job waits in the queue or between its starts.
    run = RunFolder(Path(environment.get("RUN_DIR") or f"runs/{options.config.stem}").absolute())
    if not options.dry_run:
        environment["LARGEBATCH_SNAPSHOT"] = str(run.jobs_dir / f"snapshot_{datetime.now():%Y%m%d_%H%M%S_%f}")
    return environment


def submit_script(script: BatchScript, options: argparse.Namespace, words: Sequence[str]) -> int:
    """Check a script, show the plan of its run, and submit it; 1 if a check fails.

    `words` are for the script, besides the job's options.
    """
    _refuse_other_jobs(script, options.config)
    findings = lint([script], script.task)
    if findings:
        print(*findings, "not submitted", sep="\n")
        return 1
    _print_plans(script)
    words = [*_words_for_sbatch(script, options), *words]
    environment = script.environment
    shown = [name for name in sorted(environment) if name.startswith(("LARGEBATCH_", "SBATCH_"))]
    variables = [f"{name}={shlex.quote(environment[name])}" for name in shown]
    print(f"\n{' '.join([*variables, shlex.join(['sbatch', *words])])}", flush=True)
    if options.dry_run:
        code = _dry_run(script, words)
        _refuse_missing_environment(script)
        return code
    _refuse_missing_environment(script)
    take_snapshot(Path(), Path(environment["LARGEBATCH_SNAPSHOT"]), options.config, script.task)
    return _submit(script, words)


def _words_for_sbatch(script: BatchScript, options: argparse.Namespace) -> list[str]:
    options_of_the_job = {
        "strategy": script.environment.get("STRATEGY") or None,
        "run-dir": script.environment.get("RUN_DIR") or None,
        "resume": options.resume,
        "allow-change": options.allow_change,
    }
    # On the command line it outranks SBATCH_EXPORT=NONE.
    words = ["--parsable", *script.given_options, "--export=ALL", str(script.path)]
    return words + [f"--{name}={value}" for name, value in options_of_the_job.items() if value is not None]


def split_words(options: argparse.Namespace, fields: Collection[str]) -> tuple[list[str], list[str]]:
    """The overrides of the recipe's fields, with their values, and the options of sbatch, also for nodes and GPUs.

    Anything else is refused: sbatch would take the first word that is not an option as its script.
    """
    overrides: list[str] = []
    given = {"nodes": options.nodes, "gpus-per-node": options.gpus_per_node}
    sbatch_options = [f"--{name}={value}" for name, value in given.items() if value]
    rest = iter(options.overrides)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.startswith("--") and name[2:].partition(".")[0] in fields:
            overrides.append(word)
            if not equals:
                # Its value, if there is one.
                overrides += islice(rest, 1)
        elif name == "--export":
            raise UserError(f"{word}: all of the environment is passed on, with the settings of the job; remove it")
        elif OPTION.fullmatch(word):
            sbatch_options.append(word)
        else:
            known = ", ".join(sorted(fields)) or "those of the run"
            raise UserError(
                f"{word}: neither a field of the recipe nor an option of sbatch; write --section.field VALUE, or "
                f"--name=value in one word for an option of sbatch; sections are {known}"
            )
    return overrides, sbatch_options


def _refuse_other_jobs(script: BatchScript, recipe: Path) -> None:
    """Refuse a script that is missing or for another recipe, or whose processes cannot be counted."""
    file = script.path
    if not file.is_file() or (script.recipe and not script.recipe.samefile(recipe)):
        raise UserError(f"there is no {file} that runs {recipe}; copy another recipe's, and write RECIPE={recipe}")
    if script.layout is None:
        raise UserError(
            f"{' '.join(script.given_options)}: the job's nodes or processes per node cannot be read from this and "
            f"{file}; write --nodes=4 or --nodes=2-4, and --gpus-per-node=8 or --cpus-per-task=16"
        )


def _refuse_missing_environment(script: BatchScript) -> None:
    """Refuse what slurm/launch.sh would refuse after the job has waited in the queue."""
    file = script.environment.get("LARGEBATCH_ENV", ".venv/bin/activate")
    if file and not Path(file).is_file() and not script.environment.get("LARGEBATCH_CONTAINER"):
        raise UserError(
            f"LARGEBATCH_ENV={file}: there is no such file in {Path.cwd()}, which the job would source on every node; "
            "create it, or name the file that activates your environment: export LARGEBATCH_ENV=/path/to/bin/activate"
        )


def _print_plans(script: BatchScript) -> None:
    assert script.config is not None
    assert script.layout is not None
    node_counts, processes = script.layout
    devices = "GPUs" if script.gpus_per_node else "CPU processes"
    for nodes in node_counts:
        title = f"{script.path.stem} under {script.strategy}, nodes x {devices} per node = {nodes} x {processes}"
        plan = resolve(script.config, nodes * processes, completed_steps=script.completed_steps)
        print(explain(plan, title, notes_on(script.config, plan)))
    # Imported here, because it imports torch.
    from largebatch.optim.trial import try_optimizer

    try_optimizer(plan)
    print("not checked: memory (largebatch plan RECIPE --world-sizes N --gpu-memory GIB); without --dry-run, data")


def _dry_run(script: BatchScript, words: Sequence[str]) -> int:
    """Print what `largebatch prepare` finds about the data, in a process that imports torch, and what Slurm says.

    Return 1 if either would refuse the job.
    """
    ask = partial(
        subprocess.run, env=script.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    task = f"--task={script.task}"
    prepare = [sys.executable, "-m", "largebatch", "prepare", str(script.recipe), task, "--dry-run", *script.overrides]
    prepared = ask(prepare)
    code = 1 if prepared.returncode else 0
    print(f"\n{prepared.stdout.rstrip()}\n")
    try:
        found = ask(["sbatch", "--test-only", *words])
        answers = found.returncode == 0 or ask(["scontrol", "ping"]).returncode == 0
    except OSError as error:
        print(f"not checked: the options of sbatch, because {error.filename} is not installed here")
        return code
    said = found.stdout.rstrip()
    if not answers:
        last = said.rpartition("\n")[2]
        print(f"not checked: the options of sbatch, because Slurm does not answer; nothing was submitted: {last}")
        return code
    print(said)
    return 1 if found.returncode else code


def _submit(script: BatchScript, words: Sequence[str]) -> int:
    """Run sbatch, whose warnings go to stderr, and print job, log and how to follow it."""
    try:
        result = subprocess.run(["sbatch", *words], env=script.environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"sbatch cannot be run ({error.strerror}); submit on a login node of the cluster") from None
    if result.returncode:
        message = (result.stderr or result.stdout).strip()
        raise UserError(f"sbatch refused the job with exit code {result.returncode}: {message}")
    sys.stderr.write(result.stderr)
    # With --clusters, the cluster's name follows.
    job_id = result.stdout.strip().partition(";")[0]
    log = script.log(job_id)
    print(f"\njob {job_id}\nlog    {log}\nfollow tail -F {shlex.quote(log)}")
    return 0
