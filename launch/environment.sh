# Sets up the environment of a node: the site profile, the environment file, and this copy of largebatch. Sourced by
# launch/node.sh, or run with a command as arguments, in the folder that the job was submitted from.
# Without `set -e`: files that activate an environment often end in a command that returns false.
# shellcheck shell=bash

set +eu
# The folder that all of the job's code is taken from: the repository, or a snapshot of it.
code=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export LARGEBATCH_NODE=${LARGEBATCH_NODE:-$(hostname)}
# The caller's values win over those that the files export: all nodes and the batch script must agree on them.
told=$(declare -p RUN_DIR STRATEGY LARGEBATCH_{JOB_ID,RESTART,JOB_END_TIME,BEGAN,NODE,NODE_NAMES,LOGS,TOKEN} 2>/dev/null)
# In functions, so that the files do not get this script's arguments. Standard output is for answers.
# shellcheck source=/dev/null
enter_site() { source "$code/slurm/site.sh" >&2; }
# shellcheck disable=SC1090
activate() { source "$LARGEBATCH_ENV" >&2; }

[[ ! -f $code/slurm/site.sh ]] || enter_site
eval "$told"
LARGEBATCH_ENV=${LARGEBATCH_ENV-.venv/bin/activate}
if [[ -n $LARGEBATCH_ENV ]]; then
  if [[ ! -f $LARGEBATCH_ENV ]]; then
    echo "error: $LARGEBATCH_NODE: LARGEBATCH_ENV=$LARGEBATCH_ENV: there is no such file in $PWD; create your environment as README.md says, name the shell file that activates it, or write LARGEBATCH_ENV= for none" >&2
    exit 2
  fi
  activate || echo "warning: $LARGEBATCH_NODE: the last command of $LARGEBATCH_ENV returned $?" >&2
  eval "$told"
fi
[[ ! -d $code/src/largebatch ]] || export PYTHONPATH=$code/src${PYTHONPATH:+:$PYTHONPATH}
for command in largebatch accelerate; do
  if ! type "$command" &>/dev/null; then
    echo "error: $LARGEBATCH_NODE: $command is not found${LARGEBATCH_ENV:+ after $LARGEBATCH_ENV}; set LARGEBATCH_ENV to the shell file of an environment that has it" >&2
    exit 127
  fi
done
set -euo pipefail
[[ ${BASH_SOURCE[0]} != "$0" ]] || "$@"
