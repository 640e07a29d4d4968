"""Optimization algorithms that reduce the rounding error, and the search for the cheapest plan."""

from graphquant.optimize.algorithm import AlgorithmData, AlgorithmResult, WeightEdits
from graphquant.optimize.algorithms import (
    POST_CALIBRATION_ALGORITHMS,
    PRE_CALIBRATION_ALGORITHMS,
    WEIGHT_CLIPPING,
    PreCalibrationState,
    run_post_calibration,
    run_pre_calibration,
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
from graphquant.optimize.search import PlanQuality, SelectionResult, allocate_weight_bits, search_cheapest_plan
from graphquant.optimize.sensitivity import Sensitivity, measure_sensitivity

__all__ = [
    "AlgorithmData",
    "AlgorithmResult",
    "Candidate",
    "FLOAT_CANDIDATE",
    "FusionMap",
    "LatencyProfile",
    "POST_CALIBRATION_ALGORITHMS",
    "PRE_CALIBRATION_ALGORITHMS",
    "PlanQuality",
    "PreCalibrationState",
    "RULE_CANDIDATE",
    "ScaleGroup",
    "SelectionResult",
    "Sensitivity",
    "TimeRatio",
    "WEIGHT_CLIPPING",
    "WIDE_ACTIVATION_BITS",
    "WeightEdits",
    "allocate_weight_bits",
    "byte_costs",
    "group_shared_scales",
    "mac_costs",
    "make_candidate_plans",
    "make_latency_groups",
    "make_scale_groups",
    "measure_sensitivity",
    "measure_time_ratio",
    "minimize_latency",
    "run_post_calibration",
    "run_pre_calibration",
    "search_cheapest_plan",
]
