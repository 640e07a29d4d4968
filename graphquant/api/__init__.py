"""The public functions, one module for each."""

from graphquant.api.calibrate import calibrate, merge_stats
from graphquant.api.compare import align_preparation, compare, diff, plan_or_none
from graphquant.api.convert import to_tf
from graphquant.api.insert import insert
from graphquant.api.inspect import check, check_data, explain, inspect_stats
from graphquant.api.models import load, save
from graphquant.api.plan import plan, prepare_for_plan
from graphquant.api.result import Result
from graphquant.api.strip import Proof, StripResult, prove_stripped, strip
