"""Rules against a model: which uses each rule claims, and why the others do not match.

A producer's conditions are tried once per tensor, a consumer's once per use, and each looks at one op and, for a chain
or pattern, at a bounded number of neighbours: matching costs rules x (ops + edges), whatever the fan-out.
"""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import (
    FLOAT_TYPES,
    Graph,
    Model,
    Op,
    Parameters,
    Shape,
    TensorRef,
    Use,
    input_channels,
    kernel_size,
    output_channels,
    rows,
)
from graphquant.ruleset import (
    ANY_PART,
    BoundRule,
    Link,
    PatternOp,
    RuleSet,
    Selector,
    compile_regex,
    parse_chain,
    parse_pattern,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COMMUTATIVE = frozenset({"add", "mul", "max", "min"})
"""Kinds whose operands a pattern tries in both orders."""

PASSES = frozenset({"identity", "dropout"})
"""Kinds that a chain looks through unless it names them, since they compute nothing."""

MAX_STEPS = 2000
"""How many operands may be tried for one match of a pattern: commuted operands of a hostile model never end."""

FARTHEST = 256
"""How many ops above each branch are looked at for the one where branches part."""

_MEASURES = {
    "channels": output_channels,
    "input channels": input_channels,
    "rows": rows,
    "sides of its kernel": kernel_size,
}
"""Sizes of an op, from the shape of its weight; its rows from that of its input."""

_links = lru_cache(maxsize=1024)(parse_chain)
_parts = lru_cache(maxsize=1024)(parse_pattern)


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
        self._fitting: dict[tuple[str, bool], list[BoundRule]] = {}
        self._readers: dict[tuple[str, str], dict[int, list[Use]]] = {}
        self._shapes: dict[TensorRef, Shape | None] = {}
        self._mains: dict[tuple[str, str], TensorRef | None] = {}
        self._ups: dict[TensorRef, TensorRef | None] = {}
        self._downs: dict[tuple[str, str], str | None] = {}
        self._patterns: dict[tuple[PatternOp, ...], dict[str, set[tuple[str, str]]]] = {}
        self._claimed: dict[tuple[int, str, str], frozenset[Use]] = {}
        self._longest: dict[tuple[int, str, str], Use | None] = {}
        self._named = {(rule.file, rule.rule.name): rule for rule in ruleset.rules}
        self._check_names()

    # -- the two questions -----------------------------------------------------------------------

    def matches(self) -> Iterator[Match]:
        """For each use of a float tensor in a live graph the first rule that holds, in the order of the model.

        Raises:
            UsageError: A pattern can be read into the model in too many ways.
        """
        for tensor, uses in self.tensors():
            rules = [rule for rule in self._candidates(tensor) if not self._producer_miss(rule, tensor)]
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
                or any(
                    self.is_kind(links[index - 1].kinds, tensor)
                    for links in (_links(rule.rule.producer.kind),)
                    for index in _after(links, len(links), -1)
                    if index
                )
            ]
        return self._fitting[key]

    def miss(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        """Why `rule` does not hold for `use` reading `tensor`; "" if it holds."""
        return self._producer_miss(rule, tensor) or self._consumer_miss(rule, tensor, use)

    def tensors(self) -> Iterator[tuple[TensorRef, list[Use]]]:
        """Each float tensor of the live graphs with its consumers; one of unknown dtype may be float."""
        for name in self.model.live():
            graph = self.model.graphs[name]
            for op in graph.ops():
                readers = self._readers_of(graph, op.name)
                for port, output in enumerate(op.outputs):
                    if port in readers and (output.dtype is None or output.dtype in FLOAT_TYPES):
                        yield TensorRef(name, op.name, port), readers[port]

    def shape(self, tensor: TensorRef) -> Shape | None:
        """The static shape of `tensor`; a parameter's also from the variable or argument behind it."""
        if tensor not in self._shapes:
            shape: Shape | None = self.model.output(tensor).shape
            if shape is None and self.parameters.is_parameter(tensor):
                shape = self.model.output(self.parameters.origin(tensor)).shape
            self._shapes[tensor] = shape
        return self._shapes[tensor]

    def labels(self, tensor: TensorRef) -> tuple[str, ...]:
        """The names by which a producer's selector may call `tensor`."""
        op = self.model.op(tensor)
        names = (op.outputs[tensor.port].name, f"{op.name}:{tensor.port}", str(tensor))
        return (*names, *_op_labels(tensor.graph, op.name)) if tensor.port == 0 else names

    def all_labels(self) -> list[str]:
        """Every name that a selector can match, in the live graphs."""
        return list(dict.fromkeys((*self._producer_labels(), *self._consumer_labels())))

    def _readers_of(self, graph: Graph, op: str) -> dict[int, list[Use]]:
        key = (graph.name, op)
        if key not in self._readers:
            self._readers[key] = graph.readers(op)
        return self._readers[key]

    def _uses(self, tensor: TensorRef) -> list[Use]:
        return self._readers_of(self.model.graphs[tensor.graph], tensor.op).get(tensor.port, [])

    # -- selectors -------------------------------------------------------------------------------

    def _producer_miss(self, rule: BoundRule, tensor: TensorRef) -> str:
        selector, op = rule.rule.producer, self.model.op(tensor)
        reason = ""
        if selector.kind is not None and not self._chain_up(_links(selector.kind), tensor):
            what = "a parameter" if self.parameters.is_parameter(tensor) else repr(op.kind)
            reason = f"{op.name} is {what}, not {selector.kind!r}"
        elif selector.name is not None and not name_matches(selector.name, *self.labels(tensor)):
            reason = f"{tensor} is not called {selector.name!r}"
        elif selector.pattern is not None and (tensor.graph, tensor.op) not in self._pattern(rule, selector.pattern):
            reason = f"{op.name} is not {selector.pattern!r} of that pattern"
        elif selector.readers is not None and len(self._uses(tensor)) != selector.readers:
            reason = f"{tensor} has {len(self._uses(tensor))} readers, not {selector.readers}"
        reason = reason or _op_miss(selector, op) or self._size_miss(selector, tensor, None)
        return f"producer {reason}" if reason else ""

    def _consumer_miss(self, rule: BoundRule, tensor: TensorRef, use: Use) -> str:
        selector, op = rule.rule.consumer, self.model.graphs[use.graph].op(use.op)
        reason = ""
        if selector.kind is not None and not self._chain_down(_links(selector.kind), use):
            reason = f"{op.name} is {op.kind!r}, not {selector.kind!r}"
        elif selector.name is not None and not name_matches(selector.name, *_op_labels(use.graph, op.name)):
            reason = f"{op.name} is not called {selector.name!r}"
        elif selector.pattern is not None and (use.graph, use.op) not in self._pattern(rule, selector.pattern):
            reason = f"{op.name} is not {selector.pattern!r} of that pattern"
        elif selector.input is not None and op.role(use.slot) not in selector.input.split("|"):
            reason = f"{use} reads it as {op.role(use.slot)!r}, not as {selector.input!r}"
        reason = reason or _op_miss(selector, op) or self._size_miss(selector, tensor, use)
        reason = reason or self._inputs_miss(rule, use)
        return f"consumer {reason}" if reason else ""

    def _size_miss(self, selector: Selector, tensor: TensorRef, use: Use | None) -> str:
        """Which condition on sizes fails; one on a size that is not known does."""
        bounds = (
            ("axes", selector.min_rank, selector.max_rank),
            ("elements", selector.min_size, selector.max_size),
            ("channels", selector.min_channels, selector.max_channels),
            ("input channels", selector.min_in_channels, selector.max_in_channels),
            ("rows", selector.min_rows, selector.max_rows),
            ("sides of its kernel", selector.min_kernel, None),
            ("groups", None, selector.max_groups),
        )
        for what, least, most in bounds:
            if least is None and most is None:
                continue
            size = self._size(what, tensor, use)
            named = tensor if use is None or what in {"axes", "elements"} else use.op
            said = f"{named} has {'an unknown number of' if size is None else size} {what}"
            if least is not None and (size is None or size < least):
                return f"{said}, not at least {least}"
            if most is not None and (size is None or size > most):
                return f"{said}, not at most {most}"
        if selector.multiple_of is not None:
            size = self._size("input channels", tensor, use)
            if size is None or size % selector.multiple_of:
                known = "an unknown number of" if size is None else size
                return f"{use.op if use else tensor} has {known} input channels, no multiple of {selector.multiple_of}"
        return ""

    def _size(self, what: str, tensor: TensorRef, use: Use | None) -> int | None:
        """A size of `tensor`, or of the op of `use`, counted in its weight. None if it is not known."""
        if what not in {"axes", "elements"}:
            return None if use is None else self._measure(what, use)
        shape = self.shape(tensor)
        if shape is None:
            return None
        if what == "axes":
            return len(shape)
        known = [side for side in shape if side is not None]
        return math.prod(known) if len(known) == len(shape) else None

    def _measure(self, what: str, use: Use) -> int | None:
        """A size of the weighted op of `use`."""
        graph = self.model.graphs[use.graph]
        op = graph.op(use.op)
        if op.channel_axis is None:
            return None
        if what == "groups":
            return int(op.number("group", 1))
        role = "input" if what == "rows" else "weight"
        read = next((read for slot, read in enumerate(graph.slots(op.name)) if read and op.role(slot) == role), None)
        shape = None if read is None else self.shape(read)
        return None if shape is None else _MEASURES[what](op, shape)

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
                for read, one in self._inputs(use)
            }
            self._claimed[key] = frozenset(one for one, found in first.items() if found is rule)
        return self._claimed[key]

    def _at_end(self, rule: BoundRule, use: Use) -> Use | None:
        """The use of the op of `use` that is at the end of the longest path; None if there are no two to compare."""
        key = (id(rule), use.graph, use.op)
        if key not in self._longest:
            data = [(read, one) for read, one in self._inputs(use) if not self.parameters.is_parameter(read)]
            ends = [(read, one) for read, one in data if not self._producer_miss(rule, read)]
            if len(data) < 2 or not ends:  # noqa: PLR2004  # two paths
                self._longest[key] = None
            else:
                lengths = self._lengths([read for read, _ in ends]) if len(ends) > 1 else [0]
                self._longest[key] = ends[lengths.index(max(lengths))][1]
        return self._longest[key]

    def _inputs(self, use: Use) -> list[tuple[TensorRef, Use]]:
        slots = enumerate(self.model.graphs[use.graph].slots(use.op))
        return [(read, Use(use.graph, use.op, slot)) for slot, read in slots if read is not None]

    def _lengths(self, ends: list[TensorRef]) -> list[int]:
        """How many ops each of `ends` is away from the nearest op that all are computed from; 0 where there is none."""
        above = [self._distances(end) for end in ends]
        common = [op for op in above[0] if all(op in other for other in above[1:])]
        if not common:
            return [0] * len(ends)
        nearest = min(common, key=lambda op: sum(other[op] for other in above))
        return [other[nearest] for other in above]

    def _distances(self, end: TensorRef) -> dict[tuple[str, str], int]:
        """The ops that `end` is computed from, the nearest `FARTHEST`, with the least number of steps to each."""
        found = {(end.graph, end.op): 0}
        queue = [(end.graph, end.op)]
        for here in queue:
            for read in self.model.graphs[here[0]].slots(here[1]):
                if len(found) >= FARTHEST:
                    return found
                if read is not None and (read.graph, read.op) not in found and not self.parameters.is_parameter(read):
                    found[read.graph, read.op] = found[here] + 1
                    queue.append((read.graph, read.op))
        return found

    # -- chains ----------------------------------------------------------------------------------

    def _chain_up(self, links: tuple[Link, ...], tensor: TensorRef) -> bool:
        """Whether the ops that lead to `tensor` are the chain; every tensor inside it has one reader."""
        if len(links) == 1:
            return self.is_kind(links[0].kinds, tensor)
        literal = _names_passes(links)
        wanted = _after(links, len(links), -1)
        here: TensorRef | None = tensor
        while here is not None and wanted and 0 not in wanted:
            found = {index - 1 for index in wanted if self.is_kind(links[index - 1].kinds, here)}
            wanted = frozenset().union(*(_after(links, index, -1) for index in found))
            here = self._above(here, literal=literal)
        return 0 in wanted

    def _chain_down(self, links: tuple[Link, ...], use: Use) -> bool:
        """Whether the op of `use` and its sole readers are the chain."""
        graph = self.model.graphs[use.graph]
        literal = _names_passes(links)
        wanted = _after(links, 0, 1)
        here: str | None = use.op
        while here is not None and wanted and len(links) not in wanted:
            kind = graph.op(here).kind
            found = {index + 1 for index in wanted if not links[index].kinds.isdisjoint((kind, "*"))}
            wanted = frozenset().union(*(_after(links, index, 1) for index in found))
            here = self._below(graph, here, literal=literal)
        return len(links) in wanted

    def is_kind(self, kinds: frozenset[str], tensor: TensorRef) -> bool:
        """Whether `kinds` name the op of `tensor`."""
        if "*" in kinds or self.model.op(tensor).kind in kinds:
            return True
        return "parameter" in kinds and self.parameters.is_parameter(tensor)

    def _above(self, tensor: TensorRef, *, literal: bool) -> TensorRef | None:
        """What the op of `tensor` computes on, if that has no other reader; beyond ops that pass it on."""
        source = self._main(tensor)
        if source is None or literal:
            return source if source is not None and len(self._uses(source)) == 1 else None
        path: list[TensorRef] = []
        while source is not None and source not in self._ups:
            self._ups[source] = None  # also ends a ring of identities
            path.append(source)
            if len(self._uses(source)) != 1:
                source = None
            elif self.model.op(source).kind not in PASSES:
                break
            else:
                source = self._main(source)
        found = source if path and source == path[-1] else None if source is None else self._ups[source]
        self._ups.update(dict.fromkeys(path, found))
        return found

    def _below(self, graph: Graph, name: str, *, literal: bool) -> str | None:
        """The op of this graph that alone reads output 0 of op `name`; beyond ops that pass it on."""
        if literal:
            return self._sole_reader(graph, name)
        path: list[str] = []
        here: str | None = name
        while here is not None and (graph.name, here) not in self._downs:
            self._downs[graph.name, here] = None
            path.append(here)
            here = self._sole_reader(graph, here)
            if here is not None and graph.op(here).kind not in PASSES:
                break
        else:
            here = None if here is None else self._downs[graph.name, here]
        self._downs.update({(graph.name, step): here for step in path})
        return here

    def _sole_reader(self, graph: Graph, name: str) -> str | None:
        readers = self._uses(TensorRef(graph.name, name))
        return readers[0].op if len(readers) == 1 and readers[0].graph == graph.name else None

    def _main(self, tensor: TensorRef) -> TensorRef | None:
        """What the op of `tensor` computes on: its first input that is no parameter, else its first."""
        key = (tensor.graph, tensor.op)
        if key not in self._mains:
            filled = [slot for slot in self.model.graphs[tensor.graph].slots(tensor.op) if slot is not None]
            computed = (slot for slot in filled if not self.parameters.is_parameter(slot))
            self._mains[key] = next(computed, filled[0] if filled else None)
        return self._mains[key]

    # -- patterns --------------------------------------------------------------------------------

    def _pattern(self, rule: BoundRule, text: str) -> set[tuple[str, str]]:
        """(graph, op) of every op that plays the named part in a match of the pattern."""
        name, _, part = text.partition(".")
        parts = _parts(rule.patterns[name].ops)
        if parts not in self._patterns:
            self._patterns[parts] = self._find_pattern(name, parts)
        return self._patterns[parts][part or parts[-1].name]

    def _find_pattern(self, name: str, parts: tuple[PatternOp, ...]) -> dict[str, set[tuple[str, str]]]:
        """For each part the ops that play it; the first match found at each op counts."""
        found: dict[str, set[tuple[str, str]]] = {part.name: set() for part in parts}
        search = _Search(self, name, parts)
        for graph in self.model.live():
            for op in self.model.graphs[graph].ops():
                bound = (search.bind(TensorRef(graph, op.name)) if op.outputs else None) or {}
                for part in parts if bound else ():
                    found[part.name].add((graph, bound[part.name].op))
        found[ANY_PART] = set().union(*found.values())
        return found

    # -- names -----------------------------------------------------------------------------------

    def _check_names(self) -> None:
        sides = (("producer", self._producer_labels), ("consumer", self._consumer_labels))
        for side, listed in sides:
            selected = [(rule, getattr(rule.rule, side).name) for rule in self.ruleset.rules if not rule.rule.optional]
            wanted = [(rule, pattern) for rule, pattern in selected if pattern is not None]
            labels = list(dict.fromkeys(listed())) if wanted else []
            for rule, pattern in wanted:
                if not name_matches(pattern, *labels):
                    raise UsageError(
                        f"{rule.file}:{rule.line}: rule {rule.rule.name!r}: the {side} name {pattern!r} matches nothing"
                        " in the model."
                        f"{did_you_mean(pattern, labels) or ' Names are listed by: graphquant inspect MODEL.'}"
                        " If it may be absent, say optional = true."
                    )
        for rule in self.ruleset.rules:
            if rule.rule.producer.name and rule.rule.consumer.name and not rule.rule.optional:
                self._check_reads(rule, rule.rule.producer.name, rule.rule.consumer.name)

    def _check_reads(self, rule: BoundRule, producer: str, consumer: str) -> None:
        """Refuses a rule whose two names match, but no op of the one name reads a tensor of the other."""
        named = [(tensor, uses) for tensor, uses in self.tensors() if name_matches(producer, *self.labels(tensor))]
        readers = dict.fromkeys(use for _, uses in named for use in uses)
        if not any(name_matches(consumer, *_op_labels(use.graph, use.op)) for use in readers):
            some = ", ".join(repr(use.op) for use in list(readers)[:5])
            raise UsageError(
                f"{rule.file}:{rule.line}: rule {rule.rule.name!r}: no op called {consumer!r} reads a float tensor"
                f" called {producer!r}.{f' Those are read by {some}.' if some else ''} If that may be, say optional ="
                " true."
            )

    def _producer_labels(self) -> Iterator[str]:
        for name in self.model.live():
            for op in self.model.graphs[name].ops():
                for port in range(len(op.outputs)):
                    yield from (label for label in self.labels(TensorRef(name, op.name, port)) if label)

    def _consumer_labels(self) -> Iterator[str]:
        for name in self.model.live():
            for op in self.model.graphs[name].ops():
                yield from _op_labels(name, op.name)


class _Search:
    """Reads the pattern `parts` into the ops above one op."""

    def __init__(self, matcher: Matcher, name: str, parts: tuple[PatternOp, ...]) -> None:
        self._matcher = matcher
        self._name = name
        self._root = parts[-1]
        self._parts = {part.name: part for part in parts}
        self._fitting: dict[tuple[str, TensorRef], bool] = {}

    def bind(self, root: TensorRef) -> dict[str, TensorRef] | None:
        """What each name of the pattern stands for if its last op is that of `root`; None if it does not match.

        Only what could fit by itself is tried, so that operands are tried again only where a name occurs twice.

        Raises:
            UsageError: There are more ways to try than `MAX_STEPS`.
        """
        stack: list[tuple[tuple[tuple[str, TensorRef], ...], dict[str, TensorRef]]] = [(((self._root.name, root),), {})]
        steps = 0
        while stack:
            goals, bound = stack.pop()
            steps += 1
            if not goals:
                return bound
            if steps > MAX_STEPS:
                raise UsageError(
                    f"The pattern {self._name!r} can be read into the ops above {root} in too many ways. Give its"
                    " operands distinct kinds, or leave out names that occur twice."
                )
            (name, tensor), rest = goals[0], goals[1:]
            if name == "_" or bound.get(name) == tensor:
                stack.append((rest, bound))
            elif name not in bound and (name not in self._parts or self._fits(name, tensor)):
                orders = self._orders(name, tensor) if name in self._parts else [()]
                stack.extend(((*order, *rest), {**bound, name: tensor}) for order in reversed(orders))
        return None

    def _fits(self, name: str, tensor: TensorRef) -> bool:
        """Whether the part could be the op of `tensor`, were all names in it distinct."""
        key = (name, tensor)
        if key not in self._fitting:
            self._fitting[key] = self._matcher.is_kind(self._parts[name].kinds, tensor) and any(
                all(operand not in self._parts or self._fits(operand, slot) for operand, slot in order)
                for order in self._orders(name, tensor)
            )
        return self._fitting[key]

    def _orders(self, name: str, tensor: TensorRef) -> list[tuple[tuple[str, TensorRef], ...]]:
        """The ways to give the part's operands the inputs of the op of `tensor`."""
        operands = self._parts[name].operands
        model = self._matcher.model
        slots = model.graphs[tensor.graph].slots(tensor.op)[: len(operands)]
        filled = [slot for slot in slots if slot is not None]
        if len(filled) < len(operands):
            return []
        ways: list[Sequence[str]] = [operands]
        if model.op(tensor).kind in COMMUTATIVE and len(operands) == 2:  # noqa: PLR2004  # two operands can be swapped
            ways.append(operands[::-1])
        return [tuple(zip(way, filled, strict=True)) for way in ways]


def name_matches(pattern: str, *names: str) -> bool:
    """Whether one of `names` is `pattern`, or matches it as a glob, or as a regex between slashes, found anywhere."""
    found = _compiled(pattern)
    return any(name and (name == pattern or found.search(name)) for name in names)


def _op_labels(graph: str, op: str) -> tuple[str, ...]:
    return (op, f"{graph}/{op}") if graph else (op,)


def _names_passes(links: tuple[Link, ...]) -> bool:
    return any(not link.kinds.isdisjoint(PASSES) for link in links)


def _after(links: tuple[Link, ...], index: int, step: int) -> frozenset[int]:
    """`index`, a place between links, and those that can be reached from it by leaving out optional links."""
    found = {index}
    while 0 <= (link := index if step > 0 else index - 1) < len(links) and links[link].optional:
        index += step
        found.add(index)
    return frozenset(found)


def _op_miss(selector: Selector, op: Op) -> str:
    if selector.type is not None and op.type not in selector.type.split("|"):
        return f"{op.name} is of type {op.type!r}, not {selector.type!r}"
    for name, wanted in selector.attr.items():
        given = _plain(op.attrs.get(name))
        if not _same(given, wanted) and not (isinstance(wanted, list) and any(_same(given, one) for one in wanted)):
            return f"{op.name} has {name} = {given!r}, not {wanted!r}"
    return ""


def _same(given: Any, wanted: Any) -> bool:
    """Whether an attribute has the value that a rule names; files keep numbers with a fraction as float32."""
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, float) and isinstance(wanted, int | float):
        with np.errstate(over="ignore"):
            return bool(given == wanted or np.float32(given) == np.float32(wanted))
    return bool(given == wanted)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    if len(pattern) > 1 and pattern[0] == pattern[-1] == "/":
        return compile_regex(pattern[1:-1])
    return re.compile(rf"\A(?:{fnmatch.translate(pattern)})")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return list(value) if isinstance(value, tuple) else value
