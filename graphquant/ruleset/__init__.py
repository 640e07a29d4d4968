"""Rule files: what they may say, how they are found, and all their mistakes at once."""

from graphquant.ruleset.syntax import Link, PatternOp, parse_chain, parse_pattern
from graphquant.ruleset.types import BoundRule, Observe, Pattern, Rule, RuleFile, RuleSet, Scheme, Selector

__all__ = [
    "BoundRule",
    "Link",
    "Observe",
    "Pattern",
    "PatternOp",
    "Rule",
    "RuleFile",
    "RuleSet",
    "Scheme",
    "Selector",
    "parse_chain",
    "parse_pattern",
]
