"""Before a job trains: every node looks at itself and at the others, and one names those that are bad."""
