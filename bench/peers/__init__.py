"""The jobs that this library is measured with, as other loops do them: one folder a job, one file a loop.

Each loop is short and as its own documentation has it, so that its fairness can be judged by reading it. None uses
this library. A loop is a function `train` that takes a clock and calls `clock.step()` after every optimizer step.
"""
