"""Creates a bundle: the files that are copied, and the texts that are written for it."""

import math
import re
import shutil
import stat
from pathlib import Path
from string import Template

from largebatch import __version__
from largebatch.config.data import HubOrLocal
from largebatch.errors import UserError
from largebatch.plan.strategies import STRATEGIES
from largebatch.task_folders import SCHEMA
from largebatch.tools.new.job import PACKAGE, TEMPLATES, BundledJob, shipped_folder
from largebatch.tools.verify.tiny import debug_model_overrides, tiny_data_overrides

COPIED = (
    "recipes/accelerate_configs/*.yaml",
    "ds_configs/*.json",
    "launch/*.*",
    "slurm/launch.sh",
    "slurm/site.example.sh",
)
LICENSE = "LICENSE.largebatch"
CHECKS = "# Tests and checks"


def create_bundle(folder: Path, job: BundledJob, vendor: bool) -> None:
    """Copy a recipe, and everything it needs to run, into a new self-contained folder.

    The layout is the repository's, so that every command works the same in both. With `vendor` the package is
    copied as well, instead of being named in requirements.txt.

    Raises:
        UserError: The folder exists or cannot be written, or the recipe's script does not set STRATEGY as others do.
            Nothing is left behind.
    """
    try:
        folder.mkdir()
        try:
            _write(folder, job, vendor)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"{folder} cannot be created ({why}); give a new folder, where you may write") from error


def _write(folder: Path, job: BundledJob, vendor: bool) -> None:
    shipped = shipped_folder()
    of_the_task = (path for path in job.source.parent.iterdir() if path.suffix in (".py", ".md") or path.name == SCHEMA)
    copies = {job.recipe.parent / path.name: path for path in of_the_task}
    copies |= {path.relative_to(shipped): path for pattern in COPIED for path in shipped.glob(pattern)}
    copies |= {job.recipe: job.source, job.script: job.batch_script}
    # The license of the copied files, not of the new repository. A vendored package finds it under this name.
    copies[Path(LICENSE)] = next(path for name in (LICENSE, "LICENSE") if (path := shipped / name).is_file())
    for target, source in copies.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        # Of the source's permissions only who may run it: an installation may be read-only.
        shutil.copyfile(source, folder / target)
        if source.stat().st_mode & stat.S_IXUSR:
            mode = (folder / target).stat().st_mode
            (folder / target).chmod(mode | (mode & 0o444) >> 2)
    for name, text in _texts(job, vendor).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    _set_strategy(folder / job.script, job.strategy)
    if vendor:
        ignored = shutil.ignore_patterns("__pycache__", "shipped")
        shutil.copytree(PACKAGE, folder / "src/largebatch", ignore=ignored, copy_function=shutil.copyfile)


def _set_strategy(script: Path, strategy: str) -> None:
    text, count = re.subn(r"(?<=\nSTRATEGY=\$\{STRATEGY:-)\w+(?=\}\n)", strategy, script.read_text(encoding="utf-8"))
    if count != 1:
        raise UserError(f"{script.name} sets STRATEGY {count} times by default; write STRATEGY=${{STRATEGY:-ddp}} once")
    script.write_text(text, encoding="utf-8")


# --- the texts that are written -----------------------------------------------------------------------------------


class _Text(Template):
    # Dollar signs belong to shells.
    delimiter = "@"


def _texts(job: BundledJob, vendor: bool) -> dict[str, str]:
    """README, test, requirements and, with the package in the bundle, its build: by their paths from the top."""
    data = job.config.data
    small = [*debug_model_overrides(job.config), *tiny_data_overrides(job.config)]
    values = {
        "version": __version__,
        "name": job.name,
        "recipe": str(job.recipe),
        "task": job.task,
        "strategy": job.strategy,
        "strategies": ", ".join(STRATEGIES),
        "script": str(job.script),
        "data_path": data.path if isinstance(data, HubOrLocal) else "",
        "processes": str(math.prod(job.size)),
        "launch": job.launch(),
        "submit": job.submit(),
        "verify": job.verify(),
        "overrides": "".join(f"    {word!r},\n" for word in small),
    }

    def filled(template: str) -> str:
        return _Text((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)

    kind = "task" if job.is_template else "recipe"
    values |= {
        "intro": filled(f"intro_{kind}.md").rstrip(),
        "data": filled("data_of_a_hub.md" if isinstance(data, HubOrLocal) else "data_included.md").rstrip(),
        "set_up": filled("set_up_vendored.md" if vendor else "set_up.md").rstrip(),
    }
    written = {
        "README.md": filled("README.md"),
        "requirements.txt": _requirements(vendor),
        ".gitignore": filled("gitignore"),
        "tests/test_recipe.py": filled(f"test_{kind}.py.txt") + (filled("test_vendored.py.txt") if vendor else ""),
    }
    if job.is_template:
        # The template's other files are complete; these have names to fill in.
        written[str(job.script)] = filled("task/task.sbatch")
        written[f"{job.recipe.parent}/README.md"] = filled("task/README.md")
    if vendor:
        written["pyproject.toml"] = filled("pyproject.toml")
    return written


def _requirements(vendor: bool) -> str:
    """The tested versions of what a run needs and of pytest, and largebatch itself."""
    run, _, checks = (shipped_folder() / "requirements.txt").read_text(encoding="utf-8").partition(CHECKS)
    lines = [f"# The versions that largebatch {__version__} was tested with.", *_pins(run), "", CHECKS]
    lines += [pin for pin in _pins(checks) if pin.startswith("pytest==")]
    if not vendor:
        lines += ["", "# From the wheel that README.md names.", f"largebatch=={__version__}"]
    return "\n".join(lines) + "\n"


def _pins(text: str) -> list[str]:
    return [line for line in text.splitlines() if "==" in line and not line.startswith(("#", "largebatch=="))]
