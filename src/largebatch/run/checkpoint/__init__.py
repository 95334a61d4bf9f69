"""Checkpoints that any strategy writes and any other reads; the layout on disk is in `storage.layout`."""
