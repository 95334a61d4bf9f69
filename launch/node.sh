#!/usr/bin/env bash
# Trains a recipe on one of a job's nodes: pre-flight, then `accelerate launch`. Anything that runs it on all nodes at
# once can train on them: slurm/launch.sh, launch/hosts.sh, launch/kubernetes.yaml; docs/launching.md has others.
#
#   launch/node.sh --nodes N --node-rank R --address HOST --port P [options] RECIPE [--section.field VALUE …]
#
#   --nodes, --node-rank       number of nodes, and of this one, from 0; default: its place in LARGEBATCH_NODE_NAMES
#   --address, --port          address of the first node (rank 0), and a free port on it
#   --gpus-per-node            default: all that the node has; 0 trains on CPUs
#   --processes-per-node       default: one per GPU; without GPUs, one
#   --preflight-only, --train-only
#
# From the environment: STRATEGY (default: ddp), RUN_DIR, shared by all nodes (default: runs/<recipe>), and
#
#   LARGEBATCH_ENV             shell file to source first; default: .venv/bin/activate; empty for none
#   LARGEBATCH_PREFLIGHT       on, warn or off
#   LARGEBATCH_WRAP            command to put before `accelerate launch`, such as nsys profile; an array in site.sh
#   LARGEBATCH_CORE_LIMIT      largest core file in KiB; default: 0, since a node would write one per process
#   LARGEBATCH_JOB_ID, LARGEBATCH_RESTART     the job, and how many times it was restarted; no two starts may share
#                              both. With one node, both can be left out
#   LARGEBATCH_JOB_END_TIME    when the job's time ends, in seconds since 1970
#   LARGEBATCH_NODE, LARGEBATCH_NODE_NAMES    name of this node, and of all nodes in order, separated by commas
#   LARGEBATCH_LOGS, LARGEBATCH_TOKEN         a new folder for this start, shared by all nodes, and what the caller has
#                              written to preflight/token in it; default: derived from job and restart
set -euo pipefail

fail() { echo "error: ${LARGEBATCH_NODE:-$(hostname)}: $2" >&2; exit "$1"; }

# The programs handle signals and decide when to end. In a container, only the first process gets the signals, so it
# passes them on; elsewhere, they reach the whole process group.
# shellcheck disable=SC2317 # the traps below call it
pass_on() { (($$ > 1)) || kill -s "$1" -- -1; }
for signal in TERM INT USR1; do
  # shellcheck disable=SC2064
  trap "pass_on $signal" "$signal"
done

nodes='' node_rank='' address='' port='' gpus='' processes='' preflight=1 train=1
while (($#)); do
  [[ $1 != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
  case $1 in
    --nodes | --node-rank | --address | --port | --gpus-per-node | --processes-per-node)
      (($# > 1)) || fail 2 "$1 needs a value"
      [[ $1 == --address || $2 =~ ^[0-9]+$ ]] || fail 2 "$1 $2: not a number"
      case $1 in
        --nodes) nodes=$2 ;;
        --node-rank) node_rank=$2 ;;
        --address) address=$2 ;;
        --port) port=$2 ;;
        --gpus-per-node) gpus=$2 ;;
        --processes-per-node) processes=$2 ;;
      esac
      shift 2
      ;;
    --preflight-only) train='' && shift ;;
    --train-only) preflight='' && shift ;;
    -*) fail 2 "$1: not an option of node.sh; options of the recipe go after the recipe" ;;
    *) break ;;
  esac
done
if [[ -z $node_rank && -n ${LARGEBATCH_NODE_NAMES:-} ]]; then
  node_rank=0
  for name in ${LARGEBATCH_NODE_NAMES//,/ }; do [[ $name != "${LARGEBATCH_NODE:-}" ]] || break; ((++node_rank)); done
fi
[[ -n $nodes && -n $node_rank && -n $address && -n $port && $# -gt 0 ]] ||
  fail 2 "write node.sh --nodes N --node-rank R --address HOST --port P RECIPE"
((node_rank < nodes)) || fail 2 "--node-rank $node_rank: there are $nodes nodes, counted from 0"
# An IPv6 address is written in brackets where a port follows.
[[ $address != *:* || $address == \[* ]] || address="[$address]"
recipe=$1
shift

# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# --- what to run ---

[[ $code -ef . || $recipe == /* || ! -f $code/$recipe ]] || recipe=$code/$recipe
[[ -f $recipe ]] || fail 2 "there is no $recipe in $PWD; run this in the top folder of the repository, which all nodes must see"
# The folder of the recipe's task: the recipe's own, or that of its "$schema".
task=$(dirname "$recipe")
if [[ ! -f $task/train.py ]]; then
  # shellcheck disable=SC2016 # of the JSON
  schema=$(sed -nE '/"\$schema"/{s/.*"\$schema" *: *"([^"]*)".*/\1/p;q}' "$recipe")
  [[ $schema == /* ]] || schema=$task/$schema
  task=$(dirname "$schema")
fi
[[ -f $task/train.py ]] || fail 2 "$recipe: there is no train.py in its folder or in that of its \"\$schema\"; write \"\$schema\": \"TASK/recipe.schema.json\" into it, the path of its task's folder from this one"
strategy=${STRATEGY:-ddp}
config=recipes/accelerate_configs/$strategy.yaml
[[ $strategy != *.yaml ]] || config=$strategy
[[ $code -ef . || $config == /* || ! -f $code/$config ]] || config=$code/$config
[[ -f $config ]] || fail 2 "STRATEGY=$strategy: there is no $config; write ddp, fsdp, hsdp, zero1, zero2, zero3, or the path of an Accelerate config"
run_dir=${RUN_DIR:-runs/$(basename "$recipe" .json)}
[[ $run_dir != *://* ]] || fail 2 "RUN_DIR=$run_dir: runs are not written to object stores; write a folder of a shared file system, and copy it afterward: aws s3 sync, gcloud storage rsync, rclone sync"

gpus_found() {
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true
  elif [[ -e /dev/kfd ]]; then
    # CPUs are nodes of this topology too; they have no SIMDs.
    grep -lsE '^simd_count [1-9]' /sys/class/kfd/kfd/topology/nodes/*/properties | wc -l
  else
    echo 0
  fi
}
if [[ -z $gpus ]]; then
  gpus=$(gpus_found)
  # Slurm and others may give a job only some of a node's GPUs, but then they say how many.
  ((gpus == 0)) || gpus=${processes:-$gpus}
fi
processes=${processes:-$((gpus > 0 ? gpus : 1))}

# --- the folder and the token of this start, on which all nodes must agree before they can talk ---

job=${LARGEBATCH_JOB_ID:-} restart=${LARGEBATCH_RESTART:-}
[[ $job != */* ]] || fail 2 "LARGEBATCH_JOB_ID=$job: it names a folder and may not contain a slash"
[[ $restart =~ ^[0-9]*$ ]] || fail 2 "LARGEBATCH_RESTART=$restart: not a number; write 0 for the job's first start"
[[ ${LARGEBATCH_LOGS:+set} == "${LARGEBATCH_TOKEN:+set}" ]] || fail 2 "LARGEBATCH_LOGS and LARGEBATCH_TOKEN go together; set both or neither"
folder=${LARGEBATCH_LOGS:-}/preflight
if [[ -z ${LARGEBATCH_TOKEN:-} ]]; then
  if [[ -z $job || -z $restart ]]; then
    ((nodes == 1)) || fail 2 "$nodes nodes need the same name for this start: set LARGEBATCH_JOB_ID to the job's id and LARGEBATCH_RESTART to the number of its restarts on all of them, or use launch/hosts.sh"
    restart=$(BASH_ENV='' bash "$code/launch/claim_start.sh" "$run_dir/jobs/${job:-none}")
    [[ -z $job ]] || export LARGEBATCH_RESTART=$restart
  fi
  export LARGEBATCH_LOGS=$run_dir/jobs/${job:-none}/start_$restart
  LARGEBATCH_TOKEN=${job:-none}.$restart
  folder=$LARGEBATCH_LOGS/preflight
  if ((node_rank == 0)); then
    # What an earlier start of this name has left must not be taken for this one's. Other nodes write their reports
    # again.
    rm -rf "$folder" "$LARGEBATCH_LOGS/endings"
    mkdir -p "$folder"
    echo "$LARGEBATCH_TOKEN" >"$folder/token"
  fi
else
  # The caller wrote it before this node started; network file systems may hide new files for a minute.
  for ((waited = 0; waited < 60; waited++)); do
    [[ $(cat "$folder/token" 2>/dev/null) != "$LARGEBATCH_TOKEN" ]] || break
    sleep 1
  done
  ((waited < 60)) || fail 3 "$PWD: $folder is not the folder that the caller wrote to; the run folder must be on a file system that all nodes share, and be mounted in containers"
fi
mkdir -p "$folder"

# --- settings of the processes; values that you have set win ---

cpus=$(env -u OMP_NUM_THREADS nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((gpus > 0 && cpus > processes ? cpus / processes : 1))}
# By themselves, NCCL and gloo can be reached from other machines, also on one node.
((nodes > 1)) || export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
# Each process would compile with 32 threads.
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$OMP_NUM_THREADS}
# Samples of unequal lengths, and weights that are gathered and freed, would fragment a GPU's memory.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
ulimit -c "${LARGEBATCH_CORE_LIMIT:-0}" || echo "warning: $LARGEBATCH_NODE: LARGEBATCH_CORE_LIMIT=$LARGEBATCH_CORE_LIMIT is not allowed here" >&2
# The last collectives of every process, for torchfrtrace; NCCL's heartbeat writes them when one hangs.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_FR_DUMP_TEMP_FILE=$LARGEBATCH_LOGS/fr_ TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$LARGEBATCH_LOGS/fr_
# The launcher passes these signals on to the processes and waits until they have saved, instead of orphaning them.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1800
# The processes compare the token first of all. Torch's store tells its names to whoever asks, so it gets a digest.
export LARGEBATCH_TOKEN
PET_RDZV_ID=$(sha256sum <<<"$LARGEBATCH_TOKEN")
export PET_RDZV_ID=${PET_RDZV_ID%% *}
# shellcheck disable=SC2016 # torch fills it in
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '

# Runs a command while this script still handles signals.
attend() {
  # In bash 5.2, `wait` may lose the exit code of a process that ends by the signal that interrupts it. Where no signals
  # have to be passed on, there is no need to wait.
  if (($$ > 1)); then "$@"; return; fi
  "$@" &
  local child=$!
  # A signal to this script interrupts `wait`, not the command.
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  wait "$child"
}

# --- pre-flight ---

mode=${LARGEBATCH_PREFLIGHT:-on}
[[ $mode =~ ^(on|warn|off)$ ]] || fail 2 "LARGEBATCH_PREFLIGHT=$mode: write on, warn or off"
if [[ -n $preflight && $mode != off ]]; then
  seconds=${LARGEBATCH_PREFLIGHT_SECONDS:-600} bandwidth=${LARGEBATCH_MIN_BUSBW:-0}
  [[ $seconds =~ ^[0-9]+$ ]] || fail 2 "LARGEBATCH_PREFLIGHT_SECONDS=$seconds: not a number of seconds; write 600"
  [[ $bandwidth =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail 2 "LARGEBATCH_MIN_BUSBW=$bandwidth: not a number of GB/s; write 100"
  limit=$((seconds + 600)) result=0
  # The pre-flight ends by itself, unless a driver hangs. It runs in the foreground to stay in this process group.
  attend timeout --foreground --kill-after=10 "$limit" largebatch preflight "$recipe" --accelerate-config "$config" \
    --node-rank "$node_rank" --num-nodes "$nodes" --address "$address" --port "$port" --gpus "$gpus" \
    --seconds "$seconds" --min-busbw "$bandwidth" || result=$?
  case $result in
    2 | 3) problem="the pre-flight has found problems" ;;
    124) problem="the pre-flight did not end within $limit seconds (LARGEBATCH_PREFLIGHT_SECONDS + 600) on this node" ;;
    137) problem="the pre-flight was killed on this node: for lack of memory, or after $limit seconds (LARGEBATCH_PREFLIGHT_SECONDS + 600)" ;;
    *) problem= ;;
  esac
  if [[ -n $problem && $mode == warn ]]; then
    echo "warning: $LARGEBATCH_NODE: $problem; training starts anyway (LARGEBATCH_PREFLIGHT=warn)" >&2
    result=0
  fi
  ((result != 124 && result != 137)) || fail 2 "$problem; a GPU driver or a file system that hangs is the usual cause"
  ((result == 0)) || exit "$result"
fi
[[ -n $train ]] || exit 0

# --- training ---

if declare -F before_training >/dev/null; then
  # Before `||`, bash would ignore all failures but the last command's; this way, each of them ends the script.
  # shellcheck disable=SC2317 # the trap calls it
  refuse() {
    mkdir -p "$LARGEBATCH_LOGS/endings"
    printf '{"kind": "refused", "message": "before_training of slurm/site.sh failed on %s; see its output"}\n' \
      "$LARGEBATCH_NODE" >"$LARGEBATCH_LOGS/endings/before_training.$LARGEBATCH_NODE.json"
    fail 2 "before_training of slurm/site.sh failed"
  }
  trap refuse EXIT
  set +u
  before_training
  set -u
  trap - EXIT
fi

launch=(--config_file "$config" --num_machines "$nodes" --num_processes $((nodes * processes)) --machine_rank "$node_rank")
launch+=(--tee 3 --log_dir "$LARGEBATCH_LOGS/ranks/$LARGEBATCH_NODE")
if ((nodes > 1)); then
  # Ranks follow --node-rank, and the processes meet at the address and port that the pre-flight has tested.
  launch+=(--main_process_ip "$address" --main_process_port "$port" --rdzv_backend static)
fi
# Paths in an Accelerate config are relative to the working directory.
json=$(sed -nE 's/^ *deepspeed_config_file: *([^ #]+).*/\1/p' "$config")
[[ -z $json || $code -ef . || ! -f $code/$json ]] || launch+=(--deepspeed_config_file "$code/$json")

# Each process keeps to the CPUs next to its GPU. Accelerate ends the process if that fails, as it does on nodes that
# are shared or virtual, so it is tried first, in the same way.
can_bind() {
  python - "$processes" <<'END' 2>/dev/null
import math, os, sys
import pynvml
pynvml.nvmlInit()
assert pynvml.nvmlDeviceGetCount() == int(sys.argv[1])  # a whole node: the local rank is the GPU's number
mine = os.sched_getaffinity(0)
for index in range(int(sys.argv[1])):
    words = pynvml.nvmlDeviceGetCpuAffinity(pynvml.nvmlDeviceGetHandleByIndex(index), math.ceil(os.cpu_count() / 64))
    os.sched_setaffinity(0, {64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1})
    os.sched_setaffinity(0, mine)
END
}
if ((gpus > 0)) && can_bind; then launch+=(--enable_cpu_affinity); fi

# A string from the environment is split into words.
[[ $(declare -p LARGEBATCH_WRAP 2>/dev/null) == "declare -a"* ]] || read -ra LARGEBATCH_WRAP <<<"${LARGEBATCH_WRAP:-}"
mkdir -p "$LARGEBATCH_LOGS/ranks/$LARGEBATCH_NODE"
# shellcheck disable=SC2317 # attend calls it
train() {
  trap : TERM INT USR1
  "${LARGEBATCH_WRAP[@]}" accelerate launch "${launch[@]}" "$task/train.py" --config "$recipe" --run-dir "$run_dir" "$@" 2>&1 |
    (trap '' TERM INT USR1; exec tee -a "$LARGEBATCH_LOGS/$LARGEBATCH_NODE.log")
}
result=0
attend train "$@" || result=$?
# The launcher exits with 1, whatever the exit codes of its processes.
! grep -qs '"kind": "refused"' "$LARGEBATCH_LOGS"/endings/*.json || result=2
exit "$result"
