"""The plan: which tensors are quantized for which consumers, and how. Plain data, printed, saved, edited, applied."""

from graphquant.plans.check import check_plan
from graphquant.plans.json import from_json, read_plan, to_json
from graphquant.plans.make import UNTIED, Choice, make_plan
from graphquant.plans.types import Plan, Site, Skip

__all__ = ["UNTIED", "Choice", "Plan", "Site", "Skip", "check_plan", "from_json", "make_plan", "read_plan", "to_json"]
