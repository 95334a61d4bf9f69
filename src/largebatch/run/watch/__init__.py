"""What watches a run: requests to stop, its start, hangs, and slow processes."""
