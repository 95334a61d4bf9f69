"""Support for models on every strategy: starting weights, memory savings that keep the mathematics, FLOPs."""
