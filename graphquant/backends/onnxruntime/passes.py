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


def simplify_graph(work: WorkingCopy, graph: Graph, removed: RemovedOps) -> None:
    """Apply all steps until nothing changes."""
    _fold_static_shapes(work, graph)
    _duplicate_dq_per_reader(work, graph)
    for _ in range(MAX_ROUNDS):
        changed = [step(work, graph, removed) for step in _ORT_STEPS]
        if not any(changed):
            break
    fuse_clips(work, graph, removed)


def _fold_static_shapes(work: WorkingCopy, graph: Graph) -> None:
    """Disconnect each Shape whose result is static, because it becomes a constant."""
    for name in op_names(graph, lambda op: op.kind == "shape"):
        input_tensor = work.slot_tensor(graph, name, 0)
        sizes = work.static_shape(input_tensor) if input_tensor is not None else None
        if sizes is not None and None not in sizes:
            graph.set_source(Use(graph.name, name, 0), None)


def _remove_identities(work: WorkingCopy, graph: Graph, removed: RemovedOps) -> bool:
    """Remove Identity and Dropout unless a graph output needs their name."""
    changed = False
    for name in op_names(graph, lambda op: op.kind in {"identity", "dropout"}):
        source = work.slot_tensor(graph, name, 0)
        if source is None or len(graph.consumers_by_port(name)) > 1 or 0 not in graph.consumers_by_port(name):
            continue
        home_graph = graph.graphs[source.graph]
        if work.is_output(graph, name) and (
            source.graph != graph.name
            or home_graph.op(source.op).kind in {"input", "constant"}
            or len(work.all_uses(home_graph, source.op)) > 1
        ):
            continue
        removed.host_names[graph.name, name] = ""
        work.bypass(graph, name)
        changed = True
    return changed


def _merge_double_pairs(work: WorkingCopy, graph: Graph, _removed: RemovedOps) -> bool:
    """Remove the inner two of Q, DQ, Q, DQ in a row."""
    changed = False
    for name in op_names(graph, is_dq):
        first_q = work.producer(graph, name, 0)
        second_q_use = work.only_use(graph, name)
        if first_q is None or not is_q(first_q) or second_q_use is None or not is_q(graph.op(second_q_use.op)):
            continue
        if work.is_folded(graph, first_q.name):
            continue
        last_use = work.only_use(graph, second_q_use.op)
        if work.only_use(graph, first_q.name) is None or last_use is None or not is_dq(graph.op(last_use.op)):
            continue
        first_dtype, second_dtype = (
            work.integer_dtype(graph, name),
            work.integer_dtype(graph, second_q_use.op),
        )
        params_match = work.same_params(graph, first_q.name, name) and work.same_params(
            graph, second_q_use.op, last_use.op
        )
        if not params_match or first_dtype != second_dtype or first_dtype not in {"int8", "uint8"}:
            continue
        _merge_pair_ranges(work, graph, (first_q.name, name, second_q_use.op, last_use.op), first_dtype)
        graph.set_source(last_use, TensorRef(graph.name, first_q.name))
        work.drop(graph, second_q_use.op)
        work.drop(graph, name)
        changed = True
    return changed


def _merge_pair_ranges(work: WorkingCopy, graph: Graph, chain: tuple[str, str, str, str], dtype: str) -> None:
    """Give the outer Q and DQ the intersection of the ranges of both pairs."""
    lowest, highest = (-128, 127) if dtype == "int8" else (0, 255)
    ends = []
    for name in chain[1:3]:
        _, scale_tensor, zero_tensor = work.qdq_inputs(graph, name)
        step, zero_value = work.scalar_value(scale_tensor) or 0.0, work.scalar_value(zero_tensor) or 0.0
        ends.append(((lowest - zero_value) * step, (highest - zero_value) * step))
    if ends[0] == ends[1]:
        return
    low, high = max(ends[0][0], ends[1][0]), min(ends[0][1], ends[1][1])
    scale = (high - low) / (highest - lowest)
    zero = round(lowest - low / scale) if scale else lowest
    for name in (chain[0], chain[3]):
        spec = Output("", "float32", ())
        graph.set_source(
            Use(graph.name, name, 1),
            work.add_placeholder(graph, f"{name}/scale", "float32", spec, scale),
        )
        zero_value = min(max(zero, lowest), highest)
        graph.set_source(
            Use(graph.name, name, 2),
            work.add_placeholder(graph, f"{name}/zero", dtype, spec, zero_value),
        )


def _merge_equal_quantizations(work: WorkingCopy, graph: Graph, _removed: RemovedOps) -> bool:
    """Merge quantizations of one tensor with equal parameters."""
    first_by_key: dict[tuple[object, ...], str] = {}
    changed = False
    for name in op_names(graph, is_q):
        data, scale, zero = work.qdq_inputs(graph, name)
        if not work.has_scalar_params(graph, name) or work.is_output(graph, name) or work.is_folded(graph, name):
            continue
        key = (
            data,
            work.scalar_value(scale),
            None if zero is None else work.scalar_value(zero),
            work.integer_dtype(graph, name),
        )
        equal_name = first_by_key.setdefault(key, name)
        if equal_name != name:
            for use in work.all_uses(graph, name):
                work.model.graphs[use.graph].set_source(use, TensorRef(graph.name, equal_name))
            work.drop(graph, name)
            changed = True
    return changed


def _duplicate_dq_per_reader(work: WorkingCopy, graph: Graph, _removed: RemovedOps | None = None) -> bool:
    """Give each reader its own DequantizeLinear.

    One that is a graph output or is read in a subgraph keeps only those uses.
    """
    changed = False
    for name in op_names(graph, is_dq):
        uses = work.all_uses(graph, name)
        local_uses = [use for use in uses if use.graph == graph.name and graph.op(use.op).kind != "output"]
        kept_count = 1 if len(local_uses) == len(uses) else 0
        for use in local_uses[kept_count:]:
            graph.set_source(use, work.add_like(graph, graph.op(name), name, graph.slots(name)))
            changed = True
    return changed


def _fuse_matmul_add(work: WorkingCopy, graph: Graph, removed: RemovedOps) -> bool:
    """Fuse MatMul and the Add of a bias into a Gemm, between Reshapes if the input does not have two axes.

    The bias need not be constant. Of two products that are added, the last one takes the other as its bias.
    """
    changed = False
    for name in reversed(op_names(graph, lambda op: op.type == "MatMul" and not op.domain)):
        use = work.only_use(graph, name)
        if use is None or graph.op(use.op).type != "Add":
            continue
        left_tensor, right_tensor = work.slot_tensor(graph, name, 0), work.slot_tensor(graph, name, 1)
        bias = work.slot_tensor(graph, use.op, 1 - use.slot)
        if (
            left_tensor is None
            or right_tensor is None
            or bias is None
            or graph.output(left_tensor).dtype not in FLOAT_TYPES | {None}
        ):
            continue
        left_sizes, right_sizes, bias_sizes = (work.named_sizes(tensor) for tensor in (left_tensor, right_tensor, bias))
        if (
            not left_sizes
            or right_sizes is None
            or bias_sizes is None
            or len(right_sizes) != 2  # noqa: PLR2004  # a matrix
            or not _is_gemm_bias_shape(left_sizes, right_sizes, bias_sizes)
        ):
            continue
        if len(left_sizes) != 2 and not all(isinstance(size, int) for size in (*left_sizes, *right_sizes)):  # noqa: PLR2004  # a matrix
            continue
        _convert_to_gemm(work, graph, name, use.op, bias)
        removed.host_names[graph.name, use.op] = name
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


def _convert_to_gemm(work: WorkingCopy, graph: Graph, name: str, add: str, bias: TensorRef) -> None:
    matmul = graph.op(name)
    left_tensor = work.slot_tensor(graph, name, 0)
    readers = work.all_uses(graph, add)
    sum_output = graph.output(TensorRef(graph.name, add))
    graph.replace_op(replace(matmul, kind="gemm", type="Gemm", attrs=NO_ATTRS, roles=("input", "weight", "bias")))
    for use in readers:
        work.model.graphs[use.graph].set_source(use, TensorRef(graph.name, name))
    work.drop(graph, add)
    work.set_label(TensorRef(graph.name, name), TensorRef(graph.name, add))
    graph.set_source(Use(graph.name, name, 2), bias)
    sizes = work.static_shape(left_tensor) if left_tensor is not None else None
    if sizes is None or len(sizes) == 2:  # noqa: PLR2004  # a matrix
        return
    rows = math.prod(size or 1 for size in sizes[:-1])
    flat_output = Output("", sum_output.dtype, (rows, sizes[-1]))
    reshape = Op(name="", kind="reshape", type="Reshape", roles=("input", "shape"), outputs=(flat_output,))
    shape = work.add_placeholder(graph, f"{name}/shape", "int64", Output("", "int64", (2,)))
    flat_tensor = work.add_like(graph, reshape, f"{name}/in", [left_tensor, shape])
    work.set_label(flat_tensor, left_tensor or flat_tensor)
    graph.set_source(Use(graph.name, name, 0), flat_tensor)
    restore_reshape = replace(reshape, outputs=(sum_output,))
    restored_tensor = work.add_like(graph, restore_reshape, f"{name}/out", [TensorRef(graph.name, name), shape])
    work.set_label(restored_tensor, TensorRef(graph.name, add))
    for use in readers:
        work.model.graphs[use.graph].set_source(use, restored_tensor)


def _merge_reshapes(work: WorkingCopy, graph: Graph, removed: RemovedOps) -> bool:
    """Remove the first of two consecutive Reshapes if the shape after the second is known."""
    changed = False
    for name in op_names(graph, lambda op: op.type == "Reshape" and not op.domain):
        if name not in graph:
            continue
        previous_op = work.producer(graph, name, 0)
        shape = graph.op(name).outputs[0].shape
        if previous_op is None or previous_op.type != "Reshape" or shape is None or None in shape:
            continue
        if work.only_use(graph, previous_op.name) is not None:
            removed.host_names[graph.name, previous_op.name] = name
            work.bypass(graph, previous_op.name)
            changed = True
    return changed


def _may_propagate(work: WorkingCopy, op: Op) -> bool:
    is_propagating_type = op.type in PROPAGATING_TYPES and not op.domain
    return is_propagating_type and work.model.opset >= FIRST_OPSET.get(op.type, 0)


def _propagate_dq_forward(work: WorkingCopy, graph: Graph, _removed: RemovedOps) -> bool:
    """Insert a pair after each op that a DequantizeLinear can move past, unless its output is already quantized."""
    changed = False
    for name in op_names(graph, is_dq):
        use = work.only_use(graph, name)
        if use is None or not work.has_scalar_params(graph, name):
            continue
        pending = [use.op]
        while pending:
            op_name = pending.pop()
            if not _may_propagate(work, graph.op(op_name)):
                continue
            uses = graph.consumers_by_port(op_name).get(0, [])
            inner_uses = [
                use_of_output
                for use_of_output in uses
                if work.model.graphs[use_of_output.graph].op(use_of_output.op).kind != "output"
            ]
            if inner_uses and len(inner_uses) != len(uses):
                continue
            if not uses or any(
                is_q(work.model.graphs[use_of_output.graph].op(use_of_output.op)) for use_of_output in uses
            ):
                continue
            work.insert_pair(graph, TensorRef(graph.name, op_name), uses, name)
            changed = True
            pending += [
                use_of_output.op
                for use_of_output in uses
                if use_of_output.graph == graph.name and graph.op(use_of_output.op).kind != "output"
            ]
    return changed


def _propagate_q_backward(work: WorkingCopy, graph: Graph, _removed: RemovedOps) -> bool:
    """Insert a pair before each op that a QuantizeLinear can move past, unless there is one."""
    changed = False
    for name in op_names(graph, is_q):
        if not work.has_scalar_params(graph, name) or work.is_folded(graph, name):
            continue
        current_use = Use(graph.name, name, 0)
        while True:
            tensor = graph.source_of(current_use)
            if tensor is None or tensor.graph != graph.name or len(work.all_uses(graph, tensor.op)) != 1:
                break
            op = graph.op(tensor.op)
            if not _may_propagate(work, op):
                break
            current_use = Use(graph.name, op.name, 0)
            input_tensor = graph.source_of(current_use)
            if (
                input_tensor is None
                or input_tensor.graph != graph.name
                or is_dq(graph.op(input_tensor.op))
                or work.is_constant(input_tensor)
            ):
                break
            is_graph_input = graph.op(input_tensor.op).kind == "input"
            if not is_graph_input and len(graph.consumers(input_tensor)) != 1:
                break
            inserted = work.insert_pair(graph, input_tensor, [current_use], name)
            changed = True
            if is_graph_input:
                break
            inserted_q = work.producer(graph, inserted[0].op, 0)
            if inserted_q is None:
                break
            current_use = Use(graph.name, inserted_q.name, 0)
    return changed


def convert_pairs_to_uint8(work: WorkingCopy, graph: Graph) -> None:
    """Convert int8 pairs whose QuantizeLinear has one reader to uint8, because x86 kernels need uint8 activations."""
    for name in op_names(graph, is_q):
        use = work.only_use(graph, name)
        if use is None or not is_dq(graph.op(use.op)) or work.integer_dtype(graph, name) != "int8":
            continue
        if work.is_folded(graph, name):
            continue
        zero_values = [work.scalar_value(work.qdq_inputs(graph, pair_name)[2]) for pair_name in (name, use.op)]
        if (
            zero_values[0] is None
            or zero_values[0] != zero_values[1]
            or not work.is_local_constant(graph, work.qdq_inputs(graph, name)[2])
        ):
            continue
        op = graph.op(name)
        graph.replace_op(replace(op, outputs=(replace(op.outputs[0], dtype="uint8"),)))
        for pair_name in (name, use.op):
            zero_tensor = work.add_placeholder(
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
