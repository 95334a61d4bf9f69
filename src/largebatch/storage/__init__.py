"""Checkpoints on disk: their layout, and files that are whole or absent. Does not depend on the strategy."""
