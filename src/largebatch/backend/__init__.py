"""The only place that knows about Accelerate, DDP, FSDP2 and DeepSpeed."""
