"""The neighborhood of an op: its readers, its main input, and their shapes, each computed once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import UsageError
from graphquant.ir import (
    COMMUTATIVE_KINDS,
    CONVOLUTION_KINDS,
    FLOAT_TYPES,
    LOOP_KINDS,
    MAC_KINDS,
    MATRIX_PRODUCT_KINDS,
    PSEUDO_KINDS,
    TABLE_KINDS,
    TRANSPARENT_KINDS,
    Graph,
    Model,
    Op,
    OpKey,
    Parameters,
    Shape,
    TensorRef,
    Use,
    follow_to_end,
    fully_known_shape,
    input_channels,
    kernel_size,
    matrix_rows,
    output_channels,
)
from graphquant.rules.pattern_syntax import ANY_OP, ANY_OPERAND, ChainLink, PatternOp, parse_chain, pattern_definitions
from graphquant.rules.signal_level import find_unnormalized_ops

if TYPE_CHECKING:
    from graphquant.rules.rule import Selector


class OpNeighbors:
    """The neighbors of the ops of `model`, which must not be edited meanwhile."""

    def __init__(self, model: Model) -> None:
        """Compute nothing before it is needed."""
        self.model = model
        self.parameters = Parameters(model)
        self._consumers_by_port: dict[tuple[str, str], dict[int, list[Use]]] = {}
        self._data_inputs: dict[tuple[str, str], TensorRef | None] = {}
        self._single_sources: dict[TensorRef, TensorRef | None] = {}
        self._single_readers: dict[TensorRef, TensorRef | None] = {}

    @cached_property
    def first_outputs(self) -> dict[tuple[str, str, bool], list[tuple[int, TensorRef]]]:
        """The first output of each op that can run, with its position, by kind and type and for parameters."""
        outputs: dict[tuple[str, str, bool], list[tuple[int, TensorRef]]] = {}
        for position, (graph, op) in enumerate(self.model.reachable_ops()):
            if op.outputs:
                tensor = TensorRef(graph.name, op.name)
                key = (op.kind, op.type, self.parameters.is_parameter(tensor))
                outputs.setdefault(key, []).append((position, tensor))
        return outputs

    def is_kind(self, kinds: AbstractSet[str], tensor: TensorRef) -> bool:
        """Return True if `kinds` contain the op of `tensor`."""
        if "*" in kinds or self.model.op(tensor).kind in kinds:
            return True
        key, needs_value = (tensor.graph, tensor.op), {"parameter", "computed"} & kinds
        return (
            ("stem" in kinds and key in self._stems)
            or ("tail" in kinds and key in self._tails)
            or ("unnormalized" in kinds and key in self._unnormalized)
            or ("tied" in kinds and tensor in self._tied)
            or ("parameter" if needs_value and self.parameters.is_parameter(tensor) else "computed") in needs_value
        )

    def has_position(self, kinds: AbstractSet[str]) -> bool:
        """Return True if `kinds` contain a pseudo kind that an op of the model has because of its position."""
        is_stem, is_tail = "stem" in kinds and self._stems, "tail" in kinds and self._tails
        return bool(is_stem or is_tail or ("unnormalized" in kinds and self._unnormalized))

    @cached_property
    def _stems(self) -> set[tuple[str, str]]:
        """The convolutions that are computed from inputs of the model by ops without weights."""
        free_ops = self._ops_without_weights(self._readers)
        return {key for key in free_ops if self.model.graphs[key[0]].op(key[1]).kind in CONVOLUTION_KINDS}

    @cached_property
    def _tails(self) -> set[tuple[str, str]]:
        """The ops without weights whose results reach outputs of the model through ops without weights alone."""
        free_ops = self._ops_without_weights(self._sources)
        return {key for key in free_ops if self.model.graphs[key[0]].op(key[1]).kind not in MAC_KINDS}

    @cached_property
    def _tied(self) -> set[TensorRef]:
        """The float32 tables of which rows are picked and that a matrix product reads, and their transposed tensors."""
        tied = set[TensorRef]()
        for graph, op in self.model.reachable_ops():
            slots = enumerate(graph.slots(op.name)) if op.kind in TABLE_KINDS else ()
            tables = [table for slot, table in slots if table is not None and op.role(slot) in {"input", "weight"}]
            for table in tables:
                if self.model.output(table).dtype != "float32" or not self.parameters.is_parameter(table):
                    continue
                readers = [TensorRef(use.graph, use.op) for use in self.consumers(table)]
                tensors = [table, *(reader for reader in readers if self.model.op(reader).kind == "transpose")]
                uses = [use for tensor in tensors for use in self.consumers(tensor)]
                kinds = {self.model.graphs[use.graph].op(use.op).kind for use in uses}
                tied.update(tensors if kinds & MATRIX_PRODUCT_KINDS else ())
        return tied

    @cached_property
    def _unnormalized(self) -> set[OpKey]:
        """The ops between a signal and the normalization that removes its level."""
        return find_unnormalized_ops(self.model, self.parameters)

    def _ops_without_weights(self, next_ops: Callable[[Graph, str], Iterable[str]]) -> set[tuple[str, str]]:
        """Return the ops that `next_ops` does not reach from any op with a weight, in the model and its functions."""
        free_ops: dict[str, set[str]] = {}  # by graph
        excluded: set[str] = set()  # functions that such an op calls
        pending = list(self.model.entry_graphs)
        kinds = MAC_KINDS | LOOP_KINDS | {"call", "if"}  # ops with bodies or functions may contain weights
        for name in pending:
            if name in free_ops:
                continue
            graph = self.model.graphs[name]
            queue = [op.name for op in graph.ops() if op.kind in kinds]
            reached = set[str]()
            for op_name in queue:
                new_ops = dict.fromkeys(other for other in next_ops(graph, op_name) if other not in reached)
                reached.update(new_ops)
                queue += new_ops
            free_ops[name] = {op.name for op in graph.ops()} - reached
            for op in graph.ops():
                called = [call.graph for call in op.calls] if op.kind == "call" else []
                (excluded.update if op.name in reached else pending.extend)(called)
        return {(name, op) for name, ops in free_ops.items() if name not in excluded for op in ops}

    def _readers(self, graph: Graph, op: str) -> Iterable[str]:
        uses = (use for uses in self.consumers_by_port(graph, op).values() for use in uses)
        return (use.op for use in uses if use.graph == graph.name)

    def _sources(self, graph: Graph, op: str) -> Iterable[str]:
        return (slot.op for slot in graph.slots(op) if slot is not None and slot.graph == graph.name)

    def consumers_by_port(self, graph: Graph, op: str) -> dict[int, list[Use]]:
        """Return the consumers of each output of an op."""
        key = (graph.name, op)
        if key not in self._consumers_by_port:
            self._consumers_by_port[key] = graph.consumers_by_port(op)
        return self._consumers_by_port[key]

    def consumers(self, tensor: TensorRef) -> list[Use]:
        """Return the consumers of `tensor`."""
        return self.consumers_by_port(self.model.graphs[tensor.graph], tensor.op).get(tensor.port, [])

    def is_float_cast(self, tensor: TensorRef) -> bool:
        """Return True if `tensor` is another one, converted to another float type by TensorFlow.

        Mixed precision puts such Casts between layers, so rules look through them. Not so in ONNX models: ONNX Runtime
        finds pairs only next to the ops to which they belong.
        """
        if self.model.op(tensor).kind != "cast" or self.model.traits.runtime != "TensorFlow":
            return False
        tensors = tensor, self.model.graphs[tensor.graph].source_of(Use(tensor.graph, tensor.op, 0))
        dtypes = {None if cast_end is None else self.model.output(cast_end).dtype for cast_end in tensors}
        return dtypes <= FLOAT_TYPES and not self.parameters.is_parameter(tensor)

    def before_casts(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor that Casts between float types convert to `tensor`; `tensor` itself if there are none."""
        if self.model.op(tensor).kind != "cast":  # for nearly all tensors of nearly all models
            return tensor
        return follow_to_end(tensor, lambda cast: self.data_input(cast) if self.is_float_cast(cast) else None)

    def reader_count(self, tensor: TensorRef) -> int:
        """Return the number of consumers of `tensor`, counting those of a Cast between float types in its place."""
        readers = (TensorRef(use.graph, use.op) for use in self.consumers(tensor))
        return sum(self.reader_count(reader) if self.is_float_cast(reader) else 1 for reader in readers)

    def inputs(self, use: Use) -> list[tuple[TensorRef, Use]]:
        """Return the inputs of the op of `use`, each with its use."""
        slots = enumerate(self.model.graphs[use.graph].slots(use.op))
        return [(tensor, Use(use.graph, use.op, slot)) for slot, tensor in slots if tensor is not None]

    def single_source(self, tensor: TensorRef, *, literal: bool) -> TensorRef | None:
        """Return the main input of the op of `tensor` if it has no other reader, through forwarding ops."""
        return self._nearest(tensor, self._sole_source, None if literal else self._single_sources)

    def _sole_source(self, tensor: TensorRef) -> TensorRef | None:
        source = self.data_input(tensor)
        return source if source is not None and len(self.consumers(source)) == 1 else None

    def single_reader(self, tensor: TensorRef, *, literal: bool) -> TensorRef | None:
        """Return output 0 of the only op of the graph that reads `tensor`, looking through ops that forward it."""
        return self._nearest(tensor, self._sole_reader, None if literal else self._single_readers)

    def _sole_reader(self, tensor: TensorRef) -> TensorRef | None:
        readers = self.consumers(tensor)
        return TensorRef(*readers[0][:2]) if len(readers) == 1 and readers[0].graph == tensor.graph else None

    def _nearest(
        self,
        tensor: TensorRef,
        step: Callable[[TensorRef], TensorRef | None],
        cache: dict[TensorRef, TensorRef | None] | None,
    ) -> TensorRef | None:
        """Return the tensor that `step` leads to, with a `cache` the first one whose op does not forward values."""
        if cache is None:
            return step(tensor)
        path: list[TensorRef] = []
        current: TensorRef | None = tensor
        while current is not None and current not in cache:
            cache[current] = None  # also ends a ring of identities
            path.append(current)
            current = step(current)
            if current is None or self.model.op(current).kind in TRANSPARENT_KINDS or self.is_float_cast(current):
                continue
            break
        else:
            current = None if current is None else cache[current]
        cache.update(dict.fromkeys(path, current))
        return current

    def data_input(self, tensor: TensorRef) -> TensorRef | None:
        """Return the main input of the op of `tensor`: the first one that is no parameter, or the first one."""
        key = (tensor.graph, tensor.op)
        if key not in self._data_inputs:
            operands = [slot for slot in self.model.graphs[tensor.graph].slots(tensor.op) if slot is not None]
            computed = (slot for slot in operands if not self.parameters.is_parameter(slot))
            self._data_inputs[key] = next(computed, operands[0] if operands else None)
        return self._data_inputs[key]


# Conditions on a single op: its type, its attributes, and sizes of its inputs.


def _channels_per_group(op: Op, shape: Shape, channels: int | None) -> int | None:
    """Return `channels` of a convolution with a weight of `shape`, divided by the number of its groups."""
    groups = input_channels(op, shape) if op.kind == "depthwise_conv" else int(op.numeric_attr("group", 1))
    return None if channels is None or not groups else channels // groups


_SIZE_FUNCTIONS = {
    "channels": output_channels,
    "outputs per group": lambda op, shape: _channels_per_group(op, shape, output_channels(op, shape)),
    "input channels": input_channels,
    "inputs per group": lambda op, shape: _channels_per_group(op, shape, input_channels(op, shape)),
    "rows": matrix_rows,
    "kernel size": kernel_size,
}
"""Functions that compute sizes of an op from the shape of its weight, or of its input for rows."""


def size_miss_reason(neighbors: OpNeighbors, selector: Selector, tensor: TensorRef, use: Use | None) -> str:
    """Return the condition on sizes that fails. A condition on an unknown size always fails."""
    conditions = (
        ("axes", selector.min_rank, selector.max_rank, None),
        ("elements", selector.min_size, selector.max_size, None),
        ("channels", selector.min_channels, selector.max_channels, None),
        ("input channels", selector.min_in_channels, selector.max_in_channels, None),
        ("rows", selector.min_rows, selector.max_rows, None),
        ("kernel size", selector.min_kernel, None, None),
        ("groups", selector.min_groups, selector.max_groups, None),
        ("inputs per group", None, selector.max_group_inputs, None),
        ("outputs per group", selector.min_group_outputs, None, None),
        ("input channels", None, None, selector.multiple_of),
    )
    for quantity, minimum, maximum, divisor in conditions:
        if minimum is None and maximum is None and divisor is None:
            continue
        size = _selected_size(neighbors, quantity, tensor, use)
        subject = tensor if use is None or quantity in {"axes", "elements"} else use.op
        statement = f"{subject} has {'an unknown number of' if size is None else size} {quantity}"
        if minimum is not None and (size is None or size < minimum):
            return f"{statement}, not at least {minimum}"
        if maximum is not None and (size is None or size > maximum):
            return f"{statement}, not at most {maximum}"
        if divisor is not None and (size is None or size % divisor):
            return f"{statement}, no multiple of {divisor}"
    return ""


def _selected_size(neighbors: OpNeighbors, quantity: str, tensor: TensorRef, use: Use | None) -> int | None:
    """Return a size of `tensor`, or of the op of `use` according to its weight; None if it is unknown."""
    if quantity not in {"axes", "elements"}:
        return None if use is None else _weighted_op_size(neighbors, quantity, use)
    shape = neighbors.parameters.shape(tensor)
    if quantity == "axes":
        return None if shape is None else len(shape)
    known_shape = fully_known_shape(shape)
    return None if known_shape is None else math.prod(known_shape)


def _weighted_op_size(neighbors: OpNeighbors, quantity: str, use: Use) -> int | None:
    """Return a size of the weighted op of `use`."""
    graph = neighbors.model.graphs[use.graph]
    op = graph.op(use.op)
    if op.channel_axis is None:
        return None
    if quantity == "groups":
        return int(op.numeric_attr("group", 1))
    role = "input" if quantity == "rows" else "weight"
    operand = next(
        (operand for slot, operand in enumerate(graph.slots(op.name)) if operand and op.role(slot) == role), None
    )
    shape = None if operand is None else neighbors.parameters.shape(operand)
    return None if shape is None else _SIZE_FUNCTIONS[quantity](op, shape)


def attribute_miss_reason(selector: Selector, op: Op) -> str:
    """Return the failed condition on an attribute of `op`, "" if there is none."""
    for name, condition in selector.attr.items():
        actual = _plain_attribute(op.attrs.get(name))
        if not _attribute_equals(actual, condition) and not (
            isinstance(condition, list) and any(_attribute_equals(actual, alternative) for alternative in condition)
        ):
            return f"{op.name} has {name} = {actual!r}, not {condition!r}"
    return ""


def _attribute_equals(actual: Any, expected: Any) -> bool:
    """Return True if an attribute has the value that a rule names. Files store fractions as float32."""
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_attribute_equals, actual, expected))
    if isinstance(actual, float) and isinstance(expected, int | float):
        with np.errstate(over="ignore"):
            return bool(actual == expected or np.float32(actual) == np.float32(expected))
    return bool(actual == expected)


def _plain_attribute(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return list(value) if isinstance(value, tuple) else value


# Match chains of kinds, `conv > batchnorm? > relu`, against the ops before a tensor or after a use.


def matches_chain_up(neighbors: OpNeighbors, links: tuple[ChainLink, ...], tensor: TensorRef) -> bool:
    """Return True if the ops before `tensor` form the chain. Every tensor inside it must have one reader."""
    return _matches_links(links[::-1], tensor, neighbors.is_kind, neighbors.single_source)


def matches_chain_down(neighbors: OpNeighbors, links: tuple[ChainLink, ...], use: Use) -> bool:
    """Return True if the op of `use` and its sole readers form the chain."""

    def is_kind(kinds: AbstractSet[str], tensor: TensorRef) -> bool:
        return neighbors.is_kind(kinds - {"parameter"}, tensor)

    return _matches_links(links, TensorRef(use.graph, use.op), is_kind, neighbors.single_reader)


def _matches_links(
    links: tuple[ChainLink, ...],
    start: TensorRef,
    is_kind: Callable[[AbstractSet[str], TensorRef], bool],
    next_tensor: Callable[..., TensorRef | None],
) -> bool:
    """Return True if the ops from `start` on form the chain."""
    if len(links) == 1:  # most chains
        return is_kind(links[0].kinds, start)
    literal = any(not link.kinds.isdisjoint(TRANSPARENT_KINDS | {"cast"}) for link in links)
    positions, current = _skip_optional_links(links, 0), start
    while True:
        matched = {index + 1 for index in positions if is_kind(links[index].kinds, current)}
        positions = frozenset().union(*(_skip_optional_links(links, index) for index in matched))
        if not positions or len(links) in positions:
            return bool(positions)
        if (following := next_tensor(current, literal=literal)) is None:
            return False
        current = following


@lru_cache(maxsize=1024)
def possible_end_links(text: str, *, last: bool) -> tuple[ChainLink, ...]:
    """Return the links that may be the last op of a chain, or the first one, considering optional links."""
    links = parse_chain(text)[:: -1 if last else 1]
    return tuple(links[index] for index in sorted(_skip_optional_links(links, 0)))


def _skip_optional_links(links: tuple[ChainLink, ...], index: int) -> frozenset[int]:
    """Return the positions between links that can be reached from `index` by skipping optional links."""
    required = (position for position in range(index, len(links)) if not links[position].optional)
    return frozenset(range(index, next(required, len(links)) + 1))


# Match patterns, small graphs written as text, against the ops above each op.

MAX_FORWARDING_OPS = 16  # ops in a row, each of which forwards its input, between two parts of a match

MAX_BINDING_STEPS = 2000
"""Operands that are tried for one match of a pattern: commuted operands of a hostile model would never end."""


def find_pattern(
    neighbors: OpNeighbors, name: str, pattern_ops: tuple[PatternOp, ...]
) -> dict[str, set[tuple[str, str]]]:
    """Return for each part the ops that have its role in a match; the first match at each op counts."""
    ops_by_name: dict[str, set[tuple[str, str]]] = {part: set() for part in (ANY_OP, *(op.name for op in pattern_ops))}
    search = _PatternSearch(neighbors, name, pattern_ops)
    for root in search.possible_roots() if search.may_occur(pattern_ops[-1].name) else ():
        bound = search.bind_pattern(root) or {}
        for part, tensor in bound.items():
            for role in {ANY_OP, part} & ops_by_name.keys() if part in search.definitions else ():
                ops_by_name[role].add((tensor.graph, tensor.op))
        ops_by_name[ANY_OP].update(search.forwarding_ops(bound))
    return ops_by_name


def find_bindings(model: Model, pattern_ops: tuple[PatternOp, ...]) -> list[dict[str, TensorRef]]:
    """Return the tensors of the names in each match that has no forwarding op between its parts."""
    search = _PatternSearch(OpNeighbors(model), pattern_ops[-1].name, pattern_ops)
    roots = search.possible_roots() if search.may_occur(pattern_ops[-1].name) else ()
    bindings = [bound for bound in map(search.bind_pattern, roots) if bound]
    return [bound for bound in bindings if not any(search.forwarding_ops(bound))]


class _PatternSearch:
    """Matches a pattern against the ops above one op."""

    def __init__(self, neighbors: OpNeighbors, name: str, pattern_ops: tuple[PatternOp, ...]) -> None:
        self.definitions = pattern_definitions(pattern_ops)
        self._neighbors = neighbors
        self._name = name
        self._root = pattern_ops[-1].name
        self._may_bind_cache: dict[tuple[str, TensorRef], bool] = {}
        self._may_occur_cache: dict[str, bool] = {}
        self._present = {word for key in neighbors.first_outputs for word in key[:2]} | PSEUDO_KINDS.keys()
        self._helpers = self.definitions.keys() - {op.name for op in pattern_ops}
        kinds = (alternative.kinds for alternatives in self.definitions.values() for alternative in alternatives)
        self._skipped_kinds = (TRANSPARENT_KINDS | {"cast"}) - frozenset().union(*kinds)

    def possible_roots(self) -> list[TensorRef]:
        """Return the first outputs of the ops that the last line may stand for, according to kinds and types alone."""
        names = [self._root]
        for name in names:
            names += [op.operands[0] for op in self.definitions[name] if op.is_alias]
        ops = [op for name in names for op in self.definitions[name]]
        has_position = any(self._neighbors.has_position(op.kinds) for op in ops)
        roots = list[tuple[int, TensorRef]]()
        for outputs in self._neighbors.first_outputs.values():
            # Other ops of the same kind and type are alike, unless a position matters.
            examined = outputs if has_position else outputs[:1]
            fitting = [output for output in examined if any(self._is_op(op, output[1]) for op in ops)]
            roots += outputs if fitting and not has_position else fitting
        return [root for _, root in sorted(roots, key=itemgetter(0))]

    def may_occur(self, name: str) -> bool:
        """Return False if the model lacks the kinds and types that a part needs, as for most patterns."""
        if name not in self._may_occur_cache:
            self._may_occur_cache[name] = any(
                (op.is_alias or not self._present.isdisjoint(op.kinds | op.types))
                and all(self.may_occur(operand) for operand in op.operands if operand in self.definitions)
                for op in self.definitions[name]
            )
        return self._may_occur_cache[name]

    def bind_pattern(self, root: TensorRef) -> dict[str, TensorRef] | None:
        """Return the tensor for each name of the pattern if its last op is that of `root`, None without a match.

        Only operands that fit by themselves are tried, so that the search backtracks only if a name occurs twice.
        """
        stack: list[tuple[tuple[tuple[str, TensorRef], ...], dict[str, TensorRef]]] = [(((self._root, root),), {})]
        steps = 0
        while stack:
            goals, bound = stack.pop()
            steps += 1
            if not goals:
                return bound
            if steps > MAX_BINDING_STEPS:
                raise UsageError(
                    f"The pattern {self._name!r} has too many possible matches in the ops above {root}. Give its"
                    " operands distinct kinds, or remove names that occur twice."
                )
            (name, tensor), rest = goals[0], goals[1:]
            if name == ANY_OPERAND or bound.get(name) == tensor:
                stack.append((rest, bound))
            elif (number := _as_number(name)) is not None:
                value = self._neighbors.parameters.number(tensor)
                if value is not None and np.isclose(value, number):
                    stack.append((rest, bound))
            elif name not in bound and name not in self.definitions:
                stack.append((rest, {**bound, name: tensor}))
            elif name not in bound:
                for op in reversed(self.definitions[name]):
                    # The operand in place of a missing optional op is no match of that op.
                    is_missing = op.is_alias and op.operands[0] not in self._helpers
                    extended = bound if is_missing else {**bound, name: tensor}
                    orders = reversed(self._fitting_orders(op, tensor))
                    stack.extend(((*order, *rest), extended) for order in orders)
        return None

    def forwarding_ops(self, bound: dict[str, TensorRef]) -> Iterator[tuple[str, str]]:
        """Yield the ops between two parts of a match that only forward values."""
        parts = {tensor for name, tensor in bound.items() if name in self.definitions}
        pending = list(parts)
        for tensor in pending:
            for slot in self._neighbors.model.graphs[tensor.graph].slots(tensor.op):
                if slot is not None and slot not in parts and self._source(slot) in parts:
                    yield slot.graph, slot.op
                    pending.append(slot)

    def _is_op(self, op: PatternOp, tensor: TensorRef) -> bool:
        """Return True if the op of `tensor` has one of the kinds or types."""
        return self._neighbors.is_kind(op.kinds, tensor) or self._neighbors.model.op(tensor).type in op.types

    def _may_bind(self, name: str, tensor: TensorRef) -> bool:
        """Return True if the part could be the op of `tensor` if all names in it were distinct."""
        key = (name, tensor)
        if key not in self._may_bind_cache:
            self._may_bind_cache[key] = any(self._fitting_orders(op, tensor) for op in self.definitions.get(name, ()))
        return name not in self.definitions or self._may_bind_cache[key]

    def _fitting_orders(self, op: PatternOp, tensor: TensorRef) -> list[tuple[tuple[str, TensorRef], ...]]:
        """Return the assignments of inputs to operands that fit by themselves, of an alias only that of `tensor`."""
        orders = self._operand_orders(op, tensor) if self._is_op(op, tensor) else []
        if op.is_alias:
            orders = [((op.operands[0], tensor),)]
        return [order for order in orders if all(self._may_bind(operand, slot) for operand, slot in order)]

    def _source(self, tensor: TensorRef) -> TensorRef:
        """Return the tensor that ops forward as `tensor`, unless the pattern names their kind."""

        def forwarded_input(current: TensorRef) -> TensorRef | None:
            slots = self._neighbors.model.graphs[current.graph].slots(current.op)
            return slots[0] if slots and self._neighbors.model.op(current).kind in self._skipped_kinds else None

        return follow_to_end(tensor, forwarded_input, MAX_FORWARDING_OPS)

    def _operand_orders(self, op: PatternOp, tensor: TensorRef) -> list[tuple[tuple[str, TensorRef], ...]]:
        """Return the assignments of the inputs of the op of `tensor` to the operands of a part."""
        model = self._neighbors.model
        slots = enumerate(model.graphs[tensor.graph].slots(tensor.op))  # TensorFlow's Split has its axis first
        data = [slot for index, slot in slots if model.op(tensor).role(index) != "axis"]
        filled = [self._source(slot) for slot in data[: len(op.operands)] if slot is not None]
        if len(filled) < len(op.operands):
            return []
        operand_orders: list[Sequence[str]] = [op.operands]
        if model.op(tensor).kind in COMMUTATIVE_KINDS and len(set(op.operands)) == 2:  # noqa: PLR2004  # two can be swapped
            operand_orders.append(op.operands[::-1])
        return [tuple(zip(operand_order, filled, strict=True)) for operand_order in operand_orders]


@lru_cache(maxsize=1024)
def _as_number(operand: str) -> float | None:
    """Return the value of a number in a pattern, None for a name."""
    return float(operand) if re.fullmatch(r"-?\d+(\.\d+)?", operand) else None
