"""What models need on every strategy: starting weights, memory savings that keep the mathematics, operation counts."""
