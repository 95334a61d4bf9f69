"""The environment of a job that is submitted here: this process's, and the settings of the site's profile."""

import os
import re
import subprocess
from pathlib import Path

from largebatch.errors import UserError
from largebatch.tools.slurm.batch_script import SCRIPTS

PROFILE = SCRIPTS / "site.sh"
# What a job sets for its own processes, in case this is one of them.
OF_A_JOB = re.compile("LARGEBATCH_(JOB_ID|RESTART|JOB_END_TIME|NODE|NODE_NAMES|TOKEN|LOGS|REFUSAL|BEGAN|SNAPSHOT)")
SETTING = re.compile("(SBATCH|LARGEBATCH)_.*|STRATEGY|RUN_DIR")
# A last command that returns false, such as a test, is not a failure unless it prints an error.
SOURCE = 'bash -n "$1" && { source "$1" >/dev/null; printf "%s\\0" "$?"; env -0; }'


def site_environment() -> dict[str, str]:
    """This process's variables, with the settings that slurm/site.sh exports, if there is one.

    Raises:
        UserError: The profile fails.
    """
    environment = {name: value for name, value in os.environ.items() if not OF_A_JOB.fullmatch(name)}
    if not PROFILE.is_file():
        return environment
    result = subprocess.run(
        ["bash", "-c", SOURCE, "bash", PROFILE],
        env=environment,
        capture_output=True,
        text=True,
        errors="surrogateescape",
    )
    code, _, variables = result.stdout.partition("\0")
    if result.returncode or (code != "0" and result.stderr):
        reason = result.stderr.strip() or f"it ended with exit code {result.returncode}"
        raise UserError(f"{Path.cwd() / PROFILE} fails: {reason}")
    pairs = (variable.partition("=") for variable in variables.split("\0"))
    return environment | {name: value for name, _, value in pairs if SETTING.fullmatch(name)}
