"""Rule files: what they may say, how they are found, and all their mistakes at once."""

from graphquant.ruleset.load import find, load_ruleset, moved_rules, shipped
from graphquant.ruleset.schema import schema
from graphquant.ruleset.scheme import Observe, Scheme
from graphquant.ruleset.selector import Pattern, Selector
from graphquant.ruleset.syntax import ANY_PART, Link, PatternOp, compile_regex, parse_chain, parse_pattern
from graphquant.ruleset.types import CORRECTIONS, NOT, BoundRule, Rule, RuleFile, RuleSet

__all__ = [
    "ANY_PART",
    "CORRECTIONS",
    "NOT",
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
    "compile_regex",
    "find",
    "load_ruleset",
    "moved_rules",
    "parse_chain",
    "parse_pattern",
    "schema",
    "shipped",
]
