"""What the batch script of a job asks before and after each start: whether to train, and whether to start again."""
