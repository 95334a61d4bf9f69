"""What a batch script asks before and after each start of its job: `begins` and `ended`, a command each."""
