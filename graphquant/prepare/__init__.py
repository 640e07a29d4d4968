"""The named steps before matching, their records, and what they leave alone."""

from graphquant.prepare.forwarding import seen_through
from graphquant.prepare.run import STEPS, left_alone, names_told, prepare, prepared_digest, steps_told
from graphquant.prepare.steps import Left, Step, drop_unread
from graphquant.prepare.undo import originals

__all__ = [
    "STEPS",
    "Left",
    "Step",
    "drop_unread",
    "left_alone",
    "names_told",
    "originals",
    "prepare",
    "prepared_digest",
    "seen_through",
    "steps_told",
]
