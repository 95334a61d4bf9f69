"""A job as it is handed to sbatch."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from largebatch.config import config_class_of
from largebatch.errors import UserError
from largebatch.plan import explain, resolve
from largebatch.source_code import take_snapshot
from largebatch.tools.slurm.batch_script import SCRIPTS, BatchScript, log_path, read_script
from largebatch.tools.slurm.files import lint_scripts
from largebatch.tools.slurm.sbatch import read_options
from largebatch.tools.slurm.site import site_environment

RUN_OPTIONS = {"resume", "allow-change"}


def submit(options: argparse.Namespace) -> bool:
    """Submit a recipe's job, as `run` of the command does; return whether the checks found nothing."""
    run_options, words = _take(options.overrides, RUN_OPTIONS)
    recipe: Path = options.config
    if not recipe.is_file():
        raise UserError(f"{recipe}: no such file; give the path of a recipe's JSON, or its name")
    fields = config_class_of(recipe.parent, recipe).model_fields
    overrides, words = _take(words, fields)
    per_node = [f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []
    sbatch_options = [f"--nodes={options.nodes}", *per_node, *words]
    _require_options(sbatch_options, fields)
    environment = site_environment()
    if options.strategy:
        environment["STRATEGY"] = options.strategy
    if options.run_dir:
        environment["RUN_DIR"] = str(options.run_dir)
    file = SCRIPTS / f"{recipe.stem}.sbatch"
    if not file.is_file():
        raise UserError(f"there is no {file} to submit {recipe} with; copy another recipe's, and change it")
    script = read_script(file, sbatch_options, overrides, environment.get("STRATEGY"), environment)
    if script.recipe and script.recipe.resolve() != recipe.resolve():
        raise UserError(
            f"{file} runs {script.recipe}, not {recipe}; submit {script.recipe}, or change RECIPE in the script"
        )
    if findings := lint_scripts([script]):
        print(*findings, "not submitted", sep="\n")
        return False
    _print_plans(script)
    missing = _missing_environment(environment)
    if options.dry_run:
        _print_data(script, environment)
    else:
        print("not checked: the data and any tokenizer; --dry-run looks at them")
        if missing:
            raise UserError(missing)
        # A copy, so that edits do not change what runs while the job waits in the queue or between its starts.
        jobs = Path(environment.get("RUN_DIR") or f"runs/{recipe.stem}", "jobs")
        snapshot = (jobs / f"snapshot_{datetime.now():%Y%m%d_%H%M%S_%f}").absolute()
        take_snapshot(Path(), snapshot)
        environment["LARGEBATCH_SNAPSHOT"] = str(snapshot)
    settings = [name for name in sorted(environment) if re.fullmatch("STRATEGY|RUN_DIR|LARGEBATCH_.*", name)]
    # Values may have commas, so only the names are given. On the command line it outranks SBATCH_EXPORT=NONE.
    words = ["sbatch", "--parsable", *sbatch_options, f"--export={','.join(['ALL', *settings])}"]
    words += [str(file), *overrides, *run_options]
    shown = [*settings, *(name for name in sorted(environment) if name.startswith("SBATCH_"))]
    variables = [f"{name}={shlex.quote(environment[name])}" for name in shown]
    print("\n" + " ".join([*variables, *map(shlex.quote, words)]), flush=True)
    job_id = "%j" if options.dry_run else _run(words, environment)
    path = log_path(script, script.options.get("output"), job_id)
    unknown = ", ".join(dict.fromkeys(re.findall(r"%\d*[A-Za-z]", path)))
    print(f"log    {path}" + (f" (Slurm fills in {unknown})" if unknown else ""))
    print(f"follow tail -F {shlex.quote(path)}")
    if missing:
        print(f"warning: {missing}")
    return True


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
            if (value := next(rest, None)) is None:
                raise UserError(f"{word}: has no value; write {word} VALUE")
            taken.append(value)
    return taken, others


def _require_options(sbatch_options: Sequence[str], fields: Collection[str]) -> None:
    """Refuse a word that is not an option: sbatch would take the first one as its script."""
    for name, value in read_options(sbatch_options):
        if name == "export":
            raise UserError(
                f"--export={value}: all of the environment is passed on, with the settings of the job; remove it"
            )
        if not name:
            raise UserError(f"{value}: not an option; write --section.field VALUE, or an option of sbatch")
        if "." in name or "_" in name:
            known = ", ".join(sorted(fields))
            raise UserError(f"--{name}: neither a field of the recipe nor an option of sbatch; sections are {known}")


def _missing_environment(environment: Mapping[str, str]) -> str | None:
    """The error that slurm/launch.sh would report about the environment, after the job has waited in the queue."""
    file = environment.get("LARGEBATCH_ENV", ".venv/bin/activate")
    if not file or Path(file).is_file() or environment.get("LARGEBATCH_CONTAINER"):
        return None
    return (
        f"LARGEBATCH_ENV={file}: there is no such file in {Path.cwd()}, which the job would source on every node; "
        "create it there, or name the file that activates your environment: export LARGEBATCH_ENV=/path/to/bin/activate"
    )


def _print_plans(script: BatchScript) -> None:
    assert script.config is not None
    assert script.recipe is not None
    assert script.layout is not None
    node_counts, processes = script.layout
    devices = "GPUs" if script.asks_for_gpus else "processes" if script.given_processes else "CPU processes"
    for nodes in node_counts:
        title = f"{script.recipe.stem} under {script.strategy}, nodes x {devices} per node = {nodes} x {processes}"
        # Only the batch is divided differently on another number of nodes.
        sections = ("Batch", "Steps", "Learning rate") if nodes == node_counts[-1] else ("Batch",)
        print(explain(resolve(script.config, nodes * processes), title, sections))
    estimate = [
        "largebatch",
        "plan",
        str(script.recipe),
        f"--world-sizes={node_counts[-1] * processes}",
        *script.overrides,
    ]
    print(f"not checked: memory, which is estimated by {shlex.join(estimate)}")


def _print_data(script: BatchScript, environment: Mapping[str, str]) -> None:
    """What of the data is prepared, is missing or cannot be used, as another process finds, which imports torch."""
    words = [sys.executable, "-m", "largebatch", "prepare", str(script.recipe), "--dry-run", *script.overrides]
    found = subprocess.run(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print("", *found.stdout.splitlines(), sep="\n")


def _run(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Submit, and return the job's number."""
    try:
        result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"sbatch cannot be run ({error.strerror}); submit on a login node of the cluster") from None
    if result.returncode:
        message = (result.stderr or result.stdout).strip()
        raise UserError(f"sbatch refused the job with exit code {result.returncode}: {message}")
    sys.stderr.write(result.stderr)
    job_id, _, cluster = result.stdout.strip().partition(";")
    print(f"\njob {job_id}{f' on cluster {cluster}' if cluster else ''}")
    return job_id
