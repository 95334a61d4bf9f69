"""What models need on every strategy: starting weights, less memory for the same mathematics, and their operations."""
