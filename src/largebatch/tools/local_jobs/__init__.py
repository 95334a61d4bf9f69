"""Jobs of several processes on this machine, for the tools that train: verify, sweep and the pre-flight."""
