"""What each quantization does to a model's outputs, and the plan that does least for its cost."""

from graphquant.accuracy.blame import Blame, blame
from graphquant.accuracy.costs import Group, groups, in_bytes, in_multiply_adds
from graphquant.accuracy.search import Found, Measured, search
from graphquant.accuracy.ways import FLOAT, OWN, WIDE, Way, ways

__all__ = [
    "FLOAT",
    "OWN",
    "WIDE",
    "Blame",
    "Found",
    "Group",
    "Measured",
    "Way",
    "blame",
    "groups",
    "in_bytes",
    "in_multiply_adds",
    "search",
    "ways",
]
