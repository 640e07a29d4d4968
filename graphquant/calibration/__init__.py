"""Calibration: run data through a model and collect one sketch for each tensor whose range depends on data."""

from graphquant.calibration.batch_independence import is_batch_independent, measure_footprint
from graphquant.calibration.calibrate import CalibrationRun, ResumeError, calibrate_folds, calibrate_model
from graphquant.calibration.memory import RunFootprint, estimate_footprint
from graphquant.calibration.stats import DataRun, Stats, combine_stats, load_stats, select_stats
from graphquant.calibration.targets import (
    CALIBRATION_METHODS,
    all_float_targets,
    finest_histogram_bits,
    plan_targets,
    sites_needing_data,
    with_observer,
)
