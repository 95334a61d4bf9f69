"""What pyproject.toml cannot say: the recipes and what they run with travel in the wheel, as largebatch/shipped.

In a checkout and in editable installs they are where they are.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = (
    "recipes/*/*.*",
    "ds_configs/*.json",
    "launch/*.*",
    "slurm/*.sbatch",
    "slurm/launch.sh",
    "slurm/steps.sh",
    "slurm/site.example.sh",
    "slurm/sites/*.sh",
    "requirements.txt",
    "LICENSE",
)


class BuildWithRecipes(build_py):
    """Adds the shipped files to the package in a wheel, and to the sources in an sdist."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for file in shipped_files():
            target = Path(self.build_lib, "largebatch", "shipped", file)
            self.mkpath(str(target.parent))
            self.copy_file(file, str(target))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *shipped_files()]


def shipped_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in SHIPPED for path in ROOT.glob(pattern) if path.is_file())


setup(cmdclass={"build_py": BuildWithRecipes})
