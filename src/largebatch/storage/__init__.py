"""Checkpoints on disk: their layout, and files that are whole or absent. Knows no strategy."""
