"""Rehearsing recipes on one machine: jobs of several processes without a launcher, and their comparison."""
