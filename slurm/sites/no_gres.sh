# Whole nodes with four GPUs that Slurm does not manage, as at TACC: jobs do not ask for GPUs, so remove --gpus-per-node
# and --mem from the batch scripts.
# shellcheck shell=bash disable=SC2034
export LARGEBATCH_PROCESSES_PER_NODE=${LARGEBATCH_PROCESSES_PER_NODE:-4}
# Batch jobs do not get the variables of the login shell there.
export SBATCH_EXPORT=ALL
export HF_HOME=${HF_HOME:-$SCRATCH/huggingface}
