"""Proof, op by op, that the rows of a graph's inputs are independent of each other.

Each tensor of such a graph belongs to one of three kinds. A FIXED tensor does not depend on any input. A SIZE tensor
holds integers that depend only on the shapes of the inputs. A tensor with ROWS has d rows along axis 0 for each row of
the inputs, and these rows depend only on that row of the inputs. The graph is rejected if the format's table has no
rule for an op, or if the rule does not hold. Shapes are inferred for several numbers of rows, and only axis 0 may grow.
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
"""Numbers of rows for which shapes are inferred. The last one is far above any block size, so that no division hides
it."""

FIXED: Final = "fixed"
SIZE: Final = "size"
ROWS: Final = "rows"

MATRIX_RANK: Final = 2
"""Rank of a matrix."""

_SIZE_DTYPES: Final = frozenset({"int32", "int64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNode:
    """An op as a row rule sees it; lists have one entry for each input slot.

    Attributes:
        op: The op.
        opset: Opset of the default domain, 0 in a format without opsets.
        kinds: FIXED, SIZE or ROWS; "" for an empty slot.
        shapes: Static shape for one row, None if unknown.
        values: Returns the value of a constant; None for other inputs.
        output_shape: Static shape of the first output for one row.
    """

    op: Op
    opset: int
    kinds: Sequence[str]
    shapes: Sequence[Shape | None]
    values: Sequence[Callable[[], np.ndarray[Any, Any]] | None]
    output_shape: Shape

    def kind(self, slot: int) -> str:
        """Return the kind of input `slot`."""
        return self.kinds[slot] if slot < len(self.kinds) else ""

    def rank(self, slot: int = 0) -> int:
        """Return the rank of input `slot`, 0 if it is unknown."""
        shape = self.shapes[slot] if slot < len(self.shapes) else None
        return len(shape) if shape is not None else 0

    def numbers(self, slot: int, attr: str) -> list[Any] | None:
        """Return the numbers of a constant input or, in older opsets, of an attribute; None if there is neither."""
        if slot < len(self.kinds) and self.kinds[slot]:
            value = self.values[slot]
            numbers: Any = None if value is None else value().reshape(-1).tolist()
        else:
            numbers = self.op.attrs.get(attr)
            numbers = [numbers] if isinstance(numbers, int | float) else numbers
        return None if numbers is None else list(numbers)

    def shapes_of(self, kind: str) -> list[Shape | None]:
        """Return the shapes of the inputs of a kind."""
        return [shape for shape, slot_kind in zip(self.shapes, self.kinds, strict=True) if slot_kind == kind]

    def only_first_has_rows(self, *size_slots: int) -> bool:
        """Return True if input 0 has rows and all others are FIXED; those in `size_slots` may also be SIZE."""
        return self.kind(0) == ROWS and all(
            kind in {"", FIXED} or (kind == SIZE and slot in size_slots) for slot, kind in enumerate(self.kinds) if slot
        )


RowRule = Callable[[RowNode], bool]
"""Return True if the outputs of an op have rows, given that at least one of its inputs has.

A rule need not check that axis 0 of the outputs grows as it should: shapes are checked afterwards for all ops. A rule
may accept a SIZE input only if that input determines nothing but the shape of the output.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRuleTable:
    """Row rules for the ops of a format.

    Attributes:
        rules: Row rules by op type.
        shape_ops: Op types that return the sizes of their input.
        size_ops: Op types that compute sizes from SIZE and FIXED inputs.
        fill_ops: Op types that fill equal rows, given SIZE and FIXED inputs.
        domains: Domains of the op types.
    """

    rules: Mapping[str, RowRule]
    shape_ops: frozenset[str]
    size_ops: frozenset[str]
    fill_ops: frozenset[str]
    domains: frozenset[str] = frozenset({""})


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """Facts about a graph that its ops do not state.

    Attributes:
        inputs: Names of the inputs that have rows.
        shape_of: Returns the static shape of a tensor for one of `ROW_COUNTS`, given by its index; None if unknown.
        value_of: Returns a function for the value of a constant tensor, None for other tensors.
        opset: Opset of the default domain, 0 in a format without opsets.
    """

    inputs: frozenset[str]
    shape_of: Callable[[TensorRef, int], Shape | None]
    value_of: Callable[[TensorRef], Callable[[], np.ndarray[Any, Any]] | None]
    opset: int = 0


def rows_are_independent(graph: Graph, facts: GraphFacts, table: RowRuleTable) -> bool:
    """Return True if all inputs and outputs of `graph`, which has no loops, have rows, and no op mixes them."""
    classifier = _RowClassifier(graph, facts, table)
    return all(classifier.classify(graph.op(name)) for name in graph.topological_order())


class _RowClassifier:
    """Classifies the tensors of one graph as FIXED, SIZE or ROWS."""

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
        """Return the kind of the outputs of `op`, "" if it is unknown."""
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
        """Return True if axis 0 of `tensor`, and no other axis, grows with the number of rows."""
        base_shape = self._facts.shape_of(tensor, 0)
        if not base_shape or not base_shape[0]:
            return False
        expected = [(count * base_shape[0], *base_shape[1:]) for count in ROW_COUNTS]
        return expected == [self._facts.shape_of(tensor, index) for index in range(len(ROW_COUNTS))]


# -- row rules of several formats ------------------------------------------------------------------


def keeps_rows(node: RowNode) -> bool:
    """Accept ops that process input 0 row by row with FIXED parameters."""
    return node.only_first_has_rows()


def broadcast_keeps_rows(node: RowNode) -> bool:
    """Accept elementwise ops whose inputs are aligned at axis 0."""
    rank = len(node.output_shape)
    return (
        SIZE not in node.kinds
        and all(
            shape is not None and len(shape) == rank and shape[0] == node.output_shape[0]
            for shape in node.shapes_of(ROWS)
        )
        and all(shape is not None and (len(shape) < rank or shape[0] == 1) for shape in node.shapes_of(FIXED))
    )


def excludes_batch_axis(node: RowNode, axes: Sequence[int] | None, rank: int = 0) -> bool:
    """Return True if `axes`, which may be negative, are known and do not contain axis 0."""
    rank = rank or node.rank()
    return bool(axes) and rank > 0 and all(0 < (axis + rank if axis < 0 else axis) < rank for axis in axes or ())


def reduction_keeps_rows(node: RowNode) -> bool:
    """Accept reductions over known axes (input 1 or an attribute) other than the row axis."""
    return node.only_first_has_rows() and excludes_batch_axis(node, node.numbers(1, "axes"))


def tile_keeps_rows(node: RowNode) -> bool:
    """Accept Tile that does not repeat axis 0."""
    repeats = node.numbers(1, "repeats")
    return node.only_first_has_rows() and bool(repeats) and (repeats or [0])[0] == 1


def reshape_keeps_rows(node: RowNode) -> bool:
    """Accept Reshape of known sizes; the elements of a row stay together if axis 0 of both shapes counts rows."""
    sizes_known = node.shapes[0] is not None and None not in (*node.shapes[0], *node.output_shape)
    return node.only_first_has_rows(1) and sizes_known


def unsqueeze_keeps_rows(node: RowNode) -> bool:
    """Accept a new axis after axis 0."""
    return node.only_first_has_rows() and excludes_batch_axis(node, node.numbers(1, "axes"), len(node.output_shape))


def expand_keeps_rows(node: RowNode) -> bool:
    """Accept the expansion of rows, or of a FIXED tensor, to a larger shape."""
    shape = node.shapes[0]
    if node.kind(1) == ROWS or shape is None:
        return False
    if node.kind(0) == ROWS:
        return len(shape) == len(node.output_shape) and shape[0] == node.output_shape[0]
    return len(shape) < len(node.output_shape) or shape[0] == 1


def matmul_keeps_rows(node: RowNode) -> bool:
    """Accept products that do not sum over axis 0: rows times a matrix, or batches of matrices."""
    left_shape, right_shape = node.shapes
    if left_shape is None or right_shape is None:
        return False
    if node.kinds == [ROWS, FIXED]:
        has_batch_axis = len(right_shape) > MATRIX_RANK and len(right_shape) == len(node.output_shape)
        return len(left_shape) == len(node.output_shape) >= MATRIX_RANK and (not has_batch_axis or right_shape[0] == 1)
    return all(
        shape is not None and len(shape) > MATRIX_RANK for shape in node.shapes_of(ROWS)
    ) and broadcast_keeps_rows(node)
