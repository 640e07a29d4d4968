"""Match rules against a model: find the uses that each rule claims, and the reasons why other rules do not match.

A producer's conditions are evaluated once per tensor, and a consumer's once per use. Each condition examines one op
and, for a chain or pattern, a bounded number of neighbors. So matching costs rules x (ops + edges) for any fan-out.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import AFFINE_KINDS, FLOAT_TYPES, VALUE_MOVING_KINDS, Model, Op, Shape, TensorRef, Use, follow_to_end
from graphquant.rules.conditions import (
    OpNeighbors,
    attribute_miss_reason,
    find_pattern,
    matches_chain_down,
    matches_chain_up,
    possible_end_links,
    size_miss_reason,
)
from graphquant.rules.pattern_syntax import PatternOp, compile_regex, parse_chain, parse_pattern

if TYPE_CHECKING:
    from graphquant.rules.rule import BoundRule, RuleSet, Selector

TensorConsumers = Iterable[tuple[TensorRef, list[Use]]]

# Find the longest of the branches that an op joins.

MAX_ANCESTORS = 256  # ops above each branch that are examined to find the common ancestor


def branch_lengths(neighbors: OpNeighbors, ends: list[TensorRef]) -> list[int]:
    """Return the distance of each of `ends` from the nearest op that all are computed from, 0 if there is none."""
    ancestors = [_ancestor_distances(neighbors, end) for end in ends]
    common = set(ancestors[0]).intersection(*ancestors[1:])
    # The order of the first branch decides between ancestors that are equally near.
    candidates = (op for op in ancestors[0] if op in common)
    nearest = min(candidates, key=lambda op: sum(distances[op] for distances in ancestors), default=None)
    return [0 if nearest is None else distances[nearest] for distances in ancestors]


def _ancestor_distances(neighbors: OpNeighbors, end: TensorRef) -> dict[tuple[str, str], int]:
    """Return the nearest `MAX_ANCESTORS` ops that `end` is computed from, with the smallest number of steps to each."""
    distances = {(end.graph, end.op): 0}
    queue = [(end.graph, end.op)]
    for current in queue:
        for source in neighbors.model.graphs[current[0]].slots(current[1]):
            if len(distances) >= MAX_ANCESTORS:
                return distances
            if source is None or source[:2] in distances or neighbors.parameters.is_parameter(source):
                continue
            distances[source.graph, source.op] = distances[current] + 1
            queue.append((source.graph, source.op))
    return distances


# Match names in rules, and check that they occur in the model.


LIST_NAMES_HINT = " List the names with: graphquant inspect MODEL --format graph-json."


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


def removed_name_hint(source: Model, prepared: Model, pattern: str) -> str:
    """Return a sentence on the op that took over a removed op that `pattern` matches in the source; "" if none did.

    Preparation removes ops, such as a BatchNorm that is folded, and replaces the weights that they change.
    """

    def source_of_removed_op(tensor: TensorRef) -> TensorRef | None:
        slots = [] if _contains_op(prepared, tensor) else source.graphs[tensor.graph].slots(tensor.op)
        return slots[0] if slots else None

    def reader_of_removed_op(tensor: TensorRef) -> TensorRef | None:
        uses = [] if _contains_op(prepared, tensor) else source.graphs[tensor.graph].consumers(tensor)
        return TensorRef(uses[0].graph, uses[0].op) if uses else None

    def has_new_type(tensor: TensorRef) -> bool:
        return _contains_op(prepared, tensor) and prepared.op(tensor).type != source.op(tensor).type

    for graph, op in source.reachable_ops():
        tensors = [TensorRef(graph.name, op.name, port) for port in range(len(op.outputs))]
        labels = [name for tensor in tensors for name in tensor_selector_names(source, tensor)]
        if name_matches(pattern, *labels) and not _contains_op(prepared, tensors[0]):
            starts = [tensors[0], *(TensorRef(use.graph, use.op) for use in graph.consumers(tensors[0]))]
            # An op that was joined with others is part of the one behind it; a folded one, of the one before it.
            joined = follow_to_end(tensors[0], reader_of_removed_op)
            folded = [follow_to_end(start, source_of_removed_op) for start in starts]
            for replacement in (*((joined,) if has_new_type(joined) else ()), *folded):
                if _contains_op(prepared, replacement):
                    return f" Preparation removes {op.name!r} and folds it into {replacement.op!r}. Use that name."
    return ""


def _contains_op(model: Model, tensor: TensorRef) -> bool:
    """Return True if `model` has an op with the name and graph of that which computes `tensor`."""
    return tensor.op in model.graphs.get(tensor.graph, ())


def all_producer_names(model: Model) -> Iterator[str]:
    """Yield every name that a producer's selector can match, in the reachable graphs."""
    for graph, op in model.reachable_ops():
        for port in range(len(op.outputs)):
            yield from filter(None, tensor_selector_names(model, TensorRef(graph.name, op.name, port)))


def all_consumer_names(model: Model) -> Iterator[str]:
    """Yield every name that a consumer's selector can match, in the reachable graphs."""
    for graph, op in model.reachable_ops():
        yield from op_selector_names(graph.name, op.name)


def check_name_selectors(model: Model, ruleset: RuleSet, tensors: Callable[[], TensorConsumers]) -> None:
    """Check that each name selector of a rule that is not optional matches one of the `tensors` that rules apply to."""
    required = [rule for rule in ruleset.rules if not rule.rule.optional]
    for side, names_of in (("producer", all_producer_names), ("consumer", all_consumer_names)):
        selected = [(rule, pattern) for rule in required if (pattern := getattr(rule.rule, side).name) is not None]
        names = list(dict.fromkeys(names_of(model))) if selected else []
        for rule, pattern in selected:
            if not name_matches(pattern, *names):
                raise UsageError(
                    f"{rule.file}:{rule.line}: rule {rule.rule.name!r}: the {side} name {pattern!r} matches nothing"
                    " in the model."
                    f"{did_you_mean(pattern, names) or LIST_NAMES_HINT}"
                    " If it may be absent, set optional = true."
                )
    for rule in required:
        if rule.rule.producer.name and rule.rule.consumer.name:
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


class RuleMatch(NamedTuple):
    """A rule that matches one use of a tensor."""

    tensor: TensorRef
    use: Use
    rule: BoundRule
    producer: TensorRef  # the tensor that Casts convert to `tensor`, `tensor` itself if there are none


class RuleMiss(NamedTuple):
    """A rule that does not match one use."""

    rule: BoundRule
    reason: str  # the first condition that failed; "" if an earlier rule claimed the use
    # Closeness of the match from 0 to 4. Producer and consumer each count 2 if they match, and 1 if only sizes and
    # similar conditions failed or the rule does not name an op.
    closeness: int


class RuleMatcher:
    """Matches the rules of `ruleset` against `model`, which must not be edited meanwhile."""

    def __init__(self, model: Model, ruleset: RuleSet) -> None:
        """Check the name selectors. Raise a UsageError if that of a rule that is not optional matches nothing."""
        self.model, self.ruleset = model, ruleset
        self.neighbors = OpNeighbors(model)
        self.parameters = self.neighbors.parameters
        self._rules_by_ends: dict[tuple[str, ...], list[BoundRule]] = {}
        self._impossible_rules: set[int] = set()  # those whose pattern matches nowhere in the model
        self._pattern_matches: dict[tuple[PatternOp, ...], dict[str, set[tuple[str, str]]]] = {}
        self._ops_by_reference: dict[tuple[int, str], set[tuple[str, str]]] = {}
        self._claimed_uses: dict[tuple[int, str, str], frozenset[Use]] = {}
        self._longest_path_uses: dict[tuple[int, str, str], Use | None] = {}
        self._rules_by_name = {(rule.file, rule.rule.name): rule for rule in ruleset.rules}
        check_name_selectors(model, ruleset, self.tensors)

    def matches(self) -> Iterator[RuleMatch]:
        """Yield the first rule that matches for each use of a float tensor, in the order of the model.

        Raises a UsageError if a pattern has too many possible matches in the model.
        """
        for tensor, uses in self.tensors():
            producer_misses: dict[int, str] = {}  # a tensor may have very many uses
            for use in uses:
                for rule in self._candidate_rules(tensor, use):
                    if id(rule) not in producer_misses:
                        producer_misses[id(rule)] = self._producer_miss_reason(rule, tensor)
                    if not producer_misses[id(rule)] and not self._consumer_miss_reason(rule, tensor, use):
                        producer = self.neighbors.before_casts(tensor)
                        yield RuleMatch(tensor=tensor, use=use, rule=rule, producer=producer)
                        break

    def _candidate_rules(self, tensor: TensorRef, use: Use) -> list[BoundRule]:
        """Return the rules that ops of these kinds and types may match: few, as most rules name kinds or a pattern."""
        reader, tensor = TensorRef(use.graph, use.op), self.neighbors.before_casts(tensor)
        producer_op, reader_op = self.model.op(tensor), self.model.op(reader)
        role = "parameter" if self.parameters.is_parameter(tensor) else ""
        key = (producer_op.kind, producer_op.type, role, reader_op.kind, reader_op.type)
        if key not in self._rules_by_ends:
            self._rules_by_ends[key] = [
                rule
                for rule in self.ruleset.rules
                if id(rule) not in self._impossible_rules
                and self._may_be_in_chain(rule.rule.producer.kind, tensor, last=True)
                and self._may_be_in_chain(rule.rule.consumer.kind, reader, last=False)
                and _has_type(rule.rule.producer, producer_op)
                and _has_type(rule.rule.consumer, reader_op)
            ]
        return self._rules_by_ends[key]

    def _may_be_in_chain(self, chain: str | None, tensor: TensorRef, *, last: bool) -> bool:
        """Return True if an op of that kind may be the last one, or the first one, of a chain."""
        ignored = frozenset[str]() if last else {"parameter"}  # a consumer is no parameter
        return chain is None or any(
            self.neighbors.has_position(link.kinds) or self.neighbors.is_kind(link.kinds - ignored, tensor)
            for link in possible_end_links(chain, last=last)
        )

    def miss_reason(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        """Return the reason why `rule` does not match `use` of `tensor`, "" if it matches."""
        return self._producer_miss_reason(rule, tensor) or self._consumer_miss_reason(rule, tensor, use)

    def evaluate_rule(self, rule: BoundRule, tensor: TensorRef, use: Use) -> RuleMiss:
        """Return the reason why `rule` does not match `use` of `tensor`, and how close it comes."""
        closeness = 0
        reasons = (self._producer_miss_reason(rule, tensor), self._consumer_miss_reason(rule, tensor, use))
        sides = ((rule.rule.producer, None), (rule.rule.consumer, use))
        for (selector, reading_use), reason in zip(sides, reasons, strict=True):
            if not self._op_mismatch(rule, tensor, reading_use):
                closeness += 1 if reason or not _identifies_op(selector) else 2
        return RuleMiss(rule=rule, reason=next(filter(None, reasons), ""), closeness=closeness)

    def tensors(self) -> Iterator[tuple[TensorRef, list[Use]]]:
        """Yield each float tensor that the outputs need, or one of unknown dtype, with the consumers that they need."""
        needed_ops = self.model.needed_ops()
        for graph, op in self.model.reachable_ops():
            if op.name not in needed_ops.get(graph.name, ()):
                continue
            readers = self.neighbors.consumers_by_port(graph, op.name)
            for port, output in enumerate(op.outputs):
                uses = [use for use in readers.get(port, ()) if use.op in needed_ops.get(use.graph, ())]
                if uses and (output.dtype is None or output.dtype in FLOAT_TYPES):
                    yield TensorRef(graph.name, op.name, port), uses

    def shape(self, tensor: TensorRef) -> Shape | None:
        """Return the static shape of `tensor`; a parameter's also from the variable or argument behind it."""
        return self.neighbors.parameters.shape(tensor)

    def labels(self, tensor: TensorRef) -> tuple[str, ...]:
        """Return the names by which a producer's selector may refer to `tensor`."""
        return tensor_selector_names(self.model, tensor)

    def all_labels(self) -> list[str]:
        """Return every name that a selector can match, in the reachable graphs."""
        return list(dict.fromkeys((*all_producer_names(self.model), *all_consumer_names(self.model))))

    def _producer_miss_reason(self, rule: BoundRule, tensor: TensorRef) -> str:
        selector, reason = rule.rule.producer, self._op_mismatch(rule, tensor, None)
        if not reason and selector.readers is not None:
            count = self.neighbors.reader_count(self.neighbors.before_casts(tensor))
            reason = "" if count == selector.readers else f"{tensor} has {count} consumers, not {selector.readers}"
        reason = reason or attribute_miss_reason(selector, self.model.op(self.neighbors.before_casts(tensor)))
        reason = reason or size_miss_reason(self.neighbors, selector, tensor, None)
        return f"producer {reason}" if reason else ""

    def _op_mismatch(self, rule: BoundRule, tensor: TensorRef, use: Use | None) -> str:
        """Return why the op that reads at `use`, or without it the one that produces `tensor`, is not the rule's op."""
        selector = rule.rule.producer if use is None else rule.rule.consumer
        producer = self.neighbors.before_casts(tensor)
        graph, name = (producer.graph, producer.op) if use is None else (use.graph, use.op)
        op, neighbors = self.model.graphs[graph].op(name), self.neighbors
        if selector.kind is not None:
            links = parse_chain(selector.kind)
            is_chain = (
                matches_chain_up(neighbors, links, producer)
                if use is None
                else matches_chain_down(neighbors, links, use)
            )
            if not is_chain:
                is_weight = use is None and self.parameters.is_parameter(producer)
                return f"{name} is {'a parameter' if is_weight else repr(op.kind)}, not {selector.kind!r}"
        if selector.name is not None:
            names = (*self.labels(tensor), *self.labels(producer))
            labels = names if use is None else op_selector_names(graph, name)
            if not name_matches(selector.name, *labels):
                return f"{tensor if use is None else name} does not match the name {selector.name!r}"
        if selector.pattern is not None and (graph, name) not in self._ops_in_pattern(rule, selector.pattern):
            return f"{name} is not {selector.pattern!r} of that pattern"
        if selector.feeds is not None and not self._feeds_pattern(rule, selector.feeds, tensor, use):
            return f"{tensor if use is None else name} does not only feed {selector.feeds!r}"
        if not _has_type(selector, op):
            return f"{name} is of type {op.type!r}, not {selector.type!r}"
        return ""

    def _consumer_miss_reason(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        selector, op = rule.rule.consumer, self.model.graphs[use.graph].op(use.op)
        reason = self._op_mismatch(rule, tensor, use)
        if self.neighbors.is_float_cast(TensorRef(use.graph, use.op)) and not _identifies_op(selector):
            reason = f"{use.op} only converts the type, so the rule applies to its consumers"
        if not reason and selector.input is not None and op.role(use.slot) not in selector.input.split("|"):
            reason = f"{use} reads it as {op.role(use.slot)!r}, not as {selector.input!r}"
        reason = reason or attribute_miss_reason(selector, op)
        reason = reason or size_miss_reason(self.neighbors, selector, tensor, use)
        reason = reason or self._inputs_miss_reason(rule, use)
        return f"consumer {reason}" if reason else ""

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
            others = [candidate for candidate in self.ruleset.rules if candidate.rule.consumer.sibling_rule is None]
            self._claimed_uses[key] = frozenset(
                operand_use
                for tensor, operand_use in self.neighbors.inputs(use)
                if next((other for other in others if not self.miss_reason(other, tensor, operand_use)), None) is rule
            )
        return self._claimed_uses[key]

    def _longest_path_use(self, rule: BoundRule, use: Use) -> Use | None:
        """Return the use at the end of the longest path into the op of `use`, None without two paths."""
        key = (id(rule), use.graph, use.op)
        if key not in self._longest_path_uses:
            inputs = self.neighbors.inputs(use)
            data = [(tensor, end) for tensor, end in inputs if not self.parameters.is_parameter(tensor)]
            candidates = [(tensor, end) for tensor, end in data if not self._producer_miss_reason(rule, tensor)]
            self._longest_path_uses[key] = None
            if len(data) > 1 and candidates:
                lengths = branch_lengths(self.neighbors, [tensor for tensor, _ in candidates])
                self._longest_path_uses[key] = candidates[lengths.index(max(lengths))][1]
        return self._longest_path_uses[key]

    def _feeds_pattern(self, rule: BoundRule, reference: str, tensor: TensorRef, use: Use | None) -> bool:
        """Return True if the pattern's ops are the only consumers of `tensor`, or of the outputs of the op of `use`."""
        ops, seen = self._ops_in_pattern(rule, reference), set[tuple[str, str]]()
        pending = [tensor] if use is None else self._outputs((use.graph, use.op))
        for current in pending if ops else ():
            others = {(graph, op) for graph, op, _ in self.neighbors.consumers(current)} - ops - seen
            others = {op_key for op_key in others if self.model.op(TensorRef(*op_key)).kind != "shape"}
            seen |= others
            if len(seen) > MAX_ANCESTORS or not all(map(self._moves_values, others)):
                return False
            pending += [output for op_key in sorted(others) for output in self._outputs(op_key)]
        return bool(ops and pending)

    def _outputs(self, op_key: tuple[str, str]) -> list[TensorRef]:
        """Return the outputs of an op that have consumers."""
        consumers = self.neighbors.consumers_by_port(self.model.graphs[op_key[0]], op_key[1])
        return [TensorRef(*op_key, port) for port in sorted(consumers)]

    def _moves_values(self, op_key: tuple[str, str]) -> bool:
        """Return True if an op moves or adds values, or scales and shifts them by parameters."""
        graph = self.model.graphs[op_key[0]]
        kind, slots = graph.op(op_key[1]).kind, graph.slots(op_key[1])
        computed = [slot for slot in slots if slot is not None and not self.parameters.is_parameter(slot)]
        # The parts of a complex product are sums of two products.
        return kind in VALUE_MOVING_KINDS | {"add", "sub"} or (kind in AFFINE_KINDS and len(computed) == 1)

    def _ops_in_pattern(self, rule: BoundRule, reference: str) -> set[tuple[str, str]]:
        """Return (graph, op) of every op that has one of the named roles in a match of its pattern.

        A rule for which there is none is not examined again: most rules name a pattern, and few occur in a model.
        """
        key = (id(rule.patterns), reference)
        if key not in self._ops_by_reference:
            self._ops_by_reference[key] = set()
            for name, _, op_name in (part.partition(".") for part in reference.split("|")):
                pattern_ops = parse_pattern(rule.patterns[name].ops)
                if pattern_ops not in self._pattern_matches:
                    self._pattern_matches[pattern_ops] = find_pattern(self.neighbors, name, pattern_ops)
                matches = self._pattern_matches[pattern_ops]
                self._ops_by_reference[key] |= matches[op_name or pattern_ops[-1].name]
        if not self._ops_by_reference[key] and id(rule) not in self._impossible_rules:
            self._impossible_rules.add(id(rule))
            self._rules_by_ends.clear()
        return self._ops_by_reference[key]


def _has_type(selector: Selector, op: Op) -> bool:
    """Return True if a selector names no op type, or that of `op`."""
    return selector.type is None or op.type in selector.type.split("|")


def _identifies_op(selector: Selector) -> bool:
    """Return True if a selector names particular ops; any weight is not particular."""
    return selector.kind not in {None, "parameter"} or any((selector.name, selector.pattern, selector.type))
