"""Match rules against a model: find the uses that each rule claims, and the reasons why other rules do not match.

A producer's conditions are evaluated once per tensor, and a consumer's once per use. Each condition examines one op
and, for a chain or pattern, a bounded number of neighbors. So matching costs rules x (ops + edges) for any fan-out.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import FLOAT_TYPES, Model, Shape, TensorRef, Use
from graphquant.rules.conditions import (
    OpNeighbors,
    attribute_miss_reason,
    cached_chain_links,
    find_pattern,
    matches_chain_down,
    matches_chain_up,
    pattern_ops_of,
    possible_last_links,
    size_miss_reason,
    type_miss_reason,
)
from graphquant.rules.pattern_syntax import compile_regex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from graphquant.rules.pattern_syntax import PatternOp
    from graphquant.rules.rule import BoundRule, RuleSet, Selector

    TensorConsumers = Iterable[tuple[TensorRef, list[Use]]]


# Find the longest of the branches that an op joins.

MAX_ANCESTORS = 256
"""Ops above each branch that are examined to find the common ancestor."""


def branch_lengths(neighbors: OpNeighbors, ends: list[TensorRef]) -> list[int]:
    """Return the distance of each of `ends` from the nearest op that all are computed from, 0 if there is none."""
    ancestors = [_ancestor_distances(neighbors, end) for end in ends]
    common = [op for op in ancestors[0] if all(op in distances for distances in ancestors[1:])]
    if not common:
        return [0] * len(ends)
    nearest = min(common, key=lambda op: sum(distances[op] for distances in ancestors))
    return [distances[nearest] for distances in ancestors]


def _ancestor_distances(neighbors: OpNeighbors, end: TensorRef) -> dict[tuple[str, str], int]:
    """Return the nearest `FARTHEST` ops that `end` is computed from, with the smallest number of steps to each."""
    distances = {(end.graph, end.op): 0}
    queue = [(end.graph, end.op)]
    for current in queue:
        for source in neighbors.model.graphs[current[0]].slots(current[1]):
            if len(distances) >= MAX_ANCESTORS:
                return distances
            if (
                source is not None
                and (source.graph, source.op) not in distances
                and not neighbors.parameters.is_parameter(source)
            ):
                distances[source.graph, source.op] = distances[current] + 1
                queue.append((source.graph, source.op))
    return distances


# Match names in rules, and check that they occur in the model.


def name_matches(pattern: str, *names: str) -> bool:
    """Return True if a name equals `pattern`, or matches it as a glob or `/regular expression/`."""
    regex = _compile_name_pattern(pattern)
    return any(name and (name == pattern or regex.search(name)) for name in names)


def op_selector_names(graph: str, op: str) -> tuple[str, ...]:
    """Return the names by which a consumer's selector may refer to an op."""
    return (op, f"{graph}/{op}") if graph else (op,)


def tensor_selector_names(model: Model, tensor: TensorRef) -> tuple[str, ...]:
    """Return the names by which a producer's selector may refer to `tensor`."""
    op = model.op(tensor)
    names = (op.outputs[tensor.port].name, f"{op.name}:{tensor.port}", str(tensor))
    return (*names, *op_selector_names(tensor.graph, op.name)) if tensor.port == 0 else names


def all_producer_names(model: Model) -> Iterator[str]:
    """Yield every name that a producer's selector can match, in the reachable graphs."""
    for name in model.reachable_graphs():
        for op in model.graphs[name].ops():
            for port in range(len(op.outputs)):
                yield from (label for label in tensor_selector_names(model, TensorRef(name, op.name, port)) if label)


def all_consumer_names(model: Model) -> Iterator[str]:
    """Yield every name that a consumer's selector can match, in the reachable graphs."""
    for name in model.reachable_graphs():
        for op in model.graphs[name].ops():
            yield from op_selector_names(name, op.name)


def check_name_selectors(model: Model, ruleset: RuleSet, tensors: Callable[[], TensorConsumers]) -> None:
    """Check that each name selector of a rule that is not optional matches something.

    Args:
        model: The model.
        ruleset: The rules.
        tensors: Returns the tensors that rules apply to, each with its consumers.

    Raises:
        UsageError: A selector matches nothing, or the two selectors of a rule never meet.
    """
    sides = (("producer", all_producer_names), ("consumer", all_consumer_names))
    for side, names_of in sides:
        selected = [(rule, getattr(rule.rule, side).name) for rule in ruleset.rules if not rule.rule.optional]
        named_rules = [(rule, pattern) for rule, pattern in selected if pattern is not None]
        names = list(dict.fromkeys(names_of(model))) if named_rules else []
        for rule, pattern in named_rules:
            if not name_matches(pattern, *names):
                raise UsageError(
                    f"{rule.file}:{rule.line}: rule {rule.rule.name!r}: the {side} name {pattern!r} matches nothing"
                    " in the model."
                    f"{did_you_mean(pattern, names) or ' List the names with: graphquant inspect MODEL.'}"
                    " If it may be absent, set optional = true."
                )
    for rule in ruleset.rules:
        if rule.rule.producer.name and rule.rule.consumer.name and not rule.rule.optional:
            _check_producer_feeds_consumer(model, tensors(), rule, rule.rule.producer.name, rule.rule.consumer.name)


def _check_producer_feeds_consumer(
    model: Model, tensors: TensorConsumers, rule: BoundRule, producer: str, consumer: str
) -> None:
    """Reject a rule whose two names match, although no op of one name reads a tensor of the other."""
    producers = [
        (tensor, uses) for tensor, uses in tensors if name_matches(producer, *tensor_selector_names(model, tensor))
    ]
    readers = dict.fromkeys(use for _, uses in producers for use in uses)
    if not any(name_matches(consumer, *op_selector_names(use.graph, use.op)) for use in readers):
        examples = ", ".join(repr(use.op) for use in list(readers)[:5])
        raise UsageError(
            f"{rule.file}:{rule.line}: rule {rule.rule.name!r}: no op called {consumer!r} reads a float tensor"
            f" called {producer!r}.{f' Its readers are {examples}.' if examples else ''} If that is acceptable, set"
            " optional = true."
        )


@lru_cache(maxsize=1024)
def _compile_name_pattern(pattern: str) -> Any:
    if len(pattern) > 1 and pattern[0] == pattern[-1] == "/":
        return compile_regex(pattern[1:-1])
    return re.compile(rf"\A(?:{fnmatch.translate(pattern)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMatch:
    """A rule that matches one use of a tensor."""

    tensor: TensorRef
    use: Use
    rule: BoundRule


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleMiss:
    """A rule that does not match one use.

    Attributes:
        rule: The rule.
        reason: The first condition that failed; "" if an earlier rule claimed the use.
        near: Closeness of the match from 0 to 4. Producer and consumer each count 2 if they match, and 1 if only sizes
            and similar conditions failed or the rule does not name an op.
    """

    rule: BoundRule
    reason: str
    closeness: int = 0


class RuleMatcher:
    """Matches the rules of `ruleset` against `model`, which must not be edited meanwhile."""

    def __init__(self, model: Model, ruleset: RuleSet) -> None:
        """Check the name selectors.

        Raises:
            UsageError: A name selector of a rule that is not optional matches nothing.
        """
        self.model = model
        self.ruleset = ruleset
        self.neighbors = OpNeighbors(model)
        self.parameters = self.neighbors.parameters
        self._rules_by_kind: dict[tuple[str, bool], list[BoundRule]] = {}
        self._pattern_matches: dict[tuple[PatternOp, ...], dict[str, set[tuple[str, str]]]] = {}
        self._ops_by_reference: dict[tuple[int, str], set[tuple[str, str]]] = {}
        self._claimed_uses: dict[tuple[int, str, str], frozenset[Use]] = {}
        self._longest_path_uses: dict[tuple[int, str, str], Use | None] = {}
        self._rules_by_name = {(rule.file, rule.rule.name): rule for rule in ruleset.rules}
        check_name_selectors(model, ruleset, self.tensors)

    # -- the two questions -----------------------------------------------------------------------

    def matches(self) -> Iterator[RuleMatch]:
        """Yield the first rule that matches for each use of a float tensor, in the order of the model.

        Raises:
            UsageError: A pattern has too many possible matches in the model.
        """
        for tensor, uses in self.tensors():
            op_key = (tensor.graph, tensor.op)
            rules = [
                rule
                for rule in self._candidate_rules(tensor)
                if (
                    rule.rule.producer.pattern is None
                    or op_key in self._ops_in_pattern(rule, rule.rule.producer.pattern)
                )
                and not self._producer_miss_reason(rule, tensor)
            ]
            for use in uses if rules else ():
                for rule in rules:
                    if not self._consumer_miss_reason(rule, tensor, use):
                        yield RuleMatch(tensor=tensor, use=use, rule=rule)
                        break

    def _candidate_rules(self, tensor: TensorRef) -> list[BoundRule]:
        """Return the rules whose producer may end in an op of that kind: few, as most rules name kinds."""
        key = (self.model.op(tensor).kind, self.parameters.is_parameter(tensor))
        if key not in self._rules_by_kind:
            self._rules_by_kind[key] = [
                rule
                for rule in self.ruleset.rules
                if rule.rule.producer.kind is None
                or any(
                    self.neighbors.is_kind(link.kinds, tensor) for link in possible_last_links(rule.rule.producer.kind)
                )
            ]
        return self._rules_by_kind[key]

    def miss_reason(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        """Return the reason why `rule` does not match `use` of `tensor`, "" if it matches."""
        return self._producer_miss_reason(rule, tensor) or self._consumer_miss_reason(rule, tensor, use)

    def evaluate_rule(self, rule: BoundRule, tensor: TensorRef, use: Use) -> RuleMiss:
        """Return the reason why `rule` does not match `use` of `tensor`, and how close it comes."""
        sides = (
            (rule.rule.producer, self._producer_mismatch(rule, tensor), self._producer_miss_reason(rule, tensor)),
            (rule.rule.consumer, self._consumer_mismatch(rule, use), self._consumer_miss_reason(rule, tensor, use)),
        )
        closeness = sum(
            0 if mismatch else 1 if reason or not _identifies_op(selector) else 2
            for selector, mismatch, reason in sides
        )
        return RuleMiss(rule=rule, reason=sides[0][2] or sides[1][2], closeness=closeness)

    def tensors(self) -> Iterator[tuple[TensorRef, list[Use]]]:
        """Yield each float tensor of the reachable graphs, or one of unknown dtype, with its consumers."""
        for name in self.model.reachable_graphs():
            graph = self.model.graphs[name]
            for op in graph.ops():
                readers = self.neighbors.consumers_by_port(graph, op.name)
                for port, output in enumerate(op.outputs):
                    if port in readers and (output.dtype is None or output.dtype in FLOAT_TYPES):
                        yield TensorRef(name, op.name, port), readers[port]

    def shape(self, tensor: TensorRef) -> Shape | None:
        """Return the static shape of `tensor`; a parameter's also from the variable or argument behind it."""
        return self.neighbors.parameters.shape(tensor)

    def labels(self, tensor: TensorRef) -> tuple[str, ...]:
        """Return the names by which a producer's selector may refer to `tensor`."""
        return tensor_selector_names(self.model, tensor)

    def all_labels(self) -> list[str]:
        """Return every name that a selector can match, in the reachable graphs."""
        return list(dict.fromkeys((*all_producer_names(self.model), *all_consumer_names(self.model))))

    # -- selectors -------------------------------------------------------------------------------

    def _producer_miss_reason(self, rule: BoundRule, tensor: TensorRef) -> str:
        selector, op = rule.rule.producer, self.model.op(tensor)
        reason = self._producer_mismatch(rule, tensor)
        if not reason and selector.readers is not None and len(self.neighbors.consumers(tensor)) != selector.readers:
            reason = f"{tensor} has {len(self.neighbors.consumers(tensor))} consumers, not {selector.readers}"
        reason = (
            reason or attribute_miss_reason(selector, op) or size_miss_reason(self.neighbors, selector, tensor, None)
        )
        return f"producer {reason}" if reason else ""

    def _producer_mismatch(self, rule: BoundRule, tensor: TensorRef) -> str:
        """Return the reason why the op that produces `tensor` is not the rule's producer, "" if it is."""
        selector, op = rule.rule.producer, self.model.op(tensor)
        if selector.kind is not None and not matches_chain_up(
            self.neighbors, cached_chain_links(selector.kind), tensor
        ):
            actual = "a parameter" if self.parameters.is_parameter(tensor) else repr(op.kind)
            return f"{op.name} is {actual}, not {selector.kind!r}"
        if selector.name is not None and not name_matches(selector.name, *self.labels(tensor)):
            return f"{tensor} does not match the name {selector.name!r}"
        if selector.pattern is not None and (tensor.graph, tensor.op) not in self._ops_in_pattern(
            rule, selector.pattern
        ):
            return f"{op.name} is not {selector.pattern!r} of that pattern"
        return type_miss_reason(selector, op)

    def _consumer_miss_reason(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        selector, op = rule.rule.consumer, self.model.graphs[use.graph].op(use.op)
        reason = self._consumer_mismatch(rule, use)
        if not reason and selector.input is not None and op.role(use.slot) not in selector.input.split("|"):
            reason = f"{use} reads it as {op.role(use.slot)!r}, not as {selector.input!r}"
        reason = (
            reason or attribute_miss_reason(selector, op) or size_miss_reason(self.neighbors, selector, tensor, use)
        )
        reason = reason or self._inputs_miss_reason(rule, use)
        return f"consumer {reason}" if reason else ""

    def _consumer_mismatch(self, rule: BoundRule, use: Use) -> str:
        """Return the reason why the op that reads is not the rule's consumer, "" if it is."""
        selector, op = rule.rule.consumer, self.model.graphs[use.graph].op(use.op)
        if selector.kind is not None and not matches_chain_down(self.neighbors, cached_chain_links(selector.kind), use):
            return f"{op.name} is {op.kind!r}, not {selector.kind!r}"
        if selector.name is not None and not name_matches(selector.name, *op_selector_names(use.graph, op.name)):
            return f"{op.name} does not match the name {selector.name!r}"
        if selector.pattern is not None and (use.graph, use.op) not in self._ops_in_pattern(rule, selector.pattern):
            return f"{op.name} is not {selector.pattern!r} of that pattern"
        return type_miss_reason(selector, op)

    # -- the other inputs of an op -----------------------------------------------------------------

    def _inputs_miss_reason(self, rule: BoundRule, use: Use) -> str:
        """Return the failed condition that concerns all inputs of the op of `use`."""
        selector = rule.rule.consumer
        if selector.path is not None and self._longest_path_use(rule, use) != use:
            return f"{use} is not at the end of the longest path"
        if selector.sibling_rule is not None:
            sibling = self._rules_by_name[rule.file, selector.sibling_rule]
            if not self._uses_claimed_by(sibling, use) - {use}:
                return f"rule {selector.sibling_rule!r} claims no other input of {use.op}"
        return ""

    def _uses_claimed_by(self, rule: BoundRule, use: Use) -> frozenset[Use]:
        """Return the uses of the op of `use` that `rule` matches first, ignoring rules with `sibling_rule`."""
        key = (id(rule), use.graph, use.op)
        if key not in self._claimed_uses:
            candidates = [candidate for candidate in self.ruleset.rules if candidate.rule.consumer.sibling_rule is None]
            first_rules = {
                operand_use: next(
                    (candidate for candidate in candidates if not self.miss_reason(candidate, tensor, operand_use)),
                    None,
                )
                for tensor, operand_use in self.neighbors.inputs(use)
            }
            self._claimed_uses[key] = frozenset(
                claimed_use for claimed_use, claiming_rule in first_rules.items() if claiming_rule is rule
            )
        return self._claimed_uses[key]

    def _longest_path_use(self, rule: BoundRule, use: Use) -> Use | None:
        """Return the use at the end of the longest path into the op of `use`, None without two paths."""
        key = (id(rule), use.graph, use.op)
        if key not in self._longest_path_uses:
            data = [
                (tensor, operand_use)
                for tensor, operand_use in self.neighbors.inputs(use)
                if not self.parameters.is_parameter(tensor)
            ]
            candidates = [
                (tensor, operand_use) for tensor, operand_use in data if not self._producer_miss_reason(rule, tensor)
            ]
            if len(data) < 2 or not candidates:  # noqa: PLR2004  # two paths
                self._longest_path_uses[key] = None
            else:
                lengths = (
                    branch_lengths(self.neighbors, [tensor for tensor, _ in candidates]) if len(candidates) > 1 else [0]
                )
                self._longest_path_uses[key] = candidates[lengths.index(max(lengths))][1]
        return self._longest_path_uses[key]

    # -- patterns --------------------------------------------------------------------------------

    def _ops_in_pattern(self, rule: BoundRule, reference: str) -> set[tuple[str, str]]:
        """Return (graph, op) of every op that has the named role in a match of the pattern."""
        key = (id(rule.patterns), reference)
        if key not in self._ops_by_reference:
            name, _, op_name = reference.partition(".")
            pattern_ops = pattern_ops_of(rule.patterns[name].ops)
            if pattern_ops not in self._pattern_matches:
                self._pattern_matches[pattern_ops] = find_pattern(self.neighbors, name, pattern_ops)
            self._ops_by_reference[key] = self._pattern_matches[pattern_ops][op_name or pattern_ops[-1].name]
        return self._ops_by_reference[key]


def _identifies_op(selector: Selector) -> bool:
    """Return True if a selector names particular ops; any weight is not particular."""
    return selector.kind not in {None, "parameter"} or any((selector.name, selector.pattern, selector.type))
