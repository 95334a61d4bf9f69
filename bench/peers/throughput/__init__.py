"""The loops of bench/gpu_throughput.py: a bare compiled loop and Transformers' `Trainer`, on a model and samples."""
