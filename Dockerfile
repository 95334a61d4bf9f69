# The tested environment as an image: docker build --tag largebatch .
# docs/launching.md converts it for Apptainer and Enroot.
FROM python:3.11-slim-bookworm

# DeepSpeed and torch.compile build kernels when they need them. NCCL opens libibverbs and libmlx5 (ibverbs-providers) by
# name, and uses sockets instead of InfiniBand where they are missing. NCCL does not use librdmacm; perftest and UCX do.
RUN apt-get update && apt-get install --yes --no-install-recommends \
    build-essential git numactl \
    libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /largebatch
COPY requirements.txt ./
# torch's wheels bring CUDA and NCCL; the driver is the host's.
RUN pip install --no-cache-dir --requirement requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --editable .
# There is no environment to activate.
ENV LARGEBATCH_ENV=
# Enroot and NVIDIA's runtime mount the driver only into images that ask for it.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["bash"]
