"""The public functions, one module for each."""

from graphquant.api.calibrate import calibrate, merge_stats
from graphquant.api.compare import align_preparation, compare, diff, plan_or_none
from graphquant.api.convert import to_tf
from graphquant.api.insert import Result, insert
from graphquant.api.inspect import check, check_data, explain, inspect_stats
from graphquant.api.models import load, save
from graphquant.api.plan import plan, prepare_for_plan
from graphquant.api.strip import Proof, StripResult, prove_stripped, strip

__all__ = [
    "Proof",
    "Result",
    "StripResult",
    "align_preparation",
    "calibrate",
    "check",
    "check_data",
    "compare",
    "diff",
    "explain",
    "insert",
    "inspect_stats",
    "load",
    "merge_stats",
    "plan",
    "plan_or_none",
    "prepare_for_plan",
    "prove_stripped",
    "save",
    "strip",
    "to_tf",
]
