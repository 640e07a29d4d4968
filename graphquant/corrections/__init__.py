"""Corrections: named steps between scales and rewriting that change weights or biases so that rounding costs less."""

from graphquant.corrections.run import CORRECTIONS, correct
from graphquant.corrections.types import Corrected, Draft, Samples

__all__ = ["CORRECTIONS", "Corrected", "Draft", "Samples", "correct"]
