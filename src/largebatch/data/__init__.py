"""What a recipe trains on: samples by index, out of data sets and files."""
