"""What watches a run: requests to stop, its start, and hangs."""
