#!/usr/bin/env bash
# Trains a recipe on several machines over ssh, with launch/node.sh on each.
#
#   launch/hosts.sh HOSTFILE RECIPE [--section.field VALUE …]
#
# HOSTFILE names one machine per line. The first one gets rank 0; text after a name is ignored, as are repeated names.
# Run this script in the top folder of the repository, which all machines must see at the same path. ssh must reach them
# without a password. STRATEGY, RUN_DIR, LARGEBATCH_*, NCCL_* and the like are passed on to them; node.sh says what they
# mean. LARGEBATCH_SSH is the command to use instead of ssh: `ssh -p 2222`, or blaunch in LSF.
#
# Each call is a new start of the job LARGEBATCH_JOB_ID (default: a new job), with a folder RUN_DIR/jobs/JOB/start_N.
# This script creates the folder, so this machine must see RUN_DIR, too.
#
# If one machine fails, or this script ends, all machines end. Signals are passed on. To resume, run the script again.
set -euo pipefail

VARIABLES='^(STRATEGY|RUN_DIR|CUDA_VISIBLE_DEVICES|(LARGEBATCH|NCCL|GLOO|FI|UCX|TORCH|PYTORCH|OMP|HF|WANDB)_.*)$'
SECONDS_TO_END=30

# Runs on each machine: reads variables and words from standard input, then signals. The end of the input ends node.sh.
on_host() {
  local words=() line node watcher result=0
  while IFS= read -r line && [[ $line != go ]]; do eval "$line"; done
  exec 3<&0
  # In a session of its own, so that a signal reaches the launcher and everything it has started.
  setsid bash "$(dirname "${BASH_SOURCE[0]}")/node.sh" "${words[@]}" </dev/null 3<&- &
  node=$!
  {
    while read -r line; do kill -s "$line" -- "-$node"; done
    kill -s TERM -- "-$node"
    sleep "$SECONDS_TO_END"
    kill -s KILL -- "-$node"
  } <&3 2>/dev/null &
  watcher=$!
  # In bash 5.2, `wait` sometimes returns 255 for a process that ends at that moment; then it is called again.
  while kill -0 "$node" 2>/dev/null; do wait "$node" || true; done
  wait "$node" || result=$?
  kill "$watcher" 2>/dev/null || true
  kill -s KILL -- "-$node" 2>/dev/null || true
  exit "$result"
}
if [[ ${1:-} == --on-host ]]; then on_host; fi

[[ $# -ge 2 ]] || { echo "error: write launch/hosts.sh HOSTFILE RECIPE, with a file that names one machine per line" >&2; exit 2; }
[[ -f $1 ]] || { echo "error: there is no file $1; write one that names one machine per line" >&2; exit 2; }
[[ -f $2 ]] || { echo "error: there is no $2 in $PWD; write the path of a recipe's JSON file, in the top folder of the repository" >&2; exit 2; }
mapfile -t hosts < <(awk '!/^#/ && NF && !seen[$1]++ { print $1 }' "$1")
((${#hosts[@]} > 0)) || { echo "error: $1 names no machines" >&2; exit 2; }
for host in "${hosts[@]}"; do
  # Files are named after it, and ssh takes what begins with a dash as an option.
  [[ $host != */* && $host != -* ]] || { echo "error: $1: $host is not the name of a machine; write names or addresses, one per line" >&2; exit 2; }
done
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
port=$(BASH_ENV='' bash "$here/free_port.sh" "${hosts[0]}")
export RUN_DIR=${RUN_DIR:-runs/$(basename "$2" .json)}
[[ $RUN_DIR != *://* ]] || { echo "error: RUN_DIR=$RUN_DIR: runs are not written to object stores; write a folder of a shared file system" >&2; exit 2; }
export LARGEBATCH_JOB_ID=${LARGEBATCH_JOB_ID:-$(date +%Y%m%d_%H%M%S)_$$}
LARGEBATCH_RESTART=$(BASH_ENV='' bash "$here/claim_start.sh" "$RUN_DIR/jobs/$LARGEBATCH_JOB_ID")
export LARGEBATCH_RESTART LARGEBATCH_LOGS=$RUN_DIR/jobs/$LARGEBATCH_JOB_ID/start_$LARGEBATCH_RESTART
LARGEBATCH_TOKEN=$LARGEBATCH_JOB_ID.$LARGEBATCH_RESTART.$(</proc/sys/kernel/random/uuid)
export LARGEBATCH_TOKEN
mkdir "$LARGEBATCH_LOGS/preflight"
echo "$LARGEBATCH_TOKEN" >"$LARGEBATCH_LOGS/preflight/token"
LARGEBATCH_NODE_NAMES=$(IFS=,; echo "${hosts[*]}")
export LARGEBATCH_NODE_NAMES
read -ra ssh <<<"${LARGEBATCH_SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=30}"

pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
connect() { "${ssh[@]}" "$1" "cd $(printf '%q' "$PWD") && exec bash $(printf '%q' "$here/hosts.sh") --on-host" 2>&1 | sed -u "s/^/[$1] /"; }
running=()
for host in "${hosts[@]}"; do
  mkfifo "$pipes/$host"
  connect "$host" <"$pipes/$host" &
  running+=("$!")
done
# Pipes are opened after all connections have been started, so that none holds another's open; also for reading, so that
# opening does not wait.
inputs=()
for host in "${hosts[@]}"; do
  exec {input}<>"$pipes/$host"
  inputs+=("$input")
  {
    while read -r name; do printf 'export %s=%q\n' "$name" "${!name}"; done < <(compgen -e | grep -E "$VARIABLES")
    printf 'export LARGEBATCH_NODE=%q\n' "$host"
    printf 'words+=(%q)\n' --nodes "${#hosts[@]}" --address "${hosts[0]}" --port "$port" "${@:2}"
    echo go
  } >&"$input"
done

# shellcheck disable=SC2317 # the traps below call it
pass_on() { for input in "${inputs[@]}"; do echo "$1" >&"$input" || true; done; }
for signal in TERM INT USR1; do
  # shellcheck disable=SC2064
  trap "pass_on $signal" "$signal"
done

# The first failure ends all machines: they read the end of their input.
result=0
while :; do
  left=()
  for child in "${running[@]}"; do
    if kill -0 "$child" 2>/dev/null; then left+=("$child"); continue; fi
    code=0
    wait "$child" || code=$?
    if ((code != 0 && result == 0)); then
      result=$code
      for input in "${inputs[@]}"; do exec {input}>&-; done
      inputs=()
    fi
  done
  running=("${left[@]}")
  ((${#running[@]} > 0)) || break
  # A signal interrupts `wait`.
  sleep 1 &
  wait "$!" || true
done
exit "$result"
