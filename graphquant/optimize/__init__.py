"""Optimization algorithms that reduce the rounding error, and the search for the plan of the lowest cost."""

from graphquant.optimize.algorithm import AlgorithmResult, PreCalibrationState
from graphquant.optimize.algorithms import (
    POST_CALIBRATION_ALGORITHMS,
    PRE_CALIBRATION_ALGORITHMS,
    BuiltModel,
    build_model,
    choose_algorithms,
    run_precalibration_algorithms,
)
from graphquant.optimize.candidates import SearchFold
from graphquant.optimize.latency import TimeRatio, measure_time_ratio
from graphquant.optimize.repair import RepairRequest, RepairTrace, Workspace, repair_plan
from graphquant.optimize.search import Objective, SearchTrace, search_plan
from graphquant.optimize.search_budget import SearchBudget, predict_costs, search_clock
from graphquant.optimize.selection import search_cheapest_plan
from graphquant.optimize.sensitivity import Sensitivity
