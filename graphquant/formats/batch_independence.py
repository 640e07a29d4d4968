"""Whether the rows of a graph's inputs are kept apart: shown op by op, or refused. Formats say which ops do what.

Every tensor of such a graph is one of three. It is *fixed*: no input decides on it. It is a *size*: integers that only
the inputs' shapes decide on. Or it has *rows*: axis 0 counts d rows for each row of the inputs, and what is in them
depends on nothing but that row of the inputs. An op that is not in a format's table, or not in the way that is said
there, makes the answer no. Shapes are known for several numbers of rows, and may grow along axis 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from graphquant.ir import TensorRef

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from graphquant.ir import Graph, Op, Shape


ROW_COUNTS: Final = (1, 2, 3, 997)
"""Numbers of rows that shapes are known for; the last is far above a block's, so that no division hides it."""

FIXED: Final = "fixed"
SIZE: Final = "size"
ROWS: Final = "rows"

MATRIX_RANK: Final = 2
"""Rank of a matrix."""

_SIZE_DTYPES: Final = frozenset({"int32", "int64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNode:
    """What a rule may ask about an op; lists have an entry for each input slot.

    Attributes:
        op: The op.
        opset: Opset of the default domain, 0 in a format that has none.
        kinds: FIXED, SIZE or ROWS; "" for an empty slot.
        shapes: Static shape for one row, None if unknown.
        values: Gives the value of a constant, None for all else.
        output_shape: Static shape of the first output for one row.
    """

    op: Op
    opset: int
    kinds: Sequence[str]
    shapes: Sequence[Shape | None]
    values: Sequence[Callable[[], np.ndarray[Any, Any]] | None]
    output_shape: Shape

    def kind(self, slot: int) -> str:
        """What input `slot` is."""
        return self.kinds[slot] if slot < len(self.kinds) else ""

    def rank(self, slot: int = 0) -> int:
        """Rank of input `slot`, 0 if it is not known."""
        shape = self.shapes[slot] if slot < len(self.shapes) else None
        return len(shape) if shape is not None else 0

    def constant_numbers(self, slot: int, attr: str) -> list[Any] | None:
        """The numbers that a constant input or, in older opsets, an attribute gives; None if neither does."""
        if slot < len(self.kinds) and self.kinds[slot]:
            value = self.values[slot]
            numbers: Any = None if value is None else value().reshape(-1).tolist()
        else:
            numbers = self.op.attrs.get(attr)
            numbers = [numbers] if isinstance(numbers, int | float) else numbers
        return None if numbers is None else list(numbers)

    def only_first_has_rows(self, *size_slots: int) -> bool:
        """Whether input 0 has rows and all others are fixed, but for those in `size_slots`, which may be sizes."""
        return self.kind(0) == ROWS and all(
            kind in {"", FIXED} or (kind == SIZE and slot in size_slots) for slot, kind in enumerate(self.kinds) if slot
        )


RowRule = Callable[[RowNode], bool]
"""Given an op of which at least one input has rows, tells whether its outputs have rows too.

What it need not ask is whether their axis 0 grows as it should: shapes are checked afterwards, for all ops alike. A
size may go only where it decides on nothing but the output's shape.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRuleTable:
    """What a format's ops do with rows.

    Attributes:
        rules: Rules by type of op.
        shape_ops: Types that tell the sizes of their input.
        size_ops: Types that make sizes of sizes and what is fixed.
        fill_ops: Types that make rows, all of them alike, out of sizes and what is fixed.
        domains: Domains of the types.
    """

    rules: Mapping[str, RowRule]
    shape_ops: frozenset[str]
    size_ops: frozenset[str]
    fill_ops: frozenset[str]
    domains: frozenset[str] = frozenset({""})


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """What is known of a graph beside its ops.

    Attributes:
        inputs: Names of the inputs that have rows.
        shape_of: The static shape of a tensor for that one of `ROW_COUNTS`, None if unknown.
        value_of: Gives the value of a tensor that is constant, None for others.
        opset: Opset of the default domain, 0 in a format that has none.
    """

    inputs: frozenset[str]
    shape_of: Callable[[TensorRef, int], Shape | None]
    value_of: Callable[[TensorRef], Callable[[], np.ndarray[Any, Any]] | None]
    opset: int = 0


def rows_are_independent(graph: Graph, facts: GraphFacts, table: RowRuleTable) -> bool:
    """Whether all inputs and outputs of `graph`, which has no loops, have rows, and nothing on the way mixes them."""
    classifier = _RowClassifier(graph, facts, table)
    return all(classifier.classify(graph.op(name)) for name in graph.topological_order())


class _RowClassifier:
    """The three kinds of tensor in one graph."""

    def __init__(self, graph: Graph, facts: GraphFacts, table: RowRuleTable) -> None:
        self._graph = graph
        self._facts = facts
        self._table = table
        self._kinds: dict[TensorRef, str] = {}

    def classify(self, op: Op) -> bool:
        slots = self._graph.slots(op.name)
        kinds = ["" if tensor is None else self._kinds[tensor] for tensor in slots]
        if op.kind == "output":
            return all(kind == ROWS for kind in kinds)
        kind = self._output_kind(op, kinds, slots)
        read_ports = self._graph.consumers_by_port(op.name)
        for port, output in enumerate(op.outputs):
            tensor = TensorRef(self._graph.name, op.name, port)
            if port in read_ports and (not kind or (kind == ROWS and not self._grows_with_rows(tensor))):
                return False
            if port in read_ports and kind == SIZE and output.dtype not in _SIZE_DTYPES:
                return False
            self._kinds[tensor] = kind
        return True

    def _output_kind(self, op: Op, kinds: Sequence[str], slots: Sequence[TensorRef | None]) -> str:
        """What the outputs of `op` are, "" if that is not known."""
        if op.kind in {"constant", "input"}:
            return ROWS if op.name in self._facts.inputs else FIXED
        is_supported = op.domain in self._table.domains or op.kind in {"quantize", "dequantize"}
        if not is_supported or op.kind in {"random", "stateful"}:
            return ""
        if ROWS not in kinds and SIZE not in kinds:
            return "" if op.kind == "dropout" else FIXED
        if op.type in self._table.shape_ops or (ROWS not in kinds and op.type in self._table.size_ops):
            return SIZE
        return ROWS if self._outputs_have_rows(op, kinds, slots) else ""

    def _outputs_have_rows(self, op: Op, kinds: Sequence[str], slots: Sequence[TensorRef | None]) -> bool:
        rule = self._table.rules.get(op.type)
        node = self._row_node(op, kinds, slots)
        if node is None or rule is None or (ROWS not in kinds and op.type not in self._table.fill_ops):
            return False
        return rule(node)

    def _row_node(self, op: Op, kinds: Sequence[str], slots: Sequence[TensorRef | None]) -> RowNode | None:
        shape = self._facts.shape_of(TensorRef(self._graph.name, op.name), 0)
        if not shape:
            return None
        return RowNode(
            op=op,
            opset=self._facts.opset,
            kinds=kinds,
            shapes=[None if tensor is None else self._facts.shape_of(tensor, 0) for tensor in slots],
            values=[None if tensor is None else self._facts.value_of(tensor) for tensor in slots],
            output_shape=shape,
        )

    def _grows_with_rows(self, tensor: TensorRef) -> bool:
        """Whether axis 0 of `tensor` grows with the rows, and nothing else does."""
        base_shape = self._facts.shape_of(tensor, 0)
        if not base_shape or not base_shape[0]:
            return False
        expected = [(count * base_shape[0], *base_shape[1:]) for count in ROW_COUNTS]
        return expected == [self._facts.shape_of(tensor, index) for index in range(len(ROW_COUNTS))]


# -- rules that formats share ----------------------------------------------------------------------


def keeps_rows(node: RowNode) -> bool:
    """Input 0 row by row, with fixed parameters."""
    return node.only_first_has_rows()


def broadcast_keeps_rows(node: RowNode) -> bool:
    """Elementwise over inputs whose axes 0 meet."""
    rank = len(node.output_shape)
    row_shapes = [shape for shape, kind in zip(node.shapes, node.kinds, strict=True) if kind == ROWS]
    fixed_shapes = [shape for shape, kind in zip(node.shapes, node.kinds, strict=True) if kind == FIXED]
    return (
        SIZE not in node.kinds
        and all(shape is not None and len(shape) == rank and shape[0] == node.output_shape[0] for shape in row_shapes)
        and all(shape is not None and (len(shape) < rank or shape[0] == 1) for shape in fixed_shapes)
    )


def excludes_batch_axis(node: RowNode, axes: Sequence[int] | None, rank: int = 0) -> bool:
    """Whether `axes`, which may count from the end, are known and leave out axis 0."""
    rank = rank or node.rank()
    return bool(axes) and rank > 0 and all(0 < (axis + rank if axis < 0 else axis) < rank for axis in axes or ())


def reduction_keeps_rows(node: RowNode) -> bool:
    """Axes that input 1 or, in older opsets, an attribute names, are no axis of rows."""
    return node.only_first_has_rows() and excludes_batch_axis(node, node.constant_numbers(1, "axes"))


def tile_keeps_rows(node: RowNode) -> bool:
    """Axis 0 is not repeated."""
    repeats = node.constant_numbers(1, "repeats")
    return node.only_first_has_rows() and bool(repeats) and (repeats or [0])[0] == 1


def reshape_keeps_rows(node: RowNode) -> bool:
    """The elements of a row stay together if axis 0 of both counts rows, which asks for all sizes to be known."""
    sizes_known = node.shapes[0] is not None and None not in (*node.shapes[0], *node.output_shape)
    return node.only_first_has_rows(1) and sizes_known


def unsqueeze_keeps_rows(node: RowNode) -> bool:
    """A new axis behind axis 0."""
    return node.only_first_has_rows() and excludes_batch_axis(
        node, node.constant_numbers(1, "axes"), len(node.output_shape)
    )


def expand_keeps_rows(node: RowNode) -> bool:
    """Rows, or what is fixed, to a larger shape."""
    shape = node.shapes[0]
    if node.kind(1) == ROWS or shape is None:
        return False
    if node.kind(0) == ROWS:
        return len(shape) == len(node.output_shape) and shape[0] == node.output_shape[0]
    return len(shape) < len(node.output_shape) or shape[0] == 1


def matmul_keeps_rows(node: RowNode) -> bool:
    """A product whose axis 0 is not summed over: rows times a matrix, or batches of matrices."""
    left_shape, right_shape = node.shapes
    if left_shape is None or right_shape is None:
        return False
    if node.kinds == [ROWS, FIXED]:
        has_batch_axis = len(right_shape) > MATRIX_RANK and len(right_shape) == len(node.output_shape)
        return len(left_shape) == len(node.output_shape) >= MATRIX_RANK and (not has_batch_axis or right_shape[0] == 1)
    have_batch_axes = [
        len(shape) > MATRIX_RANK
        for shape, kind in zip((left_shape, right_shape), node.kinds, strict=True)
        if kind == ROWS
    ]
    return all(have_batch_axes) and broadcast_keeps_rows(node)
