"""The batch: how a global batch divides over processes, and which batch each step trains on."""

from largebatch.batch.division import gradient_accumulation_steps, micro_steps
from largebatch.batch.timeline import GlobalBatch, Length, Timeline, Unit

__all__ = ["GlobalBatch", "Length", "Timeline", "Unit", "gradient_accumulation_steps", "micro_steps"]
