"""The texts that are written for a bundle: README, test, requirements and, with the package in it, its build."""

import json
import textwrap
from importlib import resources
from string import Template

from largebatch import __version__
from largebatch.plan.strategies import STRATEGIES
from largebatch.tools.new.job import BundledJob, shipped_folder
from largebatch.tools.verify.tiny import debug_model_overrides, tiny_data_overrides

WIDTH = 120
CHECKS = "# Tests and checks"
WHEEL = f"largebatch-{__version__}-py3-none-any.whl"


class _Text(Template):
    # Shells' prompts and variables are dollars.
    delimiter = "@"


def texts(job: BundledJob, vendor: bool) -> dict[str, str]:
    """The texts by their path from the top of the bundle."""
    small = [*debug_model_overrides(job.config), *tiny_data_overrides(job.config)]
    values = {
        "name": job.name,
        "recipe": str(job.recipe),
        "task": job.task,
        "strategy": job.strategy,
        "strategies": ", ".join(STRATEGIES),
        "script": str(job.script),
        "intro": textwrap.fill(_intro(job), WIDTH),
        "data": textwrap.fill(job.data, WIDTH),
        "set_up": _template("set_up_vendored.md" if vendor else "set_up.md").substitute(wheel=WHEEL).rstrip(),
        "processes": job.processes,
        "launch": job.launch(),
        "submit": job.submit(),
        "verify": job.verify(),
        "overrides": "".join(f"    {_literal(word)},\n" for word in small),
    }
    test = _template("test_task.py.txt" if job.is_template else "test_recipe.py.txt").substitute(values)
    written = {
        "README.md": _template("README.md").substitute(values),
        "requirements.txt": _requirements(vendor),
        ".gitignore": _template("gitignore").template,
        "tests/test_recipe.py": test + (_template("test_vendored.py.txt").template if vendor else ""),
    }
    if job.is_template:
        # These stand in the template's own files, which are complete but for the names.
        for name in (str(job.script), f"{job.recipe.parent}/README.md"):
            written[name] = _template(f"task/{'task.sbatch' if name.endswith('sbatch') else 'README.md'}").substitute(
                values
            )
    if vendor:
        written["pyproject.toml"] = _template("pyproject.toml").template
    return written


def _intro(job: BundledJob) -> str:
    if job.is_template:
        return (
            f"A large-batch training task, to be changed into your own, made with largebatch {__version__}. It runs "
            f"under `{job.strategy}` unless told otherwise. recipes/{job.task}/README.md says what its files are for."
        )
    return (
        f"A large-batch training job: the recipe `{job.task}/{job.name}` of largebatch {__version__}, copied to be "
        f"changed. It runs under `{job.strategy}` unless told otherwise. What it follows and what to expect of it is "
        f"in [recipes/{job.task}/README.md](recipes/{job.task}/README.md), which also speaks of recipes that were not "
        "copied, as does `train.py`."
    )


def _template(name: str) -> _Text:
    return _Text(resources.files("largebatch.tools.new").joinpath("templates", name).read_text(encoding="utf-8"))


def _literal(word: str) -> str:
    """A string as formatters write it: in double quotes, unless there are some in it."""
    return repr(word) if '"' in word else json.dumps(word)


def _requirements(vendor: bool) -> str:
    """The tested versions of what a run needs and of pytest, and largebatch itself."""
    run, _, checks = (shipped_folder() / "requirements.txt").read_text(encoding="utf-8").partition(CHECKS)
    lines = [f"# The set that largebatch {__version__} was tested with.", *_pins(run), "", CHECKS]
    lines += [pin for pin in _pins(checks) if pin.startswith("pytest==")]
    if not vendor:
        lines += ["", "# From the wheel that README.md names.", f"largebatch=={__version__}"]
    return "\n".join(lines) + "\n"


def _pins(text: str) -> list[str]:
    return [line for line in text.splitlines() if "==" in line and not line.startswith(("#", "largebatch=="))]
