"""What spares memory, on every strategy, and leaves the mathematics as they are."""
