"""The named steps before matching, their records, and what they leave alone."""

from graphquant.prepare.run import left_alone, prepare, prepared_digest
from graphquant.prepare.steps import Left, Step, drop_unread

__all__ = ["Left", "Step", "drop_unread", "left_alone", "prepare", "prepared_digest"]
