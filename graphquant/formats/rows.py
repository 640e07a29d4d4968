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

COUNTS: Final = (1, 2, 3, 997)
"""Numbers of rows that shapes are known for; the last is far above a block's, so that no division hides it."""

FIXED: Final = "fixed"
SIZE: Final = "size"
ROWS: Final = "rows"

MATRIX: Final = 2
"""Rank of a matrix."""

_INTEGERS: Final = frozenset({"int32", "int64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a rule may ask about an op; lists have an entry for each input slot.

    Attributes:
        op: The op.
        opset: Opset of the default domain, 0 in a format that has none.
        kinds: FIXED, SIZE or ROWS; "" for an empty slot.
        shapes: Static shape for one row, None if unknown.
        values: Gives the value of a constant, None for all else.
        out: Static shape of the first output for one row.
    """

    op: Op
    opset: int
    kinds: Sequence[str]
    shapes: Sequence[Shape | None]
    values: Sequence[Callable[[], np.ndarray[Any, Any]] | None]
    out: Shape

    def kind(self, slot: int) -> str:
        """What input `slot` is."""
        return self.kinds[slot] if slot < len(self.kinds) else ""

    def rank(self, slot: int = 0) -> int:
        """Rank of input `slot`, 0 if it is not known."""
        shape = self.shapes[slot] if slot < len(self.shapes) else None
        return len(shape) if shape is not None else 0

    def numbers(self, slot: int, attr: str) -> list[Any] | None:
        """The numbers that a constant input or, in older opsets, an attribute gives; None if neither does."""
        if slot < len(self.kinds) and self.kinds[slot]:
            value = self.values[slot]
            found: Any = None if value is None else value().reshape(-1).tolist()
        else:
            found = self.op.attrs.get(attr)
            found = [found] if isinstance(found, int | float) else found
        return None if found is None else list(found)

    def others_fixed(self, *free: int) -> bool:
        """Whether input 0 has rows and all others are fixed, but for those in `free`, which may be sizes."""
        return self.kind(0) == ROWS and all(
            kind in {"", FIXED} or (kind == SIZE and slot in free) for slot, kind in enumerate(self.kinds) if slot
        )


Rule = Callable[[Node], bool]
"""Given an op of which at least one input has rows, tells whether its outputs have rows too.

What it need not ask is whether their axis 0 grows as it should: shapes are checked afterwards, for all ops alike. A
size may go only where it decides on nothing but the output's shape.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a format's ops do with rows.

    Attributes:
        rules: Rules by type of op.
        shapes: Types that tell the sizes of their input.
        sizes_only: Types that make sizes of sizes and what is fixed.
        from_sizes: Types that make rows, all of them alike, out of sizes and what is fixed.
        domains: Domains of the types.
    """

    rules: Mapping[str, Rule]
    shapes: frozenset[str]
    sizes_only: frozenset[str]
    from_sizes: frozenset[str]
    domains: frozenset[str] = frozenset({""})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is known of a graph beside its ops.

    Attributes:
        inputs: Names of the inputs that have rows.
        shape: The static shape of a tensor for that one of `COUNTS`, None if unknown.
        value: Gives the value of a tensor that is constant, None for others.
        opset: Opset of the default domain, 0 in a format that has none.
    """

    inputs: frozenset[str]
    shape: Callable[[TensorRef, int], Shape | None]
    value: Callable[[TensorRef], Callable[[], np.ndarray[Any, Any]] | None]
    opset: int = 0


def kept_apart(graph: Graph, shown: Shown, table: Table) -> bool:
    """Whether all inputs and outputs of `graph`, which has no loops, have rows, and nothing on the way mixes them."""
    walk = _Walk(graph, shown, table)
    return all(walk.holds(graph.op(name)) for name in graph.in_order())


class _Walk:
    """The three kinds of tensor in one graph."""

    def __init__(self, graph: Graph, shown: Shown, table: Table) -> None:
        self._graph = graph
        self._shown = shown
        self._table = table
        self._kinds: dict[TensorRef, str] = {}

    def holds(self, op: Op) -> bool:
        slots = self._graph.slots(op.name)
        kinds = ["" if tensor is None else self._kinds[tensor] for tensor in slots]
        if op.kind == "output":
            return all(kind == ROWS for kind in kinds)
        kind = self._kind(op, kinds, slots)
        read = self._graph.readers(op.name)
        for port, output in enumerate(op.outputs):
            tensor = TensorRef(self._graph.name, op.name, port)
            if port in read and (not kind or (kind == ROWS and not self._grows(tensor))):
                return False
            if port in read and kind == SIZE and output.dtype not in _INTEGERS:
                return False
            self._kinds[tensor] = kind
        return True

    def _kind(self, op: Op, kinds: Sequence[str], slots: Sequence[TensorRef | None]) -> str:
        """What the outputs of `op` are, "" if that is not known."""
        if op.kind in {"constant", "input"}:
            return ROWS if op.name in self._shown.inputs else FIXED
        known = op.domain in self._table.domains or op.kind in {"quantize", "dequantize"}
        if not known or op.kind in {"random", "stateful"}:
            return ""
        if ROWS not in kinds and SIZE not in kinds:
            return "" if op.kind == "dropout" else FIXED
        if op.type in self._table.shapes or (ROWS not in kinds and op.type in self._table.sizes_only):
            return SIZE
        return ROWS if self._has_rows(op, kinds, slots) else ""

    def _has_rows(self, op: Op, kinds: Sequence[str], slots: Sequence[TensorRef | None]) -> bool:
        rule = self._table.rules.get(op.type)
        node = self._node(op, kinds, slots)
        if node is None or rule is None or (ROWS not in kinds and op.type not in self._table.from_sizes):
            return False
        return rule(node)

    def _node(self, op: Op, kinds: Sequence[str], slots: Sequence[TensorRef | None]) -> Node | None:
        shape = self._shown.shape(TensorRef(self._graph.name, op.name), 0)
        if not shape:
            return None
        return Node(
            op=op,
            opset=self._shown.opset,
            kinds=kinds,
            shapes=[None if tensor is None else self._shown.shape(tensor, 0) for tensor in slots],
            values=[None if tensor is None else self._shown.value(tensor) for tensor in slots],
            out=shape,
        )

    def _grows(self, tensor: TensorRef) -> bool:
        """Whether axis 0 of `tensor` grows with the rows, and nothing else does."""
        first = self._shown.shape(tensor, 0)
        if not first or not first[0]:
            return False
        wanted = [(count * first[0], *first[1:]) for count in COUNTS]
        return wanted == [self._shown.shape(tensor, index) for index in range(len(COUNTS))]


# -- rules that formats share ----------------------------------------------------------------------


def plain(node: Node) -> bool:
    """Input 0 row by row, with fixed parameters."""
    return node.others_fixed()


def broadcast(node: Node) -> bool:
    """Elementwise over inputs whose axes 0 meet."""
    rank = len(node.out)
    rows = [shape for shape, kind in zip(node.shapes, node.kinds, strict=True) if kind == ROWS]
    fixed = [shape for shape, kind in zip(node.shapes, node.kinds, strict=True) if kind == FIXED]
    return (
        SIZE not in node.kinds
        and all(shape is not None and len(shape) == rank and shape[0] == node.out[0] for shape in rows)
        and all(shape is not None and (len(shape) < rank or shape[0] == 1) for shape in fixed)
    )


def beside(node: Node, axes: Sequence[int] | None, rank: int = 0) -> bool:
    """Whether `axes`, which may count from the end, are known and leave out axis 0."""
    rank = rank or node.rank()
    return bool(axes) and rank > 0 and all(0 < (axis + rank if axis < 0 else axis) < rank for axis in axes or ())


def reduced(node: Node) -> bool:
    """Axes that input 1 or, in older opsets, an attribute names, are no axis of rows."""
    return node.others_fixed() and beside(node, node.numbers(1, "axes"))


def tiled(node: Node) -> bool:
    """Axis 0 is not repeated."""
    repeats = node.numbers(1, "repeats")
    return node.others_fixed() and bool(repeats) and (repeats or [0])[0] == 1


def reshaped(node: Node) -> bool:
    """The elements of a row stay together if axis 0 of both counts rows, which asks for all sizes to be known."""
    known = node.shapes[0] is not None and None not in (*node.shapes[0], *node.out)
    return node.others_fixed(1) and known


def unsqueezed(node: Node) -> bool:
    """A new axis behind axis 0."""
    return node.others_fixed() and beside(node, node.numbers(1, "axes"), len(node.out))


def expanded(node: Node) -> bool:
    """Rows, or what is fixed, to a larger shape."""
    shape = node.shapes[0]
    if node.kind(1) == ROWS or shape is None:
        return False
    if node.kind(0) == ROWS:
        return len(shape) == len(node.out) and shape[0] == node.out[0]
    return len(shape) < len(node.out) or shape[0] == 1


def product(node: Node) -> bool:
    """A product whose axis 0 is not summed over: rows times a matrix, or batches of matrices."""
    first, second = node.shapes
    if first is None or second is None:
        return False
    if node.kinds == [ROWS, FIXED]:
        batched = len(second) > MATRIX and len(second) == len(node.out)
        return len(first) == len(node.out) >= MATRIX and (not batched or second[0] == 1)
    batches = [len(shape) > MATRIX for shape, kind in zip((first, second), node.kinds, strict=True) if kind == ROWS]
    return all(batches) and broadcast(node)
