"""Schemes, statistics, ties and what backends can compute, to scales and zero points, each with its reasons."""

from graphquant.solve.clips import absorbs, clip_ends
from graphquant.solve.limits import ADD_READ, ADD_WRITE, BIAS_CUT, CUT, MUL_WRITE
from graphquant.solve.reasons import because
from graphquant.solve.solver import FLOAT8_BETWEEN, solve
from graphquant.solve.types import Change, Conflict, Solution
from graphquant.solve.worklist import position_of

__all__ = [
    "ADD_READ",
    "ADD_WRITE",
    "BIAS_CUT",
    "CUT",
    "FLOAT8_BETWEEN",
    "MUL_WRITE",
    "Change",
    "Conflict",
    "Solution",
    "absorbs",
    "because",
    "clip_ends",
    "position_of",
    "solve",
]
