"""Compare arrays, and print figures."""

import sys
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def print_measurement(text: str) -> None:
    """Print a measurement, which `pytest -rP` shows."""
    sys.stdout.write(f"{text}\n")


def sqnr_db(exact: Array, actual: Array) -> float:
    """Return the ratio of signal to quantization noise in dB, infinite without noise."""
    noise = np.square(actual.astype(np.float64) - exact).sum()
    return float(10 * np.log10(np.square(exact.astype(np.float64)).sum() / noise)) if noise else np.inf


def float_bits(values: Array) -> Array:
    """Return the bit patterns of values as float32, so that -0.0 differs from 0.0."""
    return np.asarray(values, np.float32).view(np.int32)
