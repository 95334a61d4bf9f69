"""A run on disk: files that are whole or absent, checkpoints, and the attempts of a run, of which only the latest may
write. Does not depend on the strategy."""
