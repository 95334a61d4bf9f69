"""Batch scripts: checking them with what they name (`lint`), submitting them, and copying what their jobs run."""
