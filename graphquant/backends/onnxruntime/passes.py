"""Optimizer steps of ONNX Runtime before the selection of integer kernels, in its order.

Each step takes the working copy and one of its graphs, and returns whether it changed anything. `RemovedOps` records
the op that does the work of a removed one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.backends.onnxruntime.context import fuse_clips, quantize_float_bias, quantize_where_scalar
from graphquant.backends.onnxruntime.work import FIRST_OPSET, is_dq, is_q, op_names
from graphquant.ir import FLOAT_TYPES, NO_ATTRS, Op, Output, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.backends.onnxruntime.work import RemovedOps, WorkingCopy
    from graphquant.ir import Graph

    NamedSizes = tuple[int | str | None, ...]


MAX_ROUNDS = 10
"""Maximum number of rounds of ONNX Runtime over a graph."""

PROPAGATING_TYPES = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"})
"""Op types that a quantization can move past, so that they need none of their own on the other side."""


def simplify_graph(working_copy: WorkingCopy, graph: Graph, removed_ops: RemovedOps) -> None:
    """Apply all steps until nothing changes."""
    _fold_static_shapes(working_copy, graph)
    _duplicate_dq_per_reader(working_copy, graph)
    for _ in range(MAX_ROUNDS):
        changed = [step(working_copy, graph, removed_ops) for step in _ORT_STEPS]
        if not any(changed):
            break
    fuse_clips(working_copy, graph, removed_ops)


def _fold_static_shapes(working_copy: WorkingCopy, graph: Graph) -> None:
    """Disconnect each Shape whose result is static, because it becomes a constant."""
    for name in op_names(graph, lambda op: op.kind == "shape"):
        input_tensor = working_copy.slot_tensor(graph, name, 0)
        sizes = working_copy.static_shape(input_tensor) if input_tensor is not None else None
        if sizes is not None and None not in sizes:
            graph.set_source(Use(graph.name, name, 0), None)


def _remove_identities(working_copy: WorkingCopy, graph: Graph, removed_ops: RemovedOps) -> bool:
    """Remove Identity and Dropout unless a graph output needs their name."""
    changed = False
    for name in op_names(graph, lambda op: op.kind in {"identity", "dropout"}):
        source = working_copy.slot_tensor(graph, name, 0)
        if source is None or len(graph.consumers_by_port(name)) > 1 or 0 not in graph.consumers_by_port(name):
            continue
        home_graph = graph.graphs[source.graph]
        if working_copy.is_output(graph, name) and (
            source.graph != graph.name
            or home_graph.op(source.op).kind in {"input", "constant"}
            or len(working_copy.all_uses(home_graph, source.op)) > 1
        ):
            continue
        removed_ops.host_names[graph.name, name] = ""
        working_copy.bypass(graph, name)
        changed = True
    return changed


def _merge_double_pairs(working_copy: WorkingCopy, graph: Graph, _removed_ops: RemovedOps) -> bool:
    """Remove the inner two of Q, DQ, Q, DQ in a row."""
    changed = False
    for name in op_names(graph, is_dq):
        first_q = working_copy.producer(graph, name, 0)
        second_q_use = working_copy.only_use(graph, name)
        if first_q is None or not is_q(first_q) or second_q_use is None or not is_q(graph.op(second_q_use.op)):
            continue
        if working_copy.is_folded(graph, first_q.name):
            continue
        last_use = working_copy.only_use(graph, second_q_use.op)
        if working_copy.only_use(graph, first_q.name) is None or last_use is None or not is_dq(graph.op(last_use.op)):
            continue
        first_dtype, second_dtype = (
            working_copy.integer_dtype(graph, name),
            working_copy.integer_dtype(graph, second_q_use.op),
        )
        params_match = working_copy.same_params(graph, first_q.name, name) and working_copy.same_params(
            graph, second_q_use.op, last_use.op
        )
        if not params_match or first_dtype != second_dtype or first_dtype not in {"int8", "uint8"}:
            continue
        _merge_pair_ranges(working_copy, graph, (first_q.name, name, second_q_use.op, last_use.op), first_dtype)
        graph.set_source(last_use, TensorRef(graph.name, first_q.name))
        working_copy.drop(graph, second_q_use.op)
        working_copy.drop(graph, name)
        changed = True
    return changed


def _merge_pair_ranges(working_copy: WorkingCopy, graph: Graph, chain: tuple[str, str, str, str], dtype: str) -> None:
    """Give the outer Q and DQ the intersection of the ranges of both pairs."""
    lowest, highest = (-128, 127) if dtype == "int8" else (0, 255)
    ends = []
    for name in chain[1:3]:
        _, scale_tensor, zero_tensor = working_copy.qdq_inputs(graph, name)
        step, zero_value = working_copy.scalar_value(scale_tensor) or 0.0, working_copy.scalar_value(zero_tensor) or 0.0
        ends.append(((lowest - zero_value) * step, (highest - zero_value) * step))
    if ends[0] == ends[1]:
        return
    low, high = max(ends[0][0], ends[1][0]), min(ends[0][1], ends[1][1])
    scale = (high - low) / (highest - lowest)
    zero = round(lowest - low / scale) if scale else lowest
    for name in (chain[0], chain[3]):
        float_output = Output("", "float32", ())
        graph.set_source(
            Use(graph.name, name, 1),
            working_copy.add_placeholder(graph, f"{name}/scale", "float32", float_output, scale),
        )
        zero_value = min(max(zero, lowest), highest)
        graph.set_source(
            Use(graph.name, name, 2),
            working_copy.add_placeholder(graph, f"{name}/zero", dtype, float_output, zero_value),
        )


def _merge_equal_quantizations(working_copy: WorkingCopy, graph: Graph, _removed_ops: RemovedOps) -> bool:
    """Merge quantizations of one tensor with equal parameters."""
    first_by_key: dict[tuple[object, ...], str] = {}
    changed = False
    for name in op_names(graph, is_q):
        data, scale, zero = working_copy.qdq_inputs(graph, name)
        if (
            not working_copy.has_scalar_params(graph, name)
            or working_copy.is_output(graph, name)
            or working_copy.is_folded(graph, name)
        ):
            continue
        key = (
            data,
            working_copy.scalar_value(scale),
            None if zero is None else working_copy.scalar_value(zero),
            working_copy.integer_dtype(graph, name),
        )
        equal_name = first_by_key.setdefault(key, name)
        if equal_name != name:
            for use in working_copy.all_uses(graph, name):
                working_copy.model.graphs[use.graph].set_source(use, TensorRef(graph.name, equal_name))
            working_copy.drop(graph, name)
            changed = True
    return changed


def _duplicate_dq_per_reader(working_copy: WorkingCopy, graph: Graph, _removed_ops: RemovedOps | None = None) -> bool:
    """Give each reader its own DequantizeLinear.

    One that is a graph output or is read in a subgraph keeps only those uses.
    """
    changed = False
    for name in op_names(graph, is_dq):
        uses = working_copy.all_uses(graph, name)
        local_uses = [use for use in uses if use.graph == graph.name and graph.op(use.op).kind != "output"]
        kept_count = 1 if len(local_uses) == len(uses) else 0
        for use in local_uses[kept_count:]:
            graph.set_source(use, working_copy.add_like(graph, graph.op(name), name, graph.slots(name)))
            changed = True
    return changed


def _fuse_matmul_add(working_copy: WorkingCopy, graph: Graph, removed_ops: RemovedOps) -> bool:
    """Fuse MatMul and the Add of a bias into a Gemm, between Reshapes if the input does not have two axes.

    The bias need not be constant. Of two products that are added, the last one takes the other as its bias.
    """
    changed = False
    for name in reversed(op_names(graph, lambda op: op.type == "MatMul" and not op.domain)):
        use = working_copy.only_use(graph, name)
        if use is None or graph.op(use.op).type != "Add":
            continue
        left_tensor, right_tensor = working_copy.slot_tensor(graph, name, 0), working_copy.slot_tensor(graph, name, 1)
        bias = working_copy.slot_tensor(graph, use.op, 1 - use.slot)
        if (
            left_tensor is None
            or right_tensor is None
            or bias is None
            or graph.output(left_tensor).dtype not in FLOAT_TYPES | {None}
        ):
            continue
        left_sizes, right_sizes, bias_sizes = (
            working_copy.named_sizes(tensor) for tensor in (left_tensor, right_tensor, bias)
        )
        if (
            not left_sizes
            or right_sizes is None
            or bias_sizes is None
            or len(right_sizes) != 2  # noqa: PLR2004  # a matrix
            or not _is_gemm_bias_shape(left_sizes, right_sizes, bias_sizes)
        ):
            continue
        if len(left_sizes) != 2 and not all(isinstance(size, int) for size in (*left_sizes, *right_sizes)):  # noqa: PLR2004  # the same
            continue
        _convert_to_gemm(working_copy, graph, name, use.op, bias)
        removed_ops.host_names[graph.name, use.op] = name
        changed = True
    return changed


def _is_gemm_bias_shape(left_sizes: NamedSizes, right_sizes: NamedSizes, bias_sizes: NamedSizes) -> bool:
    """Return whether Gemm can add a bias of these sizes to the product of these sizes."""
    columns = right_sizes[1]
    if len(bias_sizes) == 1:
        return bias_sizes[0] == columns and columns is not None
    if len(left_sizes) != 2 or len(bias_sizes) != 2:  # noqa: PLR2004  # a matrix
        return False
    return (bias_sizes[0] == 1 and bias_sizes[1] == columns) or (
        bias_sizes[0] == left_sizes[0] is not None and bias_sizes[1] in {1, columns}
    )


def _convert_to_gemm(working_copy: WorkingCopy, graph: Graph, name: str, add: str, bias: TensorRef) -> None:
    matmul = graph.op(name)
    left_tensor = working_copy.slot_tensor(graph, name, 0)
    readers = working_copy.all_uses(graph, add)
    sum_output = graph.output(TensorRef(graph.name, add))
    graph.replace_op(replace(matmul, kind="gemm", type="Gemm", attrs=NO_ATTRS, roles=("input", "weight", "bias")))
    for use in readers:
        working_copy.model.graphs[use.graph].set_source(use, TensorRef(graph.name, name))
    working_copy.drop(graph, add)
    working_copy.set_label(TensorRef(graph.name, name), TensorRef(graph.name, add))
    graph.set_source(Use(graph.name, name, 2), bias)
    sizes = working_copy.static_shape(left_tensor) if left_tensor is not None else None
    if sizes is None or len(sizes) == 2:  # noqa: PLR2004  # a matrix
        return
    rows = math.prod(size or 1 for size in sizes[:-1])
    flat_output = Output("", sum_output.dtype, (rows, sizes[-1]))
    reshape = Op(name="", kind="reshape", type="Reshape", roles=("input", "shape"), outputs=(flat_output,))
    shape = working_copy.add_placeholder(graph, f"{name}/shape", "int64", Output("", "int64", (2,)))
    flat_tensor = working_copy.add_like(graph, reshape, f"{name}/in", [left_tensor, shape])
    working_copy.set_label(flat_tensor, left_tensor or flat_tensor)
    graph.set_source(Use(graph.name, name, 0), flat_tensor)
    restore_reshape = replace(reshape, outputs=(sum_output,))
    restored_tensor = working_copy.add_like(graph, restore_reshape, f"{name}/out", [TensorRef(graph.name, name), shape])
    working_copy.set_label(restored_tensor, TensorRef(graph.name, add))
    for use in readers:
        working_copy.model.graphs[use.graph].set_source(use, restored_tensor)


def _merge_reshapes(working_copy: WorkingCopy, graph: Graph, removed_ops: RemovedOps) -> bool:
    """Remove the first of two consecutive Reshapes if the shape after the second is known."""
    changed = False
    for name in op_names(graph, lambda op: op.type == "Reshape" and not op.domain):
        if name not in graph:
            continue
        previous_op = working_copy.producer(graph, name, 0)
        shape = graph.op(name).outputs[0].shape
        if previous_op is None or previous_op.type != "Reshape" or shape is None or None in shape:
            continue
        if working_copy.only_use(graph, previous_op.name) is not None:
            removed_ops.host_names[graph.name, previous_op.name] = name
            working_copy.bypass(graph, previous_op.name)
            changed = True
    return changed


def _may_propagate(working_copy: WorkingCopy, op: Op) -> bool:
    is_propagating_type = op.type in PROPAGATING_TYPES and not op.domain
    return is_propagating_type and working_copy.model.opset >= FIRST_OPSET.get(op.type, 0)


def _propagate_dq_forward(working_copy: WorkingCopy, graph: Graph, _removed_ops: RemovedOps) -> bool:
    """Insert a pair after each op that a DequantizeLinear can move past, unless its output is already quantized."""
    changed = False
    for name in op_names(graph, is_dq):
        use = working_copy.only_use(graph, name)
        if use is None or not working_copy.has_scalar_params(graph, name):
            continue
        pending = [use.op]
        while pending:
            op_name = pending.pop()
            if not _may_propagate(working_copy, graph.op(op_name)):
                continue
            uses = graph.consumers_by_port(op_name).get(0, [])
            inner_uses = [
                use_of_output
                for use_of_output in uses
                if working_copy.model.graphs[use_of_output.graph].op(use_of_output.op).kind != "output"
            ]
            if inner_uses and len(inner_uses) != len(uses):
                continue
            if not uses or any(
                is_q(working_copy.model.graphs[use_of_output.graph].op(use_of_output.op)) for use_of_output in uses
            ):
                continue
            working_copy.insert_pair(graph, TensorRef(graph.name, op_name), uses, name)
            changed = True
            pending += [
                use_of_output.op
                for use_of_output in uses
                if use_of_output.graph == graph.name and graph.op(use_of_output.op).kind != "output"
            ]
    return changed


def _propagate_q_backward(working_copy: WorkingCopy, graph: Graph, _removed_ops: RemovedOps) -> bool:
    """Insert a pair before each op that a QuantizeLinear can move past, unless there is one."""
    changed = False
    for name in op_names(graph, is_q):
        if not working_copy.has_scalar_params(graph, name) or working_copy.is_folded(graph, name):
            continue
        current_use = Use(graph.name, name, 0)
        while True:
            tensor = graph.source_of(current_use)
            if tensor is None or tensor.graph != graph.name or len(working_copy.all_uses(graph, tensor.op)) != 1:
                break
            op = graph.op(tensor.op)
            if not _may_propagate(working_copy, op):
                break
            current_use = Use(graph.name, op.name, 0)
            input_tensor = graph.source_of(current_use)
            if (
                input_tensor is None
                or input_tensor.graph != graph.name
                or is_dq(graph.op(input_tensor.op))
                or working_copy.is_constant(input_tensor)
            ):
                break
            is_graph_input = graph.op(input_tensor.op).kind == "input"
            if not is_graph_input and len(graph.consumers(input_tensor)) != 1:
                break
            inserted = working_copy.insert_pair(graph, input_tensor, [current_use], name)
            changed = True
            if is_graph_input:
                break
            inserted_q = working_copy.producer(graph, inserted[0].op, 0)
            if inserted_q is None:
                break
            current_use = Use(graph.name, inserted_q.name, 0)
    return changed


def convert_pairs_to_uint8(working_copy: WorkingCopy, graph: Graph) -> None:
    """Convert int8 pairs whose QuantizeLinear has one reader to uint8, because x86 kernels need uint8 activations."""
    for name in op_names(graph, is_q):
        use = working_copy.only_use(graph, name)
        if use is None or not is_dq(graph.op(use.op)) or working_copy.integer_dtype(graph, name) != "int8":
            continue
        if working_copy.is_folded(graph, name):
            continue
        zero_values = [
            working_copy.scalar_value(working_copy.qdq_inputs(graph, pair_name)[2]) for pair_name in (name, use.op)
        ]
        if (
            zero_values[0] is None
            or zero_values[0] != zero_values[1]
            or not working_copy.is_local_constant(graph, working_copy.qdq_inputs(graph, name)[2])
        ):
            continue
        op = graph.op(name)
        graph.replace_op(replace(op, outputs=(replace(op.outputs[0], dtype="uint8"),)))
        for pair_name in (name, use.op):
            zero_tensor = working_copy.add_placeholder(
                graph, f"{pair_name}/zero", "uint8", Output("", "uint8", ()), zero_values[0] + 128
            )
            graph.set_source(Use(graph.name, pair_name, 2), zero_tensor)


_ORT_STEPS: tuple[Callable[[WorkingCopy, Graph, RemovedOps], bool], ...] = (
    _remove_identities,
    _merge_double_pairs,
    _merge_equal_quantizations,
    _fuse_matmul_add,
    _merge_reshapes,
    _propagate_dq_forward,
    _propagate_q_backward,
    quantize_float_bias,
    quantize_where_scalar,
    _duplicate_dq_per_reader,
)
