# Settings of your site. Copy it to slurm/site.sh, which git ignores, and keep what you need; slurm/sites has examples.
# It is read by slurm/launch.sh at the start of each job, and on each of its nodes, in the container if there is one.
# `export NAME=${NAME:-value}` lets the command line win: NAME=other sbatch …
# shellcheck shell=bash disable=SC2034

# For sbatch, which reads its options from SBATCH_* variables; they override the lines of a batch script. A job reads
# this file too late for them, so set them in your shell: source slurm/site.sh
export SBATCH_PARTITION=${SBATCH_PARTITION:-gpu}
export SBATCH_ACCOUNT=${SBATCH_ACCOUNT:-my_project}

# A file with `module load …` and `conda activate …`; or a container.
export LARGEBATCH_ENV=${LARGEBATCH_ENV-$HOME/largebatch_environment.sh}
# export LARGEBATCH_CONTAINER=${LARGEBATCH_CONTAINER:-apptainer:/shared/largebatch.sif}
# export LARGEBATCH_CONTAINER_MOUNTS=/scratch:/scratch

# Additional options of srun, one word each, and a command to put before `accelerate launch`.
LARGEBATCH_SRUN_OPTIONS=(--mpi=none)
# LARGEBATCH_WRAP=(numactl --interleave=all)

# Where data are cached, and the network.
export HF_HOME=${HF_HOME:-/scratch/$USER/huggingface}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-ib0}

# Runs on every node after the pre-flight, before training. If any of its commands fails, the job ends with code 2 and is
# not requeued; write `COMMAND || true` for one that may fail.
before_training() {
  ulimit -n 65536
}
