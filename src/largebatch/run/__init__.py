"""The interface for training scripts: the run, its steps and micro-batches, evaluation, and the run folder."""

from largebatch.run.command_line import RunOptions, parse_command_line, user_errors
from largebatch.run.evaluate import Value
from largebatch.run.run import Run
from largebatch.run.step import Step

__all__ = ["Run", "RunOptions", "Step", "Value", "parse_command_line", "user_errors"]
