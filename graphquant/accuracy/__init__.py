"""What each quantization does to a model's outputs, and the plan that does least for its cost."""

from graphquant.accuracy.blame import Blame, blame
from graphquant.accuracy.budget import fit
from graphquant.accuracy.costs import Group, bound, groups, in_bytes, in_multiply_adds
from graphquant.accuracy.latency import Fastest, Fused, Profile, fastest, parts_of
from graphquant.accuracy.search import Found, Measured, search
from graphquant.accuracy.timing import Ratio, ratio
from graphquant.accuracy.ways import FLOAT, OWN, WIDE, Way, ways

__all__ = [
    "FLOAT",
    "OWN",
    "WIDE",
    "Blame",
    "Fastest",
    "Found",
    "Fused",
    "Group",
    "Measured",
    "Profile",
    "Ratio",
    "Way",
    "blame",
    "bound",
    "fastest",
    "fit",
    "groups",
    "in_bytes",
    "in_multiply_adds",
    "parts_of",
    "ratio",
    "search",
    "ways",
]
