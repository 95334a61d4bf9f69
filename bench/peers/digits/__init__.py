"""The loops of bench/loop_tax.py: `job` says what they train, each other module is a loop."""
