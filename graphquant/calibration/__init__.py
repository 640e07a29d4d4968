"""A plan, a runner and data to statistics: each tensor whose range only data can tell fills one sketch."""

from graphquant.calibration.cones import kept
from graphquant.calibration.file import load_stats, save_stats
from graphquant.calibration.memory import parse_size
from graphquant.calibration.passes import Observing
from graphquant.calibration.run import Load, NoContinuationError, calibrate, load_of
from graphquant.calibration.stats import Run, Stats, merge, select
from graphquant.calibration.targets import (
    METHODS,
    Target,
    Targets,
    everything,
    finest,
    needs_data,
    planned,
    with_method,
)

__all__ = [
    "METHODS",
    "Load",
    "NoContinuationError",
    "Observing",
    "Run",
    "Stats",
    "Target",
    "Targets",
    "calibrate",
    "everything",
    "finest",
    "kept",
    "load_of",
    "load_stats",
    "merge",
    "needs_data",
    "parse_size",
    "planned",
    "save_stats",
    "select",
    "with_method",
]
