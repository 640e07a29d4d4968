"""The plan: which tensors are quantized for which consumers, and how. Plain data, printed, saved, edited, applied."""

from graphquant.plan.make import Choice, make_plan
from graphquant.plan.types import Plan, Site, Skip, Step

__all__ = ["Choice", "Plan", "Site", "Skip", "Step", "make_plan"]
