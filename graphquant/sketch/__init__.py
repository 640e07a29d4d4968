"""What calibration keeps of a tensor, and the observers that turn it into a range."""

from graphquant.sketch.accumulator import Accumulator, add_each, sketch
from graphquant.sketch.distribution import Distribution, distribution
from graphquant.sketch.estimate import Cost, estimate
from graphquant.sketch.observers import OBSERVERS, Argument, Observer, histogram_bits
from graphquant.sketch.types import BITS, EMPTY, Sketch, coarsen, edges, means, merge

__all__ = [
    "BITS",
    "EMPTY",
    "OBSERVERS",
    "Accumulator",
    "Argument",
    "Cost",
    "Distribution",
    "Observer",
    "Sketch",
    "add_each",
    "coarsen",
    "distribution",
    "edges",
    "estimate",
    "histogram_bits",
    "means",
    "merge",
    "sketch",
]
