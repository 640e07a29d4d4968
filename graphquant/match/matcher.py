"""Rules against a model: which uses each rule claims, and why the others do not match.

A producer's conditions are tried once per tensor, a consumer's once per use, and each looks at one op and, for a chain
or pattern, at a bounded number of neighbours: matching costs rules x (ops + edges), whatever the fan-out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.ir import FLOAT_TYPES, Model, Shape, TensorRef, Use
from graphquant.match.around import Around
from graphquant.match.branches import lengths
from graphquant.match.chains import chain_down, chain_up, last_links, links_of
from graphquant.match.names import check_names, consumer_labels, name_matches, op_labels, producer_labels, tensor_labels
from graphquant.match.patterns import find_pattern, parts_of
from graphquant.match.sizes import attribute_miss, size_miss, type_miss

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.ruleset import BoundRule, PatternOp, RuleSet, Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A rule that holds for one use of a tensor."""

    tensor: TensorRef
    use: Use
    rule: BoundRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A rule that does not hold for one use.

    Attributes:
        rule: The rule.
        reason: The first condition that failed; "" if another rule was first.
        near: How close it came, 0 to 4: for the producer and the consumer 2 each if it is all that the rule wants, 1 if
            it is that but for sizes and the like, or the rule does not say of which ops it is.
    """

    rule: BoundRule
    reason: str
    near: int = 0


class Matcher:
    """Matches the rules of `ruleset` against `model`, which must not be edited meanwhile."""

    def __init__(self, model: Model, ruleset: RuleSet) -> None:
        """Checks the name selectors.

        Raises:
            UsageError: A name selector of a rule that is not optional matches nothing.
        """
        self.model = model
        self.ruleset = ruleset
        self.around = Around(model)
        self.parameters = self.around.parameters
        self._fitting: dict[tuple[str, bool], list[BoundRule]] = {}
        self._patterns: dict[tuple[PatternOp, ...], dict[str, set[tuple[str, str]]]] = {}
        self._parts: dict[tuple[int, str], set[tuple[str, str]]] = {}
        self._claimed: dict[tuple[int, str, str], frozenset[Use]] = {}
        self._longest: dict[tuple[int, str, str], Use | None] = {}
        self._named = {(rule.file, rule.rule.name): rule for rule in ruleset.rules}
        check_names(model, ruleset, self.tensors)

    # -- the two questions -----------------------------------------------------------------------

    def matches(self) -> Iterator[Match]:
        """For each use of a float tensor in a live graph the first rule that holds, in the order of the model.

        Raises:
            UsageError: A pattern can be read into the model in too many ways.
        """
        for tensor, uses in self.tensors():
            place = (tensor.graph, tensor.op)
            rules = [
                rule
                for rule in self._candidates(tensor)
                if (rule.rule.producer.pattern is None or place in self._pattern(rule, rule.rule.producer.pattern))
                and not self._producer_miss(rule, tensor)
            ]
            for use in uses if rules else ():
                for rule in rules:
                    if not self._consumer_miss(rule, tensor, use):
                        yield Match(tensor=tensor, use=use, rule=rule)
                        break

    def _candidates(self, tensor: TensorRef) -> list[BoundRule]:
        """The rules whose producer may end in an op of that kind: most rules ask for a kind, and few kinds fit."""
        key = (self.model.op(tensor).kind, self.parameters.is_parameter(tensor))
        if key not in self._fitting:
            self._fitting[key] = [
                rule
                for rule in self.ruleset.rules
                if rule.rule.producer.kind is None
                or any(self.around.is_kind(link.kinds, tensor) for link in last_links(rule.rule.producer.kind))
            ]
        return self._fitting[key]

    def miss(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        """Why `rule` does not hold for `use` reading `tensor`; "" if it holds."""
        return self._producer_miss(rule, tensor) or self._consumer_miss(rule, tensor, use)

    def tried(self, rule: BoundRule, tensor: TensorRef, use: Use) -> Miss:
        """Why `rule` does not hold for `use` reading `tensor`, and how close it comes."""
        sides = (
            (rule.rule.producer, self._other_producer(rule, tensor), self._producer_miss(rule, tensor)),
            (rule.rule.consumer, self._other_consumer(rule, use), self._consumer_miss(rule, tensor, use)),
        )
        near = sum(0 if other else 1 if missed or not _tells(selector) else 2 for selector, other, missed in sides)
        return Miss(rule=rule, reason=sides[0][2] or sides[1][2], near=near)

    def tensors(self) -> Iterator[tuple[TensorRef, list[Use]]]:
        """Each float tensor of the live graphs with its consumers; one of unknown dtype may be float."""
        for name in self.model.live():
            graph = self.model.graphs[name]
            for op in graph.ops():
                readers = self.around.readers(graph, op.name)
                for port, output in enumerate(op.outputs):
                    if port in readers and (output.dtype is None or output.dtype in FLOAT_TYPES):
                        yield TensorRef(name, op.name, port), readers[port]

    def shape(self, tensor: TensorRef) -> Shape | None:
        """The static shape of `tensor`; a parameter's also from the variable or argument behind it."""
        return self.around.shape(tensor)

    def labels(self, tensor: TensorRef) -> tuple[str, ...]:
        """The names by which a producer's selector may call `tensor`."""
        return tensor_labels(self.model, tensor)

    def all_labels(self) -> list[str]:
        """Every name that a selector can match, in the live graphs."""
        return list(dict.fromkeys((*producer_labels(self.model), *consumer_labels(self.model))))

    # -- selectors -------------------------------------------------------------------------------

    def _producer_miss(self, rule: BoundRule, tensor: TensorRef) -> str:
        selector, op = rule.rule.producer, self.model.op(tensor)
        reason = self._other_producer(rule, tensor)
        if not reason and selector.readers is not None and len(self.around.uses(tensor)) != selector.readers:
            reason = f"{tensor} has {len(self.around.uses(tensor))} readers, not {selector.readers}"
        reason = reason or attribute_miss(selector, op) or size_miss(self.around, selector, tensor, None)
        return f"producer {reason}" if reason else ""

    def _other_producer(self, rule: BoundRule, tensor: TensorRef) -> str:
        """Why another op makes `tensor` than `rule` is about; "" if it is that."""
        selector, op = rule.rule.producer, self.model.op(tensor)
        if selector.kind is not None and not chain_up(self.around, links_of(selector.kind), tensor):
            what = "a parameter" if self.parameters.is_parameter(tensor) else repr(op.kind)
            return f"{op.name} is {what}, not {selector.kind!r}"
        if selector.name is not None and not name_matches(selector.name, *self.labels(tensor)):
            return f"{tensor} is not called {selector.name!r}"
        if selector.pattern is not None and (tensor.graph, tensor.op) not in self._pattern(rule, selector.pattern):
            return f"{op.name} is not {selector.pattern!r} of that pattern"
        return type_miss(selector, op)

    def _consumer_miss(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        selector, op = rule.rule.consumer, self.model.graphs[use.graph].op(use.op)
        reason = self._other_consumer(rule, use)
        if not reason and selector.input is not None and op.role(use.slot) not in selector.input.split("|"):
            reason = f"{use} reads it as {op.role(use.slot)!r}, not as {selector.input!r}"
        reason = reason or attribute_miss(selector, op) or size_miss(self.around, selector, tensor, use)
        reason = reason or self._inputs_miss(rule, use)
        return f"consumer {reason}" if reason else ""

    def _other_consumer(self, rule: BoundRule, use: Use) -> str:
        """Why another op reads than `rule` is about; "" if it is that."""
        selector, op = rule.rule.consumer, self.model.graphs[use.graph].op(use.op)
        if selector.kind is not None and not chain_down(self.around, links_of(selector.kind), use):
            return f"{op.name} is {op.kind!r}, not {selector.kind!r}"
        if selector.name is not None and not name_matches(selector.name, *op_labels(use.graph, op.name)):
            return f"{op.name} is not called {selector.name!r}"
        if selector.pattern is not None and (use.graph, use.op) not in self._pattern(rule, selector.pattern):
            return f"{op.name} is not {selector.pattern!r} of that pattern"
        return type_miss(selector, op)

    # -- the other inputs of an op -----------------------------------------------------------------

    def _inputs_miss(self, rule: BoundRule, use: Use) -> str:
        """Which condition fails that is on all inputs of the op of `use`."""
        selector = rule.rule.consumer
        if selector.path is not None and self._at_end(rule, use) != use:
            return f"{use} is not at the end of the longest path"
        if selector.beside is not None:
            other = self._named[rule.file, selector.beside]
            if not self._claims(other, use) - {use}:
                return f"{use} is not beside an input that rule {selector.beside!r} claims"
        return ""

    def _claims(self, rule: BoundRule, use: Use) -> frozenset[Use]:
        """The uses of the op of `use` that `rule` holds for, and none before it; rules with `beside` do not count."""
        key = (id(rule), use.graph, use.op)
        if key not in self._claimed:
            rules = [one for one in self.ruleset.rules if one.rule.consumer.beside is None]
            first = {
                one: next((other for other in rules if not self.miss(other, read, one)), None)
                for read, one in self.around.inputs(use)
            }
            self._claimed[key] = frozenset(one for one, found in first.items() if found is rule)
        return self._claimed[key]

    def _at_end(self, rule: BoundRule, use: Use) -> Use | None:
        """The use of the op of `use` that is at the end of the longest path; None if there are no two to compare."""
        key = (id(rule), use.graph, use.op)
        if key not in self._longest:
            data = [(read, one) for read, one in self.around.inputs(use) if not self.parameters.is_parameter(read)]
            ends = [(read, one) for read, one in data if not self._producer_miss(rule, read)]
            if len(data) < 2 or not ends:  # noqa: PLR2004  # two paths
                self._longest[key] = None
            else:
                far = lengths(self.around, [read for read, _ in ends]) if len(ends) > 1 else [0]
                self._longest[key] = ends[far.index(max(far))][1]
        return self._longest[key]

    # -- patterns --------------------------------------------------------------------------------

    def _pattern(self, rule: BoundRule, text: str) -> set[tuple[str, str]]:
        """(graph, op) of every op that plays the named part in a match of the pattern."""
        key = (id(rule.patterns), text)
        if key not in self._parts:
            name, _, part = text.partition(".")
            parts = parts_of(rule.patterns[name].ops)
            if parts not in self._patterns:
                self._patterns[parts] = find_pattern(self.around, name, parts)
            self._parts[key] = self._patterns[parts][part or parts[-1].name]
        return self._parts[key]


def _tells(selector: Selector) -> bool:
    """Whether a selector says of which ops it is; any weight is no particular one."""
    return selector.kind not in {None, "parameter"} or any((selector.name, selector.pattern, selector.type))
