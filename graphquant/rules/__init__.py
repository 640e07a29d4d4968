"""Rule files: loading, validation and their data."""

from graphquant.rules.json_schema import rule_file_schema
from graphquant.rules.load import find_rule_file, load_ruleset, rebase_rule_paths, shipped_rule_files
from graphquant.rules.matcher import (
    LIST_NAMES_HINT,
    RuleMatch,
    RuleMatcher,
    RuleMiss,
    name_matches,
    op_selector_names,
    removed_name_hint,
)
from graphquant.rules.rule import ALGORITHM_NAMES, NEGATION, Rule, RuleSet, Selector
from graphquant.rules.scheme import ObserverConfig, Scheme
from graphquant.rules.toml_document import (
    DocumentKind,
    Mistake,
    describe_table_schema,
    field_descriptions,
    mistakes_error,
    parse_document,
    read_document,
    table_keys,
    validate_document,
)
from graphquant.rules.toml_lines import KeyPath

__all__ = [
    "ALGORITHM_NAMES",
    "LIST_NAMES_HINT",
    "NEGATION",
    "DocumentKind",
    "KeyPath",
    "Mistake",
    "ObserverConfig",
    "Rule",
    "RuleMatch",
    "RuleMatcher",
    "RuleMiss",
    "RuleSet",
    "Scheme",
    "Selector",
    "describe_table_schema",
    "field_descriptions",
    "find_rule_file",
    "load_ruleset",
    "mistakes_error",
    "name_matches",
    "op_selector_names",
    "parse_document",
    "read_document",
    "rebase_rule_paths",
    "removed_name_hint",
    "rule_file_schema",
    "shipped_rule_files",
    "table_keys",
    "validate_document",
]
