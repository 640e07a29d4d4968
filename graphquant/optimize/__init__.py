"""Optimization algorithms that reduce the rounding error, and the search for the plan of the lowest cost."""

from graphquant.optimize.algorithm import AlgorithmData, AlgorithmResult, PreCalibrationState, WeightEdits
from graphquant.optimize.algorithms import (
    POST_CALIBRATION_ALGORITHMS,
    PRE_CALIBRATION_ALGORITHMS,
    BuiltModel,
    build_model,
    choose_algorithms,
    run_precalibration_algorithms,
)
from graphquant.optimize.candidates import (
    FLOAT_CANDIDATE,
    RULE_CANDIDATE,
    WIDE_ACTIVATION_BITS,
    Candidate,
    ScaleGroup,
    byte_costs,
    group_shared_scales,
    mac_costs,
    make_candidate_plans,
    make_scale_groups,
)
from graphquant.optimize.latency import (
    FusionMap,
    LatencyProfile,
    TimeRatio,
    make_latency_groups,
    measure_time_ratio,
    minimize_latency,
)
from graphquant.optimize.search import Objective, SearchTrace, attach_sensitivity, search_plan
from graphquant.optimize.selection import PlanQuality, SelectionResult, allocate_weight_bits, search_cheapest_plan
from graphquant.optimize.sensitivity import Sensitivity, measure_sensitivity

__all__ = [
    "FLOAT_CANDIDATE",
    "POST_CALIBRATION_ALGORITHMS",
    "PRE_CALIBRATION_ALGORITHMS",
    "RULE_CANDIDATE",
    "WIDE_ACTIVATION_BITS",
    "AlgorithmData",
    "AlgorithmResult",
    "BuiltModel",
    "Candidate",
    "FusionMap",
    "LatencyProfile",
    "Objective",
    "PlanQuality",
    "PreCalibrationState",
    "ScaleGroup",
    "SearchTrace",
    "SelectionResult",
    "Sensitivity",
    "TimeRatio",
    "WeightEdits",
    "allocate_weight_bits",
    "attach_sensitivity",
    "build_model",
    "byte_costs",
    "choose_algorithms",
    "group_shared_scales",
    "mac_costs",
    "make_candidate_plans",
    "make_latency_groups",
    "make_scale_groups",
    "measure_sensitivity",
    "measure_time_ratio",
    "minimize_latency",
    "run_precalibration_algorithms",
    "search_cheapest_plan",
    "search_plan",
]
