"""The script of bench/start.py: the same imports and the same first step, and nothing else."""
