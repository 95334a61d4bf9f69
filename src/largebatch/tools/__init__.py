"""The `largebatch` command: a module or a folder per subcommand, with its parser and its `run`."""
