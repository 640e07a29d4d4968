"""Rules against a model: which uses each rule claims, and why the others do not match."""

from graphquant.match.matcher import Match, Matcher, Miss
from graphquant.match.names import name_matches

__all__ = ["Match", "Matcher", "Miss", "name_matches"]
