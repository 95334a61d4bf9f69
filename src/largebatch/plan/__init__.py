"""The plan of a run: config + number of processes -> every number of the optimisation, and its explanation."""

from largebatch.plan.contract import RunPlan, resolve
from largebatch.plan.explain import explain

__all__ = ["RunPlan", "explain", "resolve"]
