"""What a recipe trains on: samples by index, from data sets and files."""
