"""What calibration keeps of a tensor, and the observers that turn it into a range."""

from graphquant.sketch.accumulator import Accumulator, sketch
from graphquant.sketch.observers import OBSERVERS, Observer
from graphquant.sketch.types import BITS, EMPTY, Sketch, coarsen, edges, means, merge

__all__ = [
    "BITS",
    "EMPTY",
    "OBSERVERS",
    "Accumulator",
    "Observer",
    "Sketch",
    "coarsen",
    "edges",
    "means",
    "merge",
    "sketch",
]
