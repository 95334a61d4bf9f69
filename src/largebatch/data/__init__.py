"""Samples by index, from data sets and files."""
