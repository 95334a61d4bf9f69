# Runs a recipe for one start of a Slurm job; sourced by slurm/<recipe>.sbatch, which sets RECIPE and STRATEGY.
# docs/slurm.md says how to use it. Settings, all optional, from the environment (RUN_DIR=/scratch/me/x sbatch …):
#
#   STRATEGY                     ddp, fsdp, zero1, zero2, zero3, or the path of an Accelerate config
#   RUN_DIR                      folder of the run, shared by all nodes; default: runs/<recipe>
#   LARGEBATCH_ENV               shell file to source on every node; default: .venv/bin/activate
#   LARGEBATCH_CONTAINER         image to run in: apptainer:IMAGE, or what pyxis takes as --container-image
#   LARGEBATCH_CONTAINER_MOUNTS  folders to mount in it besides this one, in the format of the container's own option
#   LARGEBATCH_MAX_RESTARTS      requeue this many times without a newer checkpoint, then give up; default: 3
#   LARGEBATCH_EXCLUDE_BAD_NODES 1: if the pre-flight names bad nodes, requeue the job without them
#   NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_DEBUG …: passed on unchanged
#
# Exit codes: 0 finished; 1 failed; 2 refused; 3 the pre-flight found a bad node; 75 stopped on request.

# shellcheck shell=bash
set -euo pipefail

say() { printf '[%(%F %T)T] %s\n' -1 "$*"; }
leave() { say "$2"; exit "$1"; }

# --- what to run, from Slurm's environment ---

[[ -n ${SLURM_JOB_ID:-} ]] || leave 2 "error: this is not a Slurm job; submit it: sbatch slurm/<recipe>.sbatch"
for word in "$@"; do
  case $word in
    --run_dir | --run_dir=* | --run-dir | --run-dir=*) leave 2 "error: ${word%%=*}: this script needs it too; write RUN_DIR=… sbatch …" ;;
    --config | --config=*) leave 2 "error: --config: the script's recipe is $RECIPE; submit the other recipe's script" ;;
  esac
done
[[ -f $RECIPE ]] || leave 2 "error: there is no $RECIPE in $PWD; submit from the top of the repository"
accelerate_config=recipes/accelerate_configs/$STRATEGY.yaml
[[ $STRATEGY != *.yaml ]] || accelerate_config=$STRATEGY
[[ -f $accelerate_config ]] || leave 2 "error: STRATEGY=$STRATEGY: there is no $accelerate_config; write ddp, fsdp, zero1, zero2, zero3, or the path of an Accelerate config"

nodes=$SLURM_JOB_NUM_NODES
# One process per GPU; if no GPUs were requested, one per CPU.
gpus=${SLURM_GPUS_ON_NODE:-0}
processes_per_node=$((gpus > 0 ? gpus : ${SLURM_CPUS_PER_TASK:-1}))
restart=${SLURM_RESTART_COUNT:-0}
max_restarts=${LARGEBATCH_MAX_RESTARTS:-3}
[[ $max_restarts =~ ^[0-9]+$ ]] || leave 2 "error: LARGEBATCH_MAX_RESTARTS=$max_restarts: not a number; write 0 or more"
run_dir=${RUN_DIR:-runs/$(basename "$RECIPE" .json)}
job_dir=$run_dir/slurm/$SLURM_JOB_ID
logs=$job_dir/start_$restart
preflight=$logs/preflight
mkdir -p "$preflight"

# A run that has begun resumes with the task's files from its start, even if they changed while the job was queued.
has_begun=
! grep -qs "\"slurm_job_id\": \"$SLURM_JOB_ID\"" "$run_dir/status.json" || has_begun=1
used_recipe=$run_dir/source/$(basename "$(dirname "$RECIPE")")/$(basename "$RECIPE")
[[ -n $has_begun && -f $used_recipe ]] || used_recipe=$RECIPE

# From here on a signal asks the run to stop instead of ending this script.
printf -v LARGEBATCH_BEGAN '%(%s)T' -1
export LARGEBATCH_BEGAN
asked_to_stop=
# shellcheck disable=SC2317 # the traps below call it
ask_to_stop() {
  asked_to_stop=$1
  say "asked to stop by $1; passed on to the run"
  touch "$run_dir/stop" || say "error: the stop file cannot be created; the run continues"
}
rm -f "$run_dir/stop"
trap 'ask_to_stop SIGUSR1' USR1
trap 'ask_to_stop SIGTERM' TERM

mapfile -t node_names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_node=${node_names[0]}
# Below the ephemeral ports, and different for each job and start.
port=$((10000 + (SLURM_JOB_ID * 16 + restart) % 22000))

export LARGEBATCH_ENV=${LARGEBATCH_ENV-.venv/bin/activate}
[[ -z $LARGEBATCH_ENV || -f $LARGEBATCH_ENV || -n ${LARGEBATCH_CONTAINER:-} ]] || leave 2 "error: LARGEBATCH_ENV=$LARGEBATCH_ENV: there is no such file in $PWD; create your environment as README.md says, or name the shell file that activates it"
export LARGEBATCH_REFUSAL=$logs/refusal
if [[ -z ${SLURM_JOB_END_TIME:-} ]]; then
  # Slurm before 23.02 does not set it in the environment. A job without a time limit has no end.
  end=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e || true)
  [[ $end != 2* ]] || SLURM_JOB_END_TIME=$(date -d "$end" +%s)
fi
export SLURM_JOB_END_TIME=${SLURM_JOB_END_TIME:-}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((gpus > 0 && ${SLURM_CPUS_PER_TASK:-1} > gpus ? SLURM_CPUS_PER_TASK / gpus : 1))}
# Each process would compile with 32 threads.
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$OMP_NUM_THREADS}
# Samples of unequal lengths, and weights gathered and freed, would leave gaps in a GPU's memory.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}
# Slurm 22.05 and later do not pass --cpus-per-task on to srun.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# The launcher passes these signals on to the processes and waits until they have saved, instead of orphaning them.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1800
# No other job's nodes can join.
export PET_RDZV_ID=$SLURM_JOB_ID.$restart.$RANDOM$RANDOM

# --- running something on nodes ---

srun_options=(--ntasks-per-node=1)
in_container=()
case ${LARGEBATCH_CONTAINER:-} in
  "") ;;
  apptainer:*)
    in_container=(apptainer exec --bind "$PWD${LARGEBATCH_CONTAINER_MOUNTS:+,$LARGEBATCH_CONTAINER_MOUNTS}" --pwd "$PWD")
    ((gpus == 0)) || in_container+=(--nv)
    in_container+=("${LARGEBATCH_CONTAINER#apptainer:}")
    ;;
  *)
    srun_options+=(--container-image="$LARGEBATCH_CONTAINER" --container-workdir="$PWD")
    srun_options+=(--container-mounts="$PWD:$PWD${LARGEBATCH_CONTAINER_MOUNTS:+,$LARGEBATCH_CONTAINER_MOUNTS}")
    ;;
esac

# on_nodes COUNT COMMAND…: run one task per node in the user's environment, while this script still handles signals.
# Text in single quotes is expanded on the node.
on_nodes() {
  # shellcheck disable=SC2016
  srun --nodes="$1" --ntasks="$1" "${srun_options[@]}" "${step_options[@]}" "${in_container[@]}" bash -c '
    set -e
    # The command handles signals and decides when to end.
    trap : TERM INT USR1
    # In a function, so that the sourced file does not get the command as its arguments.
    activate() { source "$LARGEBATCH_ENV"; }
    if [[ -n $LARGEBATCH_ENV ]]; then activate; fi
    "$@"' bash "${@:2}" &
  local srun=$!
  # A signal to this script interrupts `wait`, not srun.
  while kill -0 "$srun" 2>/dev/null; do wait "$srun" || true; done
  wait "$srun"
}

# --- after a start ---

checkpoint_step() {
  local newest=0 marker step
  for marker in "$run_dir"/checkpoints/step_*/complete.json; do
    step=$(basename "$(dirname "$marker")")
    step=${step#step_}
    # There may be other files next to the checkpoints.
    if [[ -f $marker && $step =~ ^[0-9]+$ ]]; then ((newest = 10#$step > newest ? 10#$step : newest)) || true; fi
  done
  echo "$newest"
}

# Prints a field of the run's status, if this start has written it.
status() {
  local file=$run_dir/status.json
  grep -qs "\"slurm_job_id\": \"$SLURM_JOB_ID\"" "$file" && grep -qs "\"slurm_restart_count\": $restart\b" "$file" || return 0
  sed -nE "s/^ *\"$1\": \"(.*)\",?\$/\1/p; s/^ *\"$1\": ([^\",]+),?\$/\1/p" "$file"
}

# Gives up if the allowed number of starts began at the newest checkpoint without writing a newer one.
give_up_without_progress() {
  local starts
  starts=$(grep -cxs "$(checkpoint_step)" "$job_dir/starts" || true)
  if ((starts > max_restarts)); then
    leave 1 "error: $1; giving up after $starts starts without progress past step $(checkpoint_step) (LARGEBATCH_MAX_RESTARTS); see $job_dir"
  fi
}

# requeue WHY: requeue this job, unless starts make no progress or Slurm is ending the job.
requeue() {
  local state try
  state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T || true)
  [[ -z $state || $state == RUNNING ]] || leave 1 "$1; Slurm is ending this start, so this script does not requeue the job"
  give_up_without_progress "$1"
  say "$1; requeued, to resume from step $(checkpoint_step)"
  for try in 1 2 3; do
    if scontrol "${2:-requeue}" "$SLURM_JOB_ID"; then exit 0; fi
    sleep $((10 * try))
  done
  leave 1 "error: the job cannot be requeued; submit it again to resume"
}

# Slurm changes a job's excluded nodes only while it is pending: a small job does that, and then releases it.
requeue_without() {
  local excluded
  give_up_without_progress "bad nodes: $1"
  excluded=$(scontrol show job "$SLURM_JOB_ID" | sed -nE 's/^ *.*ExcNodeList=([^ ]+).*/\1/p' | grep -v '^(null)$' || true)
  excluded=$1${excluded:+,$excluded}
  # shellcheck disable=SC2016 # the small job expands them
  JOB=$SLURM_JOB_ID EXCLUDED=$excluded sbatch --job-name="without_$1" --partition="$SLURM_JOB_PARTITION" \
    --exclude="$excluded" --nodes=1 --ntasks=1 --time=10 --output="$logs/exclude.log" --wrap '
      until scontrol update JobId="$JOB" ExcNodeList="$EXCLUDED"; do sleep 1; done
      scontrol release "$JOB"' ||
    leave 3 "error: bad nodes ($1), and the job that excludes them could not be submitted; submit again with --exclude=$1"
  requeue "bad nodes: $1" requeuehold
}

# --- the start ---

give_up_without_progress "the earlier start was ended by Slurm"
checkpoint_step >>"$job_dir/starts"
say "job $SLURM_JOB_ID, start $restart: $used_recipe under $STRATEGY on $nodes nodes x $processes_per_node processes; logs in $logs"

code=0
token=$RANDOM$RANDOM$RANDOM
echo "$token" >"$preflight/token"
# Every node must report what it finds, even if another fails; a hanging node is ended.
step_options=(--kill-on-bad-exit=0 --wait=180)
on_nodes "$nodes" timeout --kill-after=10 300 largebatch preflight "$used_recipe" --accelerate-config "$accelerate_config" --folder "$preflight" --token "$token" \
  --rendezvous "$first_node:$port" --gpus "$gpus" --world-size $((nodes * processes_per_node)) "$@" >"$preflight/reports" || code=$?
# SIGTERM, SIGUSR1 or SIGINT to the nodes only, as in a preemption, ends the processes there.
step_options=(--kill-on-bad-exit=1 --wait=60)
case $code in 143 | 138 | 130) asked_to_stop=${asked_to_stop:-a signal to the nodes} ;; esac
[[ -z $asked_to_stop ]] || requeue "asked to stop by $asked_to_stop during the pre-flight"
code=0
on_nodes 1 largebatch preflight-verdict "$preflight/reports" --nodes "$(IFS=,; echo "${node_names[*]}")" \
  --bad-nodes "$preflight/bad_nodes" || code=$?
if ((code == 3)) && [[ ${LARGEBATCH_EXCLUDE_BAD_NODES:-} == 1 ]]; then
  bad_nodes=$(<"$preflight/bad_nodes")
  # If no node would be left, the nodes are not the problem.
  IFS=, read -ra bad_names <<<"$bad_nodes"
  if ((${#bad_names[@]} < nodes)); then requeue_without "$bad_nodes"; fi
fi
((code == 0)) || leave "$code" "error: the pre-flight found the problems above; training was not started"

# --resume is for the first start; later starts resume from the newest checkpoint.
words=()
while (($#)); do
  case $has_begun$1 in
    1--resume) shift; shift || true ;;
    1--resume=*) shift ;;
    *) words+=("$1"); shift ;;
  esac
done

launch=(--config_file "$accelerate_config" --num_machines "$nodes" --num_processes $((nodes * processes_per_node)))
if ((nodes > 1)); then launch+=(--main_process_ip "$first_node" --main_process_port "$port" --rdzv_backend c10d); fi
# shellcheck disable=SC2016 # expanded on the node
on_nodes "$nodes" bash -c '
  set -o pipefail
  trap : TERM INT USR1
  logs=$1
  accelerate launch --machine_rank "$SLURM_NODEID" "${@:2}" 2>&1 |
    (trap "" TERM INT USR1; exec tee -a "$logs/$SLURMD_NODENAME.log")' bash "$logs" \
  "${launch[@]}" "$(dirname "$used_recipe")/train.py" --config "$used_recipe" --run-dir "$run_dir" "${words[@]}" || code=$?

((code != 0)) || leave 0 "finished"
[[ ! -f $LARGEBATCH_REFUSAL ]] || leave 2 "refused: $(<"$LARGEBATCH_REFUSAL")"
message=$(status message)
# If a process was killed from outside, such as by the kernel for lack of memory, its launcher's log says so.
killed=$(grep -oE "Signal [0-9]+ \(SIG[A-Z]+\) received by PID [0-9]+" "$logs"/*.log /dev/null | grep -v SIGTERM | head -n 1 || true)
[[ -z $killed ]] || killed="$(basename "${killed%%.log:*}"): ${killed#*.log:}; "
case $(status outcome):$(status resume) in
  stopped:*)
    if [[ $message == "by the stop file"* ]]; then
      [[ -n $asked_to_stop ]] || leave 75 "stopped $message; submit the script again, with the same overrides, to resume"
      message="by $asked_to_stop to the batch script${message#by the stop file}"
    fi
    requeue "stopped $message"
    ;;
  failed:false) leave 1 "failed: $message; the same start would fail again: not requeued" ;;
  failed:true) requeue "failed: $killed$message" ;;
  running:*) requeue "${killed:-killed }at step $(status step)" ;;
  *) requeue "${killed}ended before the run began (exit code $code)" ;;
esac
