"""The only place that knows Accelerate, DDP, FSDP2 and DeepSpeed."""
