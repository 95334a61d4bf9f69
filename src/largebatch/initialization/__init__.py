"""Initial weights that papers name, as functions of a model."""
