"""The plan of a run: config + number of processes -> every number of the optimization, and its explanation."""

from largebatch.plan.contract import RunPlan, resolve
from largebatch.plan.explain import explain
from largebatch.plan.notes import notes_on

__all__ = ["RunPlan", "explain", "notes_on", "resolve"]
