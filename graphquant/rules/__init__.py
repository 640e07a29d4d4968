"""Rule files: loading, validation and their data."""

from graphquant.rules.load import find_rule_file, load_ruleset, rebase_rule_paths, rule_file_schema, shipped_rule_files
from graphquant.rules.matcher import (
    LIST_NAMES_HINT,
    RuleMatch,
    RuleMatcher,
    RuleMiss,
    name_matches,
    op_selector_names,
    removed_name_hint,
)
from graphquant.rules.rule import ALGORITHM_NAMES, NEGATION, Rule, RuleSet, Selector, choose_algorithms
from graphquant.rules.scheme import ObserverConfig, Scheme, change_scheme
from graphquant.rules.toml_document import (
    DocumentKind,
    KeyPath,
    Mistake,
    describe_table_schema,
    mistakes_error,
    parse_document,
    read_document,
    validate_document,
)
