# How a Slurm job runs something on its nodes: its log, the site profile, the container, srun. Sourced by launch.sh and by
# prepare.sbatch; launch.sh lists the settings.

# shellcheck shell=bash
set -euo pipefail

# A signal may arrive while the output of this script is redirected.
exec {job_log}>&1
say() { printf '[%(%F %T)T] %s\n' -1 "$*" >&"$job_log"; }
leave() { say "$2"; exit "$1"; }

[[ -n ${SLURM_JOB_ID:-} ]] || leave 2 "error: this is not a Slurm job; submit it: sbatch slurm/<recipe>.sbatch"
# Sites with --export=NONE set this variable, and srun would obey it.
case ${SLURM_EXPORT_ENV:=ALL} in
  ALL | ALL,*) ;;
  *) say "note: --export=$SLURM_EXPORT_ENV: other variables of the shell that ran sbatch were not carried to this job; write --strategy and --run-dir behind the script, and other settings into slurm/site.sh, or use sbatch --export=ALL" ;;
esac
export SLURM_EXPORT_ENV=ALL
# Slurm 22.05 and later do not pass --cpus-per-task on to srun.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# In a function, so that the profile does not get this script's arguments; without `set -e`, because its last command may
# return false.
# shellcheck source=/dev/null
read_profile() { [[ ! -f $1 ]] || source "$1"; }
set +eu
read_profile "$(dirname "${BASH_SOURCE[0]}")/site.sh"
set -eu

# A string from the environment is split into words.
[[ $(declare -p LARGEBATCH_SRUN_OPTIONS 2>/dev/null) == "declare -a"* ]] || read -ra LARGEBATCH_SRUN_OPTIONS <<<"${LARGEBATCH_SRUN_OPTIONS:-}"
srun_options=(--ntasks-per-node=1 "${LARGEBATCH_SRUN_OPTIONS[@]}")
step_options=()
in_container=()

# use_container GPUS FOLDER…: run the steps in LARGEBATCH_CONTAINER, if it is set, with these folders besides the usual.
use_container() {
  [[ -n ${LARGEBATCH_CONTAINER:-} ]] || return 0
  # The .venv in this folder was not made for the image.
  export LARGEBATCH_ENV=${LARGEBATCH_ENV-} PYTHONNOUSERSITE=1
  local mounts=$PWD:$PWD folder
  for folder in "${@:2}"; do mounts+=,$folder:$folder; done
  if [[ -n ${HF_HOME:-} ]]; then mkdir -p "$HF_HOME" && mounts+=,$(realpath "$HF_HOME"):$HF_HOME; fi
  mounts+=${LARGEBATCH_CONTAINER_MOUNTS:+,$LARGEBATCH_CONTAINER_MOUNTS}
  case $LARGEBATCH_CONTAINER in
    apptainer:*)
      in_container=(apptainer exec --bind "$mounts" --pwd "$PWD")
      local vendor=${LARGEBATCH_GPU_VENDOR:-$([[ -e /dev/kfd ]] && echo amd || echo nvidia)}
      case $1:$vendor in
        0:*) ;;
        *:nvidia) in_container+=(--nv) ;;
        *:amd) in_container+=(--rocm) ;;
        *) leave 2 "error: LARGEBATCH_GPU_VENDOR=$vendor: write nvidia or amd" ;;
      esac
      in_container+=("${LARGEBATCH_CONTAINER#apptainer:}")
      ;;
    command:*) read -ra in_container <<<"${LARGEBATCH_CONTAINER#command:}" ;;
    *)
      # With a name, the job's steps share one container instead of unpacking the image each.
      srun_options+=(--container-image="$LARGEBATCH_CONTAINER" --container-name="largebatch_$SLURM_JOB_ID")
      srun_options+=(--container-workdir="$PWD" --container-mounts="$mounts" --no-container-mount-home)
      ;;
  esac
}

# container_environment: with pyxis, the image's own values override all variables but these.
container_environment() {
  [[ " ${srun_options[*]}" == *" --container-image="* ]] || return 0
  local names
  names=$(compgen -e | grep -E '^(LARGEBATCH|NCCL|GLOO|FI|UCX|TORCH|PYTORCH|OMP|HF|WANDB)_|^(STRATEGY|RUN_DIR|PYTHONNOUSERSITE)$')
  echo "--container-env=${names//$'\n'/,}"
}

# on_nodes NAMES SCRIPT…: run a script once on each of these nodes, while this script still handles signals.
on_nodes() {
  local names=$1 commas=${1//[^,]/}
  local count=$((${#commas} + 1)) options
  mapfile -t options < <(container_environment)
  # Expanded on the node.
  # shellcheck disable=SC2016
  srun --nodes="$count" --ntasks="$count" --nodelist="$names" "${srun_options[@]}" "${step_options[@]}" "${options[@]}" \
    "${in_container[@]}" bash -c '
      export LARGEBATCH_NODE=$SLURMD_NODENAME LARGEBATCH_NODE_NAMES=$1
      exec bash "${@:2}"' bash "$names" "${@:2}" &
  local srun=$!
  # A signal to this script interrupts `wait`, not srun.
  while kill -0 "$srun" 2>/dev/null; do wait "$srun" || true; done
  wait "$srun"
}
