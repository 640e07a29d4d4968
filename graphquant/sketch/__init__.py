"""What calibration keeps of a tensor, and the observers that turn it into a range."""

from graphquant.sketch.accumulator import Accumulator, sketch
from graphquant.sketch.observers import OBSERVERS, Argument, Observer, histogram_bits
from graphquant.sketch.types import BITS, EMPTY, Sketch, coarsen, edges, means, merge

__all__ = [
    "BITS",
    "EMPTY",
    "OBSERVERS",
    "Accumulator",
    "Argument",
    "Observer",
    "Sketch",
    "coarsen",
    "edges",
    "histogram_bits",
    "means",
    "merge",
    "sketch",
]
