"""The interface for training scripts: the run, its steps and micro-batches, evaluation, and the run folder."""

from largebatch.run.command_line import RunOptions, from_command_line
from largebatch.run.coupled import CoupledLoss
from largebatch.run.evaluate import Value
from largebatch.run.run import Run
from largebatch.run.step import Step

__all__ = ["CoupledLoss", "Run", "RunOptions", "Step", "Value", "from_command_line"]
