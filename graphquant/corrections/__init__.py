"""Corrections: named steps that change weights or biases so that rounding costs less, before calibration and after."""

from graphquant.corrections.balancing import BALANCINGS, Balanced, balance
from graphquant.corrections.clipping import NAME as CLIPPING
from graphquant.corrections.run import CORRECTIONS, correct
from graphquant.corrections.types import Corrected, Draft, Samples

__all__ = ["BALANCINGS", "CLIPPING", "CORRECTIONS", "Balanced", "Corrected", "Draft", "Samples", "balance", "correct"]
