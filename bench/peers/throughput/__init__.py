"""The loops of bench/gpu/throughput.py: a bare compiled loop and Transformers' `Trainer`, on a model and samples."""
