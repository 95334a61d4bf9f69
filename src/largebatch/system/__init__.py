"""What a program needs of its machine and process: files, variables, task folders, failures and hardware by name."""
