"""What calibration keeps of a tensor, and the observers that turn it into a range."""

from graphquant.sketch.observers import OBSERVERS, Observer
from graphquant.sketch.types import EMPTY, Sketch, merge, sketch

__all__ = ["EMPTY", "OBSERVERS", "Observer", "Sketch", "merge", "sketch"]
