"""The public verbs, each a story of a few lines: load, plan, calibrate, insert, compare, explain, inspect, save."""

from graphquant.pipeline.calibrating import calibrate, merge_stats
from graphquant.pipeline.common import Progress, Several
from graphquant.pipeline.comparing import compare
from graphquant.pipeline.differing import aligned, diff, plan_at
from graphquant.pipeline.inserting import insert
from graphquant.pipeline.looking import check, check_data, explain, inspect_stats
from graphquant.pipeline.models import load, save
from graphquant.pipeline.planning import plan, prepared_for
from graphquant.pipeline.proving import Proof, prove_stripped
from graphquant.pipeline.result import Result, to_tf
from graphquant.pipeline.stripping import Stripped, strip

__all__ = [
    "Progress",
    "Proof",
    "Result",
    "Several",
    "Stripped",
    "aligned",
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
    "plan_at",
    "prepared_for",
    "prove_stripped",
    "save",
    "strip",
    "to_tf",
]
