"""The loops of bench/two_process.py: `job` says what they train, each other module is a strategy written by hand."""
