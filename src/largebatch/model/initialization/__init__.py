"""Weights that training starts from."""
