# DGX or HGX nodes on InfiniBand, with pyxis.
# shellcheck shell=bash disable=SC2034
export LARGEBATCH_CONTAINER=${LARGEBATCH_CONTAINER:-/lustre/images/largebatch.sqsh}
export LARGEBATCH_CONTAINER_MOUNTS=${LARGEBATCH_CONTAINER_MOUNTS:-/lustre:/lustre}
# Enroot may show adapters only if this is set.
export MELLANOX_VISIBLE_DEVICES=${MELLANOX_VISIBLE_DEVICES:-all}
# Compute adapters only: a node has others for storage. `ibdev2netdev` lists them.
export NCCL_IB_HCA=${NCCL_IB_HCA:-=mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11}
# The first connection of the processes goes through the management network.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-eno1}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-eno1}
# GB/s of the pre-flight's all-reduce; below it, traffic has fallen back to sockets.
export LARGEBATCH_MIN_BUSBW=${LARGEBATCH_MIN_BUSBW:-100}
LARGEBATCH_SRUN_OPTIONS=(--mpi=none --cpu-bind=none)
