"""Scales of a TFLite file used for another model: which names are the same tensor, and what is taken."""

from graphquant.ranges.give import Given, Ranges, give, read_map
from graphquant.ranges.names import places, same

__all__ = ["Given", "Ranges", "give", "places", "read_map", "same"]
