# AMD GPUs on Slingshot, as in LUMI or Frontier, with apptainer or singularity.
# shellcheck shell=bash disable=SC2034
export LARGEBATCH_CONTAINER=${LARGEBATCH_CONTAINER:-apptainer:/scratch/project/largebatch_rocm.sif}
export LARGEBATCH_GPU_VENDOR=amd
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-hsn0,hsn1,hsn2,hsn3}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-hsn0}
export NCCL_NET_GDR_LEVEL=PHB
# MIOpen's caches do not work on Lustre. In /tmp, a folder of another user may have the name.
before_training() {
  local cache=/tmp/miopen_$UID
  mkdir -m 700 "$cache" 2>/dev/null || [[ -O $cache && ! -L $cache ]] || cache=$(mktemp -d)
  export MIOPEN_USER_DB_PATH=$cache MIOPEN_CUSTOM_CACHE_DIR=$cache
}
LARGEBATCH_SRUN_OPTIONS=(--cpu-bind=none)
