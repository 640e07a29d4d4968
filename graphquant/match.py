"""Rules against a model: which uses each rule claims, and why the others do not match.

Every condition of a selector looks at one op (a chain or pattern at a few neighbours), and each answer is remembered,
so matching costs rules x ops, whatever the fan-out.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import FLOAT_TYPES, Graph, Model, Op, Parameters, Shape, TensorRef, Use
from graphquant.ruleset import BoundRule, Link, PatternOp, RuleSet, Selector, parse_chain, parse_pattern

COMMUTATIVE = frozenset({"add", "mul", "max", "min"})
"""Kinds whose operands a pattern tries in both orders."""

PASSES = frozenset({"identity", "dropout"})
"""Kinds that a chain looks through, since they compute nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A rule that holds for one use of a tensor."""

    tensor: TensorRef
    use: Use
    rule: BoundRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A rule that does not hold for one use, with the first condition that failed; "" if another rule was first."""

    rule: BoundRule
    reason: str


class Matcher:
    """Matches the rules of `ruleset` against `model`, which must not be edited meanwhile."""

    def __init__(self, model: Model, ruleset: RuleSet) -> None:
        """Checks the name selectors.

        Raises:
            UsageError: A name selector of a rule that is not optional matches nothing.
        """
        self.model = model
        self.ruleset = ruleset
        self.parameters = Parameters(model)
        self._readers: dict[tuple[str, str], dict[int, list[Use]]] = {}
        self._producers: dict[tuple[int, TensorRef], str] = {}
        self._consumers: dict[tuple[int, str, str], str] = {}
        self._patterns: dict[tuple[int, str], dict[str, set[tuple[str, str]]]] = {}
        self._check_names()

    # -- the two questions -----------------------------------------------------------------------

    def matches(self) -> Iterator[Match]:
        """For each use of a float tensor in a live graph the first rule that holds, in the order of the model."""
        for tensor, uses in self.tensors():
            for use in uses:
                for rule in self.ruleset.rules:
                    if not self.miss(rule, tensor, use):
                        yield Match(tensor=tensor, use=use, rule=rule)
                        break

    def tensors(self) -> Iterator[tuple[TensorRef, list[Use]]]:
        """Each float tensor of the live graphs with its consumers."""
        for name in self.model.live():
            graph = self.model.graphs[name]
            for op in graph.ops():
                readers = self.readers(graph, op.name)
                for port, output in enumerate(op.outputs):
                    if port in readers and (output.dtype is None or output.dtype in FLOAT_TYPES):
                        yield TensorRef(name, op.name, port), readers[port]

    def readers(self, graph: Graph, op: str) -> dict[int, list[Use]]:
        """The consumers of each output of `op`, remembered."""
        key = (graph.name, op)
        if key not in self._readers:
            self._readers[key] = graph.readers(op)
        return self._readers[key]

    def miss(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        """Why `rule` does not hold for `use` reading `tensor`; "" if it holds."""
        key = (id(rule), tensor)
        if key not in self._producers:
            self._producers[key] = self._producer_miss(rule, tensor)
        return self._producers[key] or self._consumer_miss(rule, tensor, use)

    # -- selectors -------------------------------------------------------------------------------

    def _producer_miss(self, rule: BoundRule, tensor: TensorRef) -> str:
        selector, op = rule.rule.producer, self.model.op(tensor)
        if selector.kind is not None:
            reason = self._producer_kind_miss(selector.kind, tensor)
            if reason:
                return f"producer {reason}"
        if selector.name is not None and not name_matches(selector.name, *self._labels(tensor, op)):
            return f"producer {tensor} is not called {selector.name!r}"
        if selector.pattern is not None and (tensor.graph, tensor.op) not in self._pattern(rule, selector.pattern):
            return f"producer {op.name} is not {selector.pattern!r} of that pattern"
        if selector.readers is not None and len(self._outer_readers(tensor)) != selector.readers:
            return f"producer {tensor} has {len(self._outer_readers(tensor))} readers, not {selector.readers}"
        reason = self._op_miss(selector, op) or self._size_miss(selector, tensor, None)
        return f"producer {reason}" if reason else ""

    def _consumer_miss(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        selector = rule.rule.consumer
        key = (id(rule), use.graph, use.op)
        if key not in self._consumers:
            self._consumers[key] = self._consumer_op_miss(rule, use)
        if self._consumers[key]:
            return self._consumers[key]
        op = self.model.graphs[use.graph].op(use.op)
        if selector.input is not None and op.role(use.slot) not in selector.input.split("|"):
            return f"consumer {use} reads it as {op.role(use.slot)!r}, not as {selector.input!r}"
        reason = self._size_miss(selector, tensor, op)
        return f"consumer {reason}" if reason else ""

    def _consumer_op_miss(self, rule: BoundRule, use: Use) -> str:
        selector, op = rule.rule.consumer, self.model.graphs[use.graph].op(use.op)
        if selector.kind is not None and not self._chain_down(parse_chain(selector.kind), use.graph, use.op):
            return f"consumer {op.name} is {op.kind!r}, not {selector.kind!r}"
        if selector.name is not None and not name_matches(selector.name, op.name, str(use)):
            return f"consumer {op.name} is not called {selector.name!r}"
        if selector.pattern is not None and (use.graph, use.op) not in self._pattern(rule, selector.pattern):
            return f"consumer {op.name} is not {selector.pattern!r} of that pattern"
        reason = self._op_miss(selector, op)
        return f"consumer {reason}" if reason else ""

    @staticmethod
    def _op_miss(selector: Selector, op: Op) -> str:
        if selector.type is not None and op.type not in selector.type.split("|"):
            return f"{op.name} is of type {op.type!r}, not {selector.type!r}"
        for name, wanted in selector.attr.items():
            given = _plain(op.attrs.get(name))
            if given != wanted and not (isinstance(wanted, list) and given in wanted):
                return f"{op.name} has {name} = {given!r}, not {wanted!r}"
        return ""

    def shape(self, tensor: TensorRef) -> Shape | None:
        """The static shape of `tensor`; a parameter's also from the variable or argument behind it."""
        shape: Shape | None = self.model.output(tensor).shape
        if shape is None and self.parameters.is_parameter(tensor):
            shape = self.model.output(self.parameters.origin(tensor)).shape
        return shape

    def _size_miss(self, selector: Selector, tensor: TensorRef, consumer: Op | None) -> str:
        """Which condition on sizes fails; one on a size that is not known does."""
        shape = self.shape(tensor)
        axis = None if consumer is None else consumer.channel_axis
        sizes = {
            "axes": None if shape is None else len(shape),
            "elements": None if shape is None or None in shape else math.prod(side or 0 for side in shape),
            "channels": shape[axis] if axis is not None and shape and -len(shape) <= axis < len(shape) else None,
        }
        bounds = (
            ("axes", selector.min_rank, selector.max_rank),
            ("elements", selector.min_size, selector.max_size),
            ("channels", selector.min_channels, selector.max_channels),
        )
        for what, least, most in bounds:
            size = sizes[what]
            if least is not None and (size is None or size < least):
                return f"{tensor} has {'an unknown number of' if size is None else size} {what}, not at least {least}"
            if most is not None and (size is None or size > most):
                return f"{tensor} has {'an unknown number of' if size is None else size} {what}, not at most {most}"
        return ""

    def _producer_kind_miss(self, kind: str, tensor: TensorRef) -> str:
        links = parse_chain(kind)
        op = self.model.op(tensor)
        if len(links) == 1 and "parameter" in links[0].kinds and self.parameters.is_parameter(tensor):
            return ""
        if self._chain_up(links, tensor):
            return ""
        if self.parameters.is_parameter(tensor):
            return f"{op.name} is a parameter, not {kind!r}"
        return f"{op.name} is {op.kind!r}, not {kind!r}"

    # -- chains ----------------------------------------------------------------------------------

    def _chain_up(self, links: tuple[Link, ...], tensor: TensorRef) -> bool:
        """Whether the ops that lead to `tensor` are the chain; every tensor inside it has one reader."""
        here: TensorRef | None = tensor
        index = len(links) - 1
        first = True
        while here is not None and index >= 0:
            if not first and len(self._outer_readers(here)) != 1:
                break
            op = self.model.op(here)
            found = self._fit(links, index, op, here)
            if found is None:
                if op.kind in PASSES and not first:
                    here = self._input(here)
                    continue
                break
            index, first = found - 1, False
            here = self._input(here) if index >= 0 else None
        return index < 0 or (not first and all(link.optional for link in links[: index + 1]))

    def _fit(self, links: tuple[Link, ...], index: int, op: Op, tensor: TensorRef | None) -> int | None:
        """The link at or before `index` that `op` fits, passing over optional ones; None if none."""
        while index >= 0:
            if self._is_kind(links[index].kinds, op, tensor):
                return index
            if not links[index].optional:
                return None
            index -= 1
        return None

    def _chain_down(self, links: tuple[Link, ...], graph: str, name: str) -> bool:
        """Whether the op and its sole readers are the chain."""
        index = 0
        here: str | None = name
        while index < len(links):
            op = self.model.graphs[graph].op(here) if here is not None else None
            if op is not None and self._is_kind(links[index].kinds, op, None):
                here = self._sole_reader(graph, op.name)
                index += 1
            elif links[index].optional:
                index += 1
            else:
                return False
        return True

    def _sole_reader(self, graph: str, name: str) -> str | None:
        readers = self._outer_readers(TensorRef(graph, name, 0))
        return readers[0].op if len(readers) == 1 and readers[0].graph == graph else None

    def _is_kind(self, kinds: frozenset[str], op: Op, tensor: TensorRef | None) -> bool:
        if op.kind in kinds or "*" in kinds:
            return True
        return "parameter" in kinds and tensor is not None and self.parameters.is_parameter(tensor)

    def _outer_readers(self, tensor: TensorRef) -> list[Use]:
        return self.readers(self.model.graphs[tensor.graph], tensor.op).get(tensor.port, [])

    def _input(self, tensor: TensorRef) -> TensorRef | None:
        """What the op of `tensor` computes on: its first input that is no parameter, else its first."""
        slots = self.model.graphs[tensor.graph].slots(tensor.op)
        filled = [slot for slot in slots if slot is not None]
        return next((slot for slot in filled if not self.parameters.is_parameter(slot)), filled[0] if filled else None)

    # -- patterns --------------------------------------------------------------------------------

    def _pattern(self, rule: BoundRule, text: str) -> set[tuple[str, str]]:
        """(graph, op) of every op that plays the named part in a match of the pattern."""
        name, _, part = text.partition(".")
        key = (id(rule.patterns), name)
        if key not in self._patterns:
            self._patterns[key] = self._find_pattern(parse_pattern(rule.patterns[name].ops))
        ops = parse_pattern(rule.patterns[name].ops)
        return self._patterns[key][part or ops[-1].name]

    def _find_pattern(self, pattern: tuple[PatternOp, ...]) -> dict[str, set[tuple[str, str]]]:
        found: dict[str, set[tuple[str, str]]] = {op.name: set() for op in pattern}
        by_name = {op.name: op for op in pattern}
        for graph_name in self.model.live():
            graph = self.model.graphs[graph_name]
            for op in graph.ops():
                if op.kind in pattern[-1].kinds or "*" in pattern[-1].kinds:
                    bound: dict[str, Any] = {}
                    if self._bind(by_name, pattern[-1], TensorRef(graph_name, op.name), bound):
                        for part in pattern:
                            found[part.name].add((graph_name, bound[part.name].op))
        return found

    def _bind(self, pattern: dict[str, PatternOp], part: PatternOp, tensor: TensorRef, bound: dict[str, Any]) -> bool:
        """Tries to bind `part` to the op of `tensor`, and what it reads; `bound` grows only on success."""
        if part.name in bound:
            return bool(bound[part.name] == tensor)
        op = self.model.op(tensor)
        if not self._is_kind(part.kinds, op, tensor):
            return False
        slots = self.model.graphs[tensor.graph].slots(tensor.op)
        operands = part.operands
        if len([slot for slot in slots if slot is not None]) < len(operands):
            return False
        orders = [operands]
        if op.kind in COMMUTATIVE and len(operands) == 2:  # noqa: PLR2004  # two operands can be swapped
            orders.append(operands[::-1])
        for order in orders:
            trial = {**bound, part.name: tensor}
            if all(self._bind_operand(pattern, name, slot, trial) for name, slot in zip(order, slots, strict=False)):
                bound.update(trial)
                return True
        return False

    def _bind_operand(self, pattern: dict[str, PatternOp], name: str, slot: TensorRef | None, bound: dict[str, Any]) -> bool:
        if slot is None:
            return False
        if name in pattern:
            return self._bind(pattern, pattern[name], slot, bound)
        if name == "_":
            return True
        if name in bound:
            return bool(bound[name] == slot)
        bound[name] = slot
        return True

    # -- names -----------------------------------------------------------------------------------

    def _labels(self, tensor: TensorRef, op: Op) -> tuple[str, ...]:
        output = op.outputs[tensor.port].name
        return (output, f"{op.name}:{tensor.port}", str(tensor), *((op.name,) if tensor.port == 0 else ()))

    def _check_names(self) -> None:
        selectors = [
            (rule, side, selector.name)
            for rule in self.ruleset.rules
            if not rule.rule.optional
            for side, selector in (("producer", rule.rule.producer), ("consumer", rule.rule.consumer))
            if selector.name is not None
        ]
        if not selectors:
            return
        labels = self.all_labels()
        for rule, side, pattern in selectors:
            if not any(name_matches(pattern, label) for label in labels):
                raise UsageError(
                    f"{rule.file}:{rule.line}: rule {rule.rule.name!r}: the {side} name {pattern!r} matches nothing in the model."
                    f"{did_you_mean(pattern, labels) or ' Names are listed by: graphquant inspect MODEL.'}"
                    " If it may be absent, say optional = true."
                )

    def all_labels(self) -> list[str]:
        """Every name that a selector can match, in the live graphs."""
        labels: dict[str, None] = {}
        for name in self.model.live():
            for op in self.model.graphs[name].ops():
                labels[op.name] = None
                for port, output in enumerate(op.outputs):
                    labels.update({label: None for label in (output.name, f"{op.name}:{port}") if label})
        return list(labels)


def name_matches(pattern: str, *names: str) -> bool:
    """Whether one of `names` matches a glob, or a regex between slashes anywhere in the name."""
    found = _compiled(pattern)
    return any(name and found.search(name) for name in names)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > 1 and pattern[0] == pattern[-1] == "/":
        return re.compile(pattern[1:-1])
    return re.compile(rf"\A(?:{fnmatch.translate(pattern)})")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, tuple):
        value = list(value)
    return value
