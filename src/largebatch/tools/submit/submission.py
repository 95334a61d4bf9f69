"""A job as it is handed to sbatch."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from largebatch.config import config_class_of
from largebatch.errors import UserError, did_you_mean
from largebatch.plan import explain, resolve
from largebatch.task_folders import recipes_in
from largebatch.tools.lint.job import SCRIPTS, CommandLine, Job, read_job
from largebatch.tools.lint.project import RECIPES, lint_files
from largebatch.tools.lint.sbatch import log_path, read_options

RUN_OPTIONS = {"resume", "allow-change"}


def submit(options: argparse.Namespace) -> bool:
    """Submit a recipe's job, as `run` of the command does; return whether nothing was found that speaks against it."""
    run_options, words = _take(options.overrides, RUN_OPTIONS)
    recipe = _find_recipe(options.recipe)
    fields = config_class_of(recipe.parent, recipe).model_fields
    overrides, words = _take(words, fields)
    per_node = [f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []
    sbatch_options = [f"--nodes={options.nodes}", *per_node, *words]
    _require_options(sbatch_options, fields)
    # sbatch hands on the environment: what is set there has an effect, so it is checked and shown.
    given = {
        "STRATEGY": options.strategy or os.environ.get("STRATEGY"),
        "RUN_DIR": options.run_dir or os.environ.get("RUN_DIR"),
        "LARGEBATCH_ENV": os.environ.get("LARGEBATCH_ENV"),
    }
    environment = {name: str(value) for name, value in given.items() if value}
    script = _find_script(recipe)
    words = ["sbatch", "--parsable", *sbatch_options, str(script), *overrides, *run_options]
    folder = environment.get("RUN_DIR")
    command_line = CommandLine(
        tuple(sbatch_options), tuple(overrides), environment.get("STRATEGY"), Path(folder) if folder else None
    )
    findings = lint_files([script], command_line).findings
    if findings:
        print(*findings, "not submitted", sep="\n")
        return False
    job = read_job(script, command_line)
    _print_plans(job)
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    print("\n" + " ".join([*variables, *map(shlex.quote, words)]), flush=True)
    missing = _missing_environment()
    if missing and not options.dry_run:
        raise UserError(missing)
    job_id = None if options.dry_run else _run(words, environment)
    _print_log(job, job_id)
    if missing:
        print(f"warning: {missing}")
    return True


# --- the command line ---------------------------------------------------------------------------------------------


def _take(words: Sequence[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """The words of the options `--name…` and `--name.field…` with their values, and the other words."""
    taken: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if not word.startswith("--") or name[2:].partition(".")[0] not in names:
            others.append(word)
            continue
        taken.append(word)
        if not equals:
            value = next(rest, None)
            if value is None:
                raise UserError(f"{word}: has no value; write {word} VALUE")
            taken.append(value)
    return taken, others


def _require_options(sbatch_options: Sequence[str], fields: Collection[str]) -> None:
    """sbatch would take the first word that is no option for its script."""
    for name, value in read_options(sbatch_options):
        if not name:
            raise UserError(f"{value}: not an option; write --section.field VALUE, or an option of sbatch")
        if name == "run_dir":
            raise UserError("--run_dir: options are spelled with dashes; write --run-dir")
        if "." in name:
            known = ", ".join(sorted(fields))
            raise UserError(f"--{name}: neither a field of the recipe nor an option of sbatch; sections are {known}")


def _find_recipe(recipe: str) -> Path:
    path = Path(recipe)
    if path.suffix == ".json":
        if not path.is_file():
            raise UserError(f"{recipe}: no such file; give the path of a recipe's JSON, or its name")
        return path
    known = sorted(recipes_in(RECIPES), key=lambda path: path.stem)
    found = [path for path in known if path.stem == recipe]
    if not found:
        names = [path.stem for path in known]
        raise UserError(
            f"{recipe}: no such recipe{did_you_mean(recipe, names)}; known: "
            + (", ".join(names) or f"none in {Path.cwd()}")
        )
    if len(found) > 1:
        raise UserError(f"{recipe}: there is more than one; write {' or '.join(map(str, found))}")
    return found[0]


def _find_script(recipe: Path) -> Path:
    script = SCRIPTS / f"{recipe.stem}.sbatch"
    if not script.is_file():
        raise UserError(f"there is no {script} to submit {recipe} with; copy another recipe's, and change it")
    named = read_job(script, CommandLine()).recipe
    if named and named.resolve() != recipe.resolve():
        raise UserError(f"{script} runs {named}, not {recipe}; submit {named}, or change RECIPE in the script")
    return script


def _missing_environment() -> str | None:
    """What slurm/launch.sh would say of the environment, after the job has waited in the queue."""
    file = os.environ.get("LARGEBATCH_ENV", ".venv/bin/activate")
    if not file or Path(file).is_file() or os.environ.get("LARGEBATCH_CONTAINER"):
        return None
    return (
        f"LARGEBATCH_ENV={file}: there is no such file in {Path.cwd()}, which the job would source on every node; make "
        "the environment there, or name the file that activates yours: export LARGEBATCH_ENV=/path/to/bin/activate"
    )


# --- what is shown and done ---------------------------------------------------------------------------------------


def _print_plans(job: Job) -> None:
    assert job.config is not None
    assert job.recipe is not None
    processes, _ = job.processes_per_node()
    for nodes in job.node_counts():
        title = f"{job.recipe.stem} under {job.strategy}, nodes x processes per node = {nodes} x {processes}"
        print(explain(resolve(job.config, nodes * processes), title, sections=("Batch",)))


def _run(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Submit, and return the job's number."""
    try:
        result = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"sbatch cannot be run ({error.strerror}); submit on a login node of the cluster") from None
    if result.returncode:
        message = (result.stderr or result.stdout).strip()
        raise UserError(f"sbatch refused the job with exit code {result.returncode}: {message}")
    sys.stderr.write(result.stderr)
    job_id, _, cluster = result.stdout.strip().partition(";")
    print(f"\njob {job_id}{f' on cluster {cluster}' if cluster else ''}")
    return job_id


def _print_log(job: Job, job_id: str | None) -> None:
    path, unknown = log_path(job.script, job.script.option("output"), job_id)
    filled = f" (Slurm fills in {', '.join(dict.fromkeys(unknown))})" if unknown else ""
    print(f"log    {path}{filled}")
    print(f"follow tail -F {shlex.quote(path)}")
