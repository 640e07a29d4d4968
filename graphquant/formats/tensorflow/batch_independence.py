"""Decide if samples may be joined along axis 0 of every input of a TensorFlow model.

`graphquant.formats.batch_independence` proves it op by op, on a copy whose functions are inlined and whose weights and
variables have no data. TensorFlow infers the shapes of that copy. Models with loops or branches are never joined.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import networkx as nx

from graphquant.errors import ModelError
from graphquant.formats.batch_independence import (
    FIXED,
    MATRIX_RANK,
    ROW_COUNTS,
    ROWS,
    SIZE,
    GraphFacts,
    RowNode,
    RowRule,
    RowRuleTable,
    broadcast_keeps_rows,
    excludes_batch_axis,
    expand_keeps_rows,
    keeps_rows,
    matmul_keeps_rows,
    reduction_keeps_rows,
    reshape_keeps_rows,
    rows_are_independent,
    tile_keeps_rows,
    unsqueeze_keeps_rows,
)
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.session import infer_static_shapes
from graphquant.formats.tensorflow.values import type_number
from graphquant.ir import Graph, Op, TensorRef, paused_gc, reachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from graphquant.formats import InputSpec
    from graphquant.ir import Model, Shape


def _tf_range_given_keeps_rows(node: RowNode) -> bool:
    """Require a given range: without one the op computes it from all rows."""
    return node.only_first_has_rows() and bool(node.op.attrs.get("range_given", node.op.type.endswith("V3")))


def _tf_concat_keeps_rows(axis_input: int) -> Callable[[RowNode], bool]:
    """Return a rule for ops that concatenate along an axis; `axis_input` is the slot of the axis."""

    def concat_rule(node: RowNode) -> bool:
        axis_slot = axis_input % len(node.kinds)
        joined = [kind for slot, kind in enumerate(node.kinds) if slot != axis_slot]
        return set(joined) == {ROWS} and excludes_batch_axis(node, node.numbers(axis_slot, ""), len(node.output_shape))

    return concat_rule


def _tf_pack_keeps_rows(node: RowNode) -> bool:
    return set(node.kinds) == {ROWS} and excludes_batch_axis(
        node, [int(node.op.numeric_attr("axis", 0))], len(node.output_shape)
    )


def _tf_slice_keeps_rows(node: RowNode) -> bool:
    begin, size = node.numbers(1, ""), node.numbers(2, "")
    return node.only_first_has_rows() and (begin or [1])[0] == 0 and (size or [0])[0] == -1


def _tf_strided_slice_keeps_rows(node: RowNode) -> bool:
    """Require all of axis 0: a range without bounds, or a leading ellipsis."""
    masks = {name: int(node.op.numeric_attr(f"{name}_mask", 0)) for name in ("begin", "end", "ellipsis", "new_axis")}
    strides = node.numbers(3, "")
    if not node.only_first_has_rows() or not strides or masks["new_axis"]:
        return False
    if masks["ellipsis"] & 1:
        return len(strides) - 1 < node.rank()
    drops_axis = int(node.op.numeric_attr("shrink_axis_mask", 0)) & 1
    return bool(masks["begin"] & masks["end"] & 1) and not drops_axis and strides[0] == 1


def _tf_gather_keeps_rows(node: RowNode) -> bool:
    axes = node.numbers(2, "") if len(node.kinds) > MATRIX_RANK else [0]
    if node.op.numeric_attr("batch_dims", 0) or not axes:
        return False
    if node.kinds[:2] == [FIXED, ROWS]:  # rows of indices into a table
        return axes[0] == 0 and node.rank(1) > 0
    return node.only_first_has_rows() and excludes_batch_axis(node, axes)


def _tf_squeeze_keeps_rows(node: RowNode) -> bool:
    axes = node.op.attrs.get("squeeze_dims")
    if not node.only_first_has_rows() or not isinstance(axes, list | tuple):
        return False
    return excludes_batch_axis(node, [int(axis) for axis in axes])


def _tf_batch_matmul_keeps_rows(node: RowNode) -> bool:
    adjoint_slots = [slot for slot, name in enumerate(("adj_x", "adj_y")) if node.op.attrs.get(name, False)]
    transposes_rows = any(node.kind(slot) == ROWS and node.rank(slot) <= MATRIX_RANK for slot in adjoint_slots)
    return not transposes_rows and matmul_keeps_rows(node)


_ROW_KEEPING_OPS: Final = """
    Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil CheckNumerics ClipByValue Cos Cosh Elu Erf Erfc Exp Expm1 Floor
    Identity Inv IsFinite IsInf IsNan LeakyRelu Log Log1p LogicalNot Neg OnesLike PreventGradient Reciprocal Relu Relu6
    Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Snapshot Softplus Softsign Sqrt Square StopGradient Tan Tanh ZerosLike
    AvgPool AvgPool3D BiasAdd BiasAddV1 Conv2D Conv3D DepthToSpace DepthwiseConv2dNative LRN MaxPool MaxPool3D
    MaxPoolV2 SpaceToDepth
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel
"""

_BROADCASTING_OPS: Final = """
    Add AddN AddV2 Atan2 Div DivNoNan Equal FloorDiv FloorMod Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr
    Maximum Minimum Mod Mul MulNoNan NotEqual Pow RealDiv SelectV2 SquaredDifference Sub Xdivy Xlogy
"""

_ROW_RULES: Final[Mapping[str, RowRule]] = {
    **dict.fromkeys(_ROW_KEEPING_OPS.split(), keeps_rows),
    **dict.fromkeys(_BROADCASTING_OPS.split(), broadcast_keeps_rows),
    **dict.fromkeys(
        ("All", "Any", "ArgMax", "ArgMin", "Cumsum", "Max", "Mean", "Min", "Prod", "Sum"), reduction_keeps_rows
    ),
    **dict.fromkeys(
        ("LogSoftmax", "Softmax", "TopK", "TopKV2"),
        lambda node: node.only_first_has_rows() and excludes_batch_axis(node, [-1]),
    ),
    **dict.fromkeys(
        ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"),
        lambda node: node.only_first_has_rows() and not node.op.attrs.get("is_training", True),
    ),
    **dict.fromkeys((f"QuantizeAndDequantizeV{version}" for version in (2, 3, 4)), _tf_range_given_keeps_rows),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _tf_batch_matmul_keeps_rows),
    **dict.fromkeys(("Gather", "GatherV2", "ResourceGather"), _tf_gather_keeps_rows),
    **dict.fromkeys(
        ("MirrorPad", "Pad", "PadV2"),
        lambda node: node.only_first_has_rows() and (node.numbers(1, "") or [])[:2] == [0, 0],
    ),
    **dict.fromkeys(
        ("ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor"), lambda node: node.only_first_has_rows(1)
    ),
    "BroadcastTo": expand_keeps_rows,
    "Concat": _tf_concat_keeps_rows(0),
    "ConcatV2": _tf_concat_keeps_rows(-1),
    "Conv2DBackpropInput": lambda node: node.kind(0) in {FIXED, SIZE} and node.kinds[1:] == [FIXED, ROWS],
    "ExpandDims": unsqueeze_keeps_rows,
    "Fill": lambda node: node.kinds == [SIZE, FIXED],
    "MatMul": lambda node: node.kinds == [ROWS, FIXED] and not node.op.attrs.get("transpose_a", False),
    "Pack": _tf_pack_keeps_rows,
    "Reshape": reshape_keeps_rows,
    "Slice": _tf_slice_keeps_rows,
    "Split": lambda node: node.kinds == [FIXED, ROWS] and excludes_batch_axis(node, node.numbers(0, ""), node.rank(1)),
    "SplitV": lambda node: node.only_first_has_rows() and excludes_batch_axis(node, node.numbers(2, "")),
    "Squeeze": _tf_squeeze_keeps_rows,
    "StridedSlice": _tf_strided_slice_keeps_rows,
    "Tile": tile_keeps_rows,
    "Transpose": lambda node: node.only_first_has_rows() and (node.numbers(1, "") or [])[:1] == [0],
    "Unpack": lambda node: (
        node.only_first_has_rows() and excludes_batch_axis(node, [int(node.op.numeric_attr("axis", 0))])
    ),
}

_SIZE_ONLY_OPS: Final = """
    Add AddV2 Cast ConcatV2 ExpandDims FloorDiv GatherV2 Identity Maximum Minimum Mul Pack Prod Reshape Slice Squeeze
    StridedSlice Sub
"""

TF_ROW_RULES: Final = RowRuleTable(
    rules=_ROW_RULES,
    shape_ops=frozenset({"Shape", "Size"}),
    size_ops=frozenset(_SIZE_ONLY_OPS.split()),
    fill_ops=frozenset({"BroadcastTo", "Fill"}),
)


MIXING_KINDS: Final = frozenset(
    {"enter", "exit", "if", "loop_cond", "merge", "next_iteration", "random", "switch", "while"}
)
"""Op kinds that rule batching out, wherever they occur. They are checked before any work is done."""

MAX_OPS: Final = 1 << 17
"""Limit on the ops of a model whose functions are inlined."""

MAX_SHAPE_ELEMENTS: Final = 1 << 10
"""Constants up to this many elements keep their values, because they may be shapes or axes."""


@paused_gc()
def is_tf_batch_independent(
    tensorflow: Any, model: Model, inputs: Sequence[InputSpec], outputs: Iterable[TensorRef]
) -> bool:
    """Return True if samples may be joined along axis 0 of all `inputs` without changing any sample's outputs."""
    if not inputs or any(not spec.shape or spec.shape[0] is not None for spec in inputs):
        return False
    if any(op.kind in MIXING_KINDS for name in model.reachable_graphs() for op in model.graphs[name].ops()):
        return False
    inlined = _InlinedGraph(model)
    try:
        for position, tensor in enumerate(outputs):
            inlined.add_output(position, tensor)
    except _NotInlinableError:
        return False
    specs = (inlined.new_tensors.get(TensorRef("", spec.name)) for spec in inputs)
    input_names = [tensor.op for tensor in specs if tensor is not None]
    try:
        shapes = [infer_static_shapes(tensorflow, inlined.with_row_count(input_names, count)) for count in ROW_COUNTS]
    except ModelError:  # some row count does not fit the model
        return False
    facts = GraphFacts(
        inputs=frozenset(input_names),
        shape_of=lambda tensor, count_index: shapes[count_index].get((tensor.op, tensor.port)),
        value_of=inlined.constant_value,
    )
    return rows_are_independent(inlined.graph, facts, TF_ROW_RULES)


class _NotInlinableError(Exception):
    """The model cannot be inlined into one graph."""


class _InlinedGraph:
    """The ancestors of some tensors of a model as one graph with new names; functions are inlined.

    Attributes:
        graph: The graph.
        new_tensors: Tensors of this graph, by those of the main graph.
    """

    def __init__(self, model: Model) -> None:
        message = emit(model)
        graph_def = model.source.graph_def(message)
        self._model = model
        self._source_nodes = {"": {node.name: node for node in graph_def.node}}
        for function in graph_def.library.function:
            self._source_nodes[function.signature.name] = {node.name: node for node in function.node_def}
        self._graph_def = proto.GraphDef(versions=graph_def.versions)
        self.graph = Graph("", {})
        self.graph.graphs[""] = self.graph
        self.new_tensors: dict[TensorRef, TensorRef] = {}

    def add_output(self, position: int, tensor: TensorRef) -> None:
        """Add an output and its ancestors."""
        (source,) = self._inline_tensors("", [tensor], self.new_tensors, ())
        self.graph.add_op(Op(name=f"@{position}", kind="output", type="_Retval"), [source])

    def with_row_count(self, inputs: Sequence[str], rows: int) -> Any:
        """Return the GraphDef in which each of `inputs` has `rows` rows."""
        graph_def = proto.GraphDef()
        graph_def.CopyFrom(self._graph_def)
        input_names = set(inputs)
        for node in graph_def.node:
            if node.name in input_names:
                node.attr["shape"].shape.dim[0].size = rows
        return graph_def

    def constant_value(self, tensor: TensorRef) -> Callable[[], np.ndarray[Any, Any]] | None:
        """Return a reader of the value of a constant, also behind Identity ops; None for other tensors."""
        op = self.graph.op(tensor.op)
        while op.kind == "identity":
            (source,) = self.graph.slots(op.name)[:1]
            if source is None:
                return None
            op = self.graph.op(source.op)
        return op.read_value if op.kind == "constant" else None

    def _inline_tensors(
        self,
        graph_name: str,
        tensors: Iterable[TensorRef],
        new_tensors: dict[TensorRef, TensorRef],
        call_stack: tuple[str, ...],
    ) -> list[TensorRef]:
        """Add the ancestors of `tensors` of the graph `graph_name`; return the new tensors."""
        if graph_name in call_stack:
            raise _NotInlinableError
        graph, requested = self._model.graphs[graph_name], list(tensors)
        starts = (tensor.op for tensor in requested)
        ancestors = set(reachable(starts, lambda op: (slot.op for slot in graph.slots(op) if slot is not None)))
        for label in nx.topological_sort(graph.nx):
            if label in ancestors and TensorRef(graph_name, label) not in new_tensors:
                self._inline_op(graph, graph.op(label), new_tensors, (*call_stack, graph_name))
        return [new_tensors[tensor] for tensor in requested]

    def _inline_op(
        self, graph: Graph, op: Op, new_tensors: dict[TensorRef, TensorRef], call_stack: tuple[str, ...]
    ) -> None:
        slots = [None if slot is None else new_tensors[slot] for slot in graph.slots(op.name)]
        results = self._inline_call(op, slots, call_stack) if op.kind == "call" else self._copy_op(graph, op, slots)
        new_tensors.update((TensorRef(graph.name, op.name, port), tensor) for port, tensor in enumerate(results))

    def _inline_call(self, op: Op, slots: Sequence[TensorRef | None], call_stack: tuple[str, ...]) -> list[TensorRef]:
        if len(op.calls) != 1 or op.type not in {"PartitionedCall", "StatefulPartitionedCall"}:
            raise _NotInlinableError
        body = self._model.graphs[op.calls[0].graph]
        arguments = {
            TensorRef(body.name, label): slot
            for label, slot in zip(body.inputs, slots, strict=True)
            if slot is not None
        }
        results = [body.slots(label)[0] for label in body.outputs]
        connected = [result for result in results if result is not None]
        return self._inline_tensors(body.name, connected, arguments, call_stack)

    def _copy_op(self, graph: Graph, op: Op, slots: Sequence[TensorRef | None]) -> list[TensorRef]:
        if len(self.graph) >= MAX_OPS:
            raise _NotInlinableError
        name = f"n{len(self.graph)}"
        value = op.read_value if op.kind == "constant" else None
        drops_value = op.kind in {"constant", "read_variable"} and not self._keeps_value(op)
        node = self._graph_def.node.add(name=name)
        if drops_value or op.kind == "variable" or (op.kind == "input" and not slots):
            _make_placeholder(node, op.outputs[0].dtype, op.outputs[0].shape)
        else:
            node.op = op.type
            for key, attr in _public_attributes(self._source_nodes[graph.name].get(op.name)).items():
                node.attr[key].CopyFrom(attr)
            node.input.extend(f"{slot.op}:{slot.port}" for slot in slots if slot is not None)
        inputs = () if op.kind == "read_variable" else slots
        self.graph.add_op(replace(op, name=name, read_value=value, calls=(), source=None), inputs)
        return [TensorRef("", name, port) for port in range(len(op.outputs))]

    def _keeps_value(self, op: Op) -> bool:
        shape = op.outputs[0].shape
        return op.kind == "constant" and (shape is None or prod(size or 0 for size in shape) <= MAX_SHAPE_ELEMENTS)


def _public_attributes(node: Any) -> Mapping[str, Any]:
    if node is None:
        raise _NotInlinableError
    return {key: node.attr[key] for key in node.attr if not key.startswith("_")}


def _make_placeholder(node: Any, dtype: str | None, shape: Shape | None) -> None:
    """Turn `node` into a placeholder, for a value of which only the shape is needed."""
    node.op = "Placeholder"
    node.attr["dtype"].type = type_number(dtype or "float32")
    if shape is None:
        node.attr["shape"].shape.unknown_rank = True
    else:
        for size in shape:
            node.attr["shape"].shape.dim.add(size=-1 if size is None else size)
