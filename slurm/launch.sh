# Runs a recipe for one start of a Slurm job; sourced by slurm/<recipe>.sbatch, which sets RECIPE and STRATEGY.
# docs/slurm.md says how to use it. It maps Slurm onto launch/node.sh, which lists more settings.
#
#   sbatch [options of sbatch] slurm/<recipe>.sbatch [--strategy NAME] [--run-dir DIR] [--section.field VALUE …]
#
#   --strategy                    ddp, fsdp, hsdp, zero1, zero2, zero3, or the path of an Accelerate config; default:
#                                 STRATEGY from the environment, or else from the script
#   --run-dir                     folder of the run, shared by all nodes; default: RUN_DIR from the environment, or else
#                                 runs/<recipe>
#   --sweep                       the run folder is a sweep's: this task of the array trains one of its points
#
# Settings, all optional, from slurm/site.sh or the environment, which --export=NONE does not carry to the job:
#
#   LARGEBATCH_ENV                shell file to source on every node; default: .venv/bin/activate; none in containers
#   LARGEBATCH_CONTAINER          image to run in: apptainer:IMAGE, anything that pyxis takes as --container-image, or
#                                 command:WORDS for words to put before the node's command (command:shifter --image=…)
#   LARGEBATCH_CONTAINER_MOUNTS   folders to mount besides this one, RUN_DIR and HF_HOME: SOURCE:TARGET,…
#   LARGEBATCH_GPU_VENDOR         nvidia or amd, for apptainer; default: detected on the first node
#   LARGEBATCH_SRUN_OPTIONS       additional options of srun; an array in site.sh
#   LARGEBATCH_PROCESSES_PER_NODE for sites where Slurm does not manage GPUs; default: one per GPU or CPU of the job
#   LARGEBATCH_NODES              train on this many of the job's nodes; the others replace bad ones
#   LARGEBATCH_EXCLUDE_BAD_NODES  1: if the pre-flight names bad nodes, submit the job again without them
#   LARGEBATCH_MAX_RESTARTS       requeue this many times without a newer checkpoint, then give up; default: 3
#   LARGEBATCH_PORTS              range from which a free port is chosen; default: 10000-32767, below the ephemeral ones
#   LARGEBATCH_SNAPSHOT           snapshot of the code to run; default: the job's first start takes one
#
# Exit codes: 0 finished; 1 failed; 2 refused; 3 the pre-flight found a bad node; 75 stopped on request.

# shellcheck shell=bash
# shellcheck source-path=SCRIPTDIR source=steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

words=() sweep=
while (($#)); do
  [[ $1 != --strategy && $1 != --run-dir ]] || set -- "$1=${2:-}" "${@:3}"
  case $1 in
    --strategy= | --run-dir=) leave 2 "error: ${1%=}: no value is given; write ${1%=} NAME" ;;
    --run_dir | --run_dir=*) leave 2 "error: --run_dir: write --run-dir DIR" ;;
    --strategy=*) STRATEGY=${1#*=} ;;
    --run-dir=*) RUN_DIR=${1#*=} ;;
    --sweep) sweep=1 ;;
    --config | --config=*) leave 2 "error: --config: the script's recipe is $RECIPE; submit the other recipe's script" ;;
    *) words+=("$1") ;;
  esac
  shift
done
if [[ -n $sweep ]]; then
  # The name of the point's run folder, and then its words, a line each.
  mapfile -t words <"$RUN_DIR/points/${SLURM_ARRAY_TASK_ID:?}"
  RUN_DIR=$RUN_DIR/${words[0]}
  words=("${words[@]:1}")
fi
set -- "${words[@]}"
# In an array, the first task has the number of the whole array, so another name is needed for the task alone.
this_job=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || this_job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
run_dir=${RUN_DIR:-runs/$(basename "$RECIPE" .json)}
snapshot=${LARGEBATCH_SNAPSHOT:-$run_dir/jobs/$SLURM_JOB_ID/code}
[[ -z ${LARGEBATCH_SNAPSHOT:-} || -f $snapshot/slurm/launch.sh ]] || leave 2 "error: LARGEBATCH_SNAPSHOT=$snapshot: there is no slurm/launch.sh in it; submit again"
# A job runs the code of its snapshot, including this script, whatever has changed while the job was queued.
code=$PWD
if [[ -f $snapshot/slurm/launch.sh ]]; then
  code=$(realpath "$snapshot")
  # shellcheck source=/dev/null
  [[ ${BASH_SOURCE[0]} == "$code/slurm/launch.sh" ]] || source "$code/slurm/launch.sh"
fi

# --- what to run, from Slurm's environment ---

# The place in the snapshot of a recipe that is not in recipes/.
place_of_recipe() { if [[ -f $code/recipe ]]; then cat "$code/recipe"; else echo "$RECIPE"; fi; }
trained=$(place_of_recipe)
[[ $(basename "$trained") == "$(basename "$RECIPE")" ]] || leave 2 "error: LARGEBATCH_SNAPSHOT=$snapshot is for $trained, not for $RECIPE; submit again without it"
[[ -f $trained || -f $code/$trained ]] || leave 2 "error: there is no $RECIPE in $PWD; submit from the top of the repository"
[[ $run_dir != *://* ]] || leave 2 "error: RUN_DIR=$run_dir: runs are not written to object stores; write a folder of a shared file system, and copy it afterward: aws s3 sync, gcloud storage rsync, rclone sync"

positive() { [[ -z ${!1:-} || ${!1} =~ ^[1-9][0-9]*$ ]] || leave 2 "error: $1=${!1}: not a number; write 1 or more"; }
positive LARGEBATCH_PROCESSES_PER_NODE
positive LARGEBATCH_NODES
nodes=${LARGEBATCH_NODES:-$SLURM_JOB_NUM_NODES}
((nodes <= SLURM_JOB_NUM_NODES)) || leave 2 "error: LARGEBATCH_NODES=$nodes, but the job has $SLURM_JOB_NUM_NODES nodes; write sbatch --nodes=$nodes or more"
gpus=${SLURM_GPUS_ON_NODE:-0}
# One process per GPU; if no GPUs were requested, one per CPU.
processes_per_node=${LARGEBATCH_PROCESSES_PER_NODE:-$((gpus > 0 ? gpus : ${SLURM_CPUS_PER_TASK:-1}))}
node_options=(--processes-per-node "$processes_per_node")
if ((gpus > 0)) || [[ -z ${LARGEBATCH_PROCESSES_PER_NODE:-} ]]; then node_options+=(--gpus-per-node "$gpus"); fi
# A symbolic link to the run folder may lead nowhere in a container.
if [[ -n ${LARGEBATCH_CONTAINER:-} ]]; then mkdir -p "$run_dir" && run_dir=$(realpath "$run_dir"); fi
job_dir=$run_dir/jobs/$SLURM_JOB_ID
restart=${SLURM_RESTART_COUNT:-0}
max_restarts=${LARGEBATCH_MAX_RESTARTS:-3}
logs=$job_dir/start_$restart
preflight=$logs/preflight
mkdir -p "$preflight"
mapfile -t node_names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

export STRATEGY RUN_DIR=$run_dir
export LARGEBATCH_JOB_ID=$SLURM_JOB_ID LARGEBATCH_RESTART=$restart LARGEBATCH_LOGS=$logs
export LARGEBATCH_JOB_END_TIME=${SLURM_JOB_END_TIME:-}
if [[ -z $LARGEBATCH_JOB_END_TIME ]]; then
  # Slurm before 23.02 does not set it in the environment. A job without a time limit has no end.
  end=$(squeue --noheader --jobs "$this_job" --format %e || true)
  [[ $end != 2* ]] || LARGEBATCH_JOB_END_TIME=$(date -d "$end" +%s)
fi
cpus=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((gpus > 0 && cpus > processes_per_node ? cpus / processes_per_node : 1))}

# From here on, a signal asks the run to stop instead of ending this script.
printf -v LARGEBATCH_BEGAN '%(%s)T' -1
export LARGEBATCH_BEGAN
asked_to_stop=
# A file that only this job obeys: another job may be training in this run folder.
stop_file=$run_dir/stop.$SLURM_JOB_ID
# shellcheck disable=SC2317 # the traps below call it
ask_to_stop() {
  asked_to_stop=$1
  say "asked to stop by $1; passed on to the run"
  touch "$stop_file" || say "error: the stop file cannot be created; the run continues"
}
rm -f "$stop_file"
trap 'ask_to_stop SIGUSR1' USR1
trap 'ask_to_stop SIGTERM' TERM

# --- running something on nodes ---

mounted=("$run_dir")
[[ $code == "$PWD" || $code == "$run_dir"/* ]] || mounted+=("$code")
# The first start copies the recipe, wherever it is.
folder=$(realpath --canonicalize-missing "$(dirname "$RECIPE")")
[[ $code != "$PWD" || $folder == "$PWD"/* ]] || mounted+=("$folder")
use_container "$gpus" "${mounted[@]}"

# ask COMMAND…: run a command on a node in the user's environment; the last line that it prints is the answer. If it
# fails, it is run once more, on another node if there is one.
ask() {
  local name result
  for name in "${node_names[0]}" "${node_names[1]:-${node_names[0]}}"; do
    result=0
    on_nodes "$name" "$code/launch/environment.sh" "$@" >"$logs/answer" || result=$?
    # srun --label numbers lines.
    answer=$(tail -n 1 "$logs/answer" | sed -E 's/^ *[0-9]+: //')
    ((result != 0 && result != 2)) || break
  done
  return "$result"
}

# --- the end of a start ---

# Does what largebatch has printed: leave CODE MESSAGE, or requeue MESSAGE.
obey() {
  local word exit_code message
  read -r word exit_code message <<<"$answer"
  case $word in
    leave) leave "$exit_code" "$message" ;;
    requeue) requeue "${answer#requeue }" ;;
    *) leave 1 "error: largebatch printed \"$answer\", which this script does not understand; is another version installed?" ;;
  esac
}

# Whether Slurm is ending this start; if the controller does not answer, the start is assumed to go on.
is_ending() {
  local state
  state=$(squeue --noheader --jobs "$this_job" --format %T || true)
  [[ -n $state && $state != RUNNING ]]
}

# end CODE: finish, give up, or requeue this job after a start with this exit code.
end() {
  ask largebatch job-ended --run-dir "$run_dir" --start "$restart" --exit-code "$1" \
    --max-restarts "$max_restarts" ${asked_to_stop:+--asked-to-stop "$asked_to_stop"} ||
    unable 1 "error: the start ended with code $1, and largebatch job-ended failed; submit the job again to resume"
  obey
}

# unable CODE MESSAGE: leave because largebatch cannot be run, unless that is because the job is to stop.
unable() {
  ! is_ending || leave 1 "Slurm is ending this start; submit the job again to resume"
  [[ -z $asked_to_stop ]] || requeue "asked to stop by $asked_to_stop"
  leave "$@"
}

# requeue MESSAGE: requeue this job, unless Slurm is ending it.
requeue() {
  local try
  ! is_ending || leave 1 "$1; Slurm is ending this start, so this script does not requeue the job"
  say "$1; requeued"
  for try in 1 2 3; do
    if scontrol requeue "$this_job"; then exit 0; fi
    sleep $((10 * try))
  done
  leave 1 "error: the job cannot be requeued; submit it again to resume"
}

# submit_without NODES WORDS…: submit this job again with its options and the script's words, without these nodes.
submit_without() {
  local job excluded pair value options number
  job=$(scontrol --oneliner show job "$this_job" || true)
  # Values may have spaces; the next field begins with a capital letter.
  field() {
    value=
    [[ " $job" == *" $1="* ]] || return 0
    value=" $job"
    value=${value#*" $1="}
    value=${value%%" "[A-Z]*=*}
    [[ $value != "(null)" && $value != N/A ]] || value=
  }
  field ExcNodeList
  excluded=$1${value:+,$value}
  options=(--parsable --export=ALL --dependency="afterany:$this_job" --exclude="$excluded")
  options+=(--job-name="${SLURM_JOB_NAME:-$(basename "$RECIPE" .json)}" --nodes="$SLURM_JOB_NUM_NODES")
  for pair in Account:account Partition:partition QOS:qos Reservation:reservation Features:constraint TimeLimit:time; do
    field "${pair%:*}"
    [[ -z $value ]] || options+=("--${pair#*:}=$value")
  done
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
  field TresPerNode
  if [[ -n ${SLURM_GPUS_PER_NODE:-} ]]; then
    options+=(--gpus-per-node="$SLURM_GPUS_PER_NODE")
  elif [[ -n $value ]]; then
    options+=(--gres="${value#gres[:/]}")
  fi
  field OverSubscribe
  [[ $value != EXCLUSIVE ]] || options+=(--exclusive)
  field StdOut
  [[ -z $value ]] || options+=(--output="$(dirname "$value")/$(basename "${value//$SLURM_JOB_ID/%j}")")
  # A copy of the batch script, which Slurm removes with this job.
  cp "$0" "$job_dir/script.sbatch"
  options+=("$job_dir/script.sbatch" --strategy="$STRATEGY" --run-dir="$run_dir" "${@:2}")
  if number=$(env -u SLURM_RESTART_COUNT -u SLURM_ARRAY_JOB_ID LARGEBATCH_SNAPSHOT="$code" sbatch "${options[@]}"); then
    leave 3 "bad nodes: $1; submitted again without them, as job ${number%%;*}"
  fi
  say "error: bad nodes: $1; sbatch refuses to submit the job again without them. To do it by hand:"
  leave 3 "LARGEBATCH_SNAPSHOT=$(printf %q "$code") sbatch$(printf ' %q' "${options[@]}")"
}

# --- the start ---

# In the pre-flight, every node must end by itself, even if another one fails; elsewhere, the first failure ends all.
to_the_end=(--kill-on-bad-exit=0 --wait=180)
together=(--kill-on-bad-exit=1 --wait=60)
step_options=("${together[@]}")
cannot_run="error: largebatch cannot be run on ${node_names[0]}; the reason is above"
if [[ $code == "$PWD" ]]; then
  ask largebatch snapshot "$RECIPE" --to "$job_dir/code" || unable $? "$cannot_run"
  code=$(realpath "$job_dir/code")
  trained=$(place_of_recipe)
fi
ask largebatch job-begins --run-dir "$run_dir" --start "$restart" --max-restarts "$max_restarts" || unable $? "$cannot_run"
[[ $answer == go ]] || obey
say "job $SLURM_JOB_ID, start $restart: $RECIPE under $STRATEGY on $nodes nodes x $processes_per_node processes; logs in $logs"

# on_training_nodes OPTION WORDS…: run node.sh on the first good nodes.
on_training_nodes() {
  on_nodes "$(IFS=,; echo "${node_names[*]:0:nodes}")" "$code/launch/node.sh" "$1" --nodes "$nodes" \
    --address "${node_names[0]}" --port "$port" "${node_options[@]}" "$trained" "${@:2}"
}

# check_nodes WORDS…: the pre-flight, which writes the names of bad nodes to a file.
check_nodes() {
  # A node that does not see this job's code cannot say more.
  # shellcheck disable=SC2016 # expanded on the nodes
  on_nodes "$(IFS=,; echo "${node_names[*]:0:nodes}")" -c '[[ -f $1 ]] || echo "blind:$LARGEBATCH_NODE"' bash "$code/launch/node.sh" >"$logs/blind_nodes" || return
  # Containers and profiles may print more.
  if grep -q blind: "$logs/blind_nodes"; then
    sed -n 's/.*blind://p' "$logs/blind_nodes" | paste --serial --delimiters=, >"$preflight/bad_nodes"
    say "bad node $(<"$preflight/bad_nodes"): it does not see $code; the run folder must be on a file system that all nodes share"
    return 3
  fi
  on_training_nodes --preflight-only "$@"
}

while :; do
  port=$(BASH_ENV='' bash "$code/launch/free_port.sh" "${node_names[0]}") || leave $? "error: there is no free port on ${node_names[0]}; see above"
  LARGEBATCH_TOKEN=$SLURM_JOB_ID.$restart.$(</proc/sys/kernel/random/uuid)
  export LARGEBATCH_TOKEN
  # What a try on another port or on other nodes has left must not be taken for this one's.
  rm -rf "$preflight"
  mkdir -p "$preflight"
  echo "$LARGEBATCH_TOKEN" >"$preflight/token"
  [[ ${LARGEBATCH_PREFLIGHT:-on} != off ]] || break
  result=0
  step_options=("${to_the_end[@]}")
  check_nodes "$@" || result=$?
  step_options=("${together[@]}")
  # SIGTERM, SIGUSR1 or SIGINT to the nodes only, as in a preemption, ends the processes there.
  case $result in 143 | 138 | 130) asked_to_stop=${asked_to_stop:-a signal to the nodes} ;; esac
  [[ -z $asked_to_stop ]] || end "$result"
  ((result != 0)) || break
  [[ -s $preflight/bad_nodes ]] || leave "$result" "error: the pre-flight found the problems above; training was not started"
  bad_nodes=$(<"$preflight/bad_nodes")
  good_nodes=()
  for name in "${node_names[@]}"; do [[ ,$bad_nodes, == *,"$name",* ]] || good_nodes+=("$name"); done
  ((${#good_nodes[@]} < ${#node_names[@]})) || leave 3 "error: the pre-flight named $bad_nodes, which are not nodes of this job"
  if ((${#good_nodes[@]} >= nodes)); then
    say "bad nodes: $bad_nodes; trying again with ${good_nodes[*]:0:nodes}"
    node_names=("${good_nodes[@]}")
    continue
  fi
  # If no node would be left, the nodes are not the problem.
  if [[ ${LARGEBATCH_EXCLUDE_BAD_NODES:-} == 1 ]] && ((${#good_nodes[@]} > 0)); then submit_without "$bad_nodes" "$@"; fi
  leave 3 "error: the pre-flight found the problems above; training was not started"
done

# --resume is for the first start; later starts resume from the latest checkpoint.
has_begun=
! grep -qs "\"job_id\": \"$SLURM_JOB_ID\"" "$run_dir"/attempts/*.json || has_begun=1
words=()
while (($#)); do
  case $has_begun$1 in
    1--resume) shift; shift || true ;;
    1--resume=*) shift ;;
    *) words+=("$1"); shift ;;
  esac
done
result=0
on_training_nodes --train-only "${words[@]}" || result=$?
end "$result"
