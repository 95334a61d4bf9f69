"""What a recipe would cost under each strategy: memory, traffic and the time of a step, without running it."""
