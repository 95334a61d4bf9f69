"""Models that `transformers` does not have."""
