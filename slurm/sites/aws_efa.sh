# AWS ParallelCluster or HyperPod with Elastic Fabric Adapters (p4d, p5), images with the aws-ofi-nccl plugin.
# shellcheck shell=bash disable=SC2034
export FI_PROVIDER=efa
# Without it, forked data workers are not safe together with the memory that the adapters use.
export FI_EFA_FORK_SAFE=1
# All interfaces but the loopback and Docker's.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^lo,docker0}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$(ip -o -4 route show to default | awk '{print $5; exit}')}
export HF_HOME=${HF_HOME:-/fsx/$USER/huggingface}
LARGEBATCH_SRUN_OPTIONS=(--mpi=none)
