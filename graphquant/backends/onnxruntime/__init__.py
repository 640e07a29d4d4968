"""Predict the integer ops of ONNX Runtime on a CPU by applying its optimizer steps to a copy of the model.

`passes` contains the steps before the selection of integer kernels, and `selectors` the selection. Both follow ONNX
Runtime at its default settings. `tests/backends/test_oracle.py` and `benchmarks/oracle.py` compare the predictions with
the optimized models that ONNX Runtime writes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from graphquant.backends.findings import UNJUDGED_KINDS, Backend, BrokenRule, Verdict
from graphquant.backends.onnxruntime.context import op_context
from graphquant.backends.onnxruntime.passes import convert_pairs_to_uint8, simplify_graph
from graphquant.backends.onnxruntime.selectors import ORT_SELECTORS
from graphquant.backends.onnxruntime.work import RemovedOps, WorkingCopy
from graphquant.ir import FLOAT_TYPES, paused_gc

if TYPE_CHECKING:
    from graphquant.backends.findings import RunStatus
    from graphquant.ir import Graph, Model, Op, OpKey


INTEGER_OP_TYPES = frozenset(
    {"ConvInteger", "MatMulInteger", "QGemm", "MatMulIntegerToFloat", "MatMulNBits", "DynamicQuantizeMatMul"}
)
"""Op types that compute on integers by definition, in addition to the QLinear types."""

LOW_PRECISION_DTYPES = frozenset({"int8", "uint8", "int16", "uint16"})
"""Integer types that count as low precision. Wider ones are indices and shapes."""

NO_KERNEL_RULE = "no-kernel"


def predict_onnxruntime(model: Model, *, int8: bool = False) -> tuple[Verdict, ...]:
    """Predict the execution of each op of a live graph that computes on floats or is an integer op by definition.

    Args:
        model: An ONNX model. It is not modified.
        int8: Whether kernels accept int8 activations, as on ARM. On x86, Q/DQ pairs are converted to uint8 where
            possible.
    """
    removed = RemovedOps()
    with paused_gc():
        work = WorkingCopy(model)
        for name in model.reachable_graphs():
            simplify_graph(work, work.model.graphs[name], removed)
            if not int8:
                convert_pairs_to_uint8(work, work.model.graphs[name])
    outcomes = _predict_outcomes(work, removed, int8=int8)
    return tuple(
        _ort_verdict(removed, outcomes, graph, op)
        for graph in map(model.graphs.__getitem__, model.reachable_graphs())
        for op in graph.ops()
        if _ort_needs_verdict(work, graph, op)
    )


def _predict_outcomes(work: WorkingCopy, removed: RemovedOps, *, int8: bool) -> dict[OpKey, str | BrokenRule]:
    """Return the integer op that each op becomes, or the rule that it breaks.

    Fused Relu and Clip ops enter `removed`.
    """
    outcomes: dict[OpKey, str | BrokenRule] = {}
    for name in work.model.reachable_graphs():
        graph = work.model.graphs[name]
        for op in graph.ops():
            if op.kind in UNJUDGED_KINDS:
                continue
            outcomes[name, op.name] = _predict_outcome(work, removed, graph, op, int8=int8)
    return outcomes


def _predict_outcome(work: WorkingCopy, removed: RemovedOps, graph: Graph, op: Op, *, int8: bool) -> str | BrokenRule:
    if _is_integer_op(op):
        return op.type
    if dtype := _integer_input_dtype(graph, op):
        return f"{op.type} on {dtype}"
    if op.domain or op.type not in ORT_SELECTORS:
        message = f"ONNX Runtime has no integer kernel for {op.type}"
        return BrokenRule(NO_KERNEL_RULE, message, "keep it in float, and quantize only the ops around it")
    context = op_context(work, graph, op, int8=int8)
    if isinstance(context, BrokenRule):
        return context
    outcome = ORT_SELECTORS[op.type](context)
    if context.clip and isinstance(outcome, str):
        removed.host_names[graph.name, context.clip] = op.name
    return outcome


def _is_integer_op(op: Op) -> bool:
    return op.type.startswith("QLinear") or op.type in INTEGER_OP_TYPES


def _integer_input_dtype(graph: Graph, op: Op) -> str:
    """Return the low-precision integer type that an op of the model itself reads, or ""."""
    tensor = next(iter(graph.slots(op.name)), None)
    dtype = None if tensor is None else graph.output(tensor).dtype
    return dtype if dtype in LOW_PRECISION_DTYPES else ""


def _ort_needs_verdict(work: WorkingCopy, graph: Graph, op: Op) -> bool:
    """Return whether an op gets a verdict: an integer op, or an op other than a quantization that uses floats."""
    if op.kind in UNJUDGED_KINDS:
        return False
    if _is_integer_op(op) or _integer_input_dtype(graph, op):
        return True
    tensors = [tensor for tensor in graph.slots(op.name) if tensor is not None]
    dtypes = {graph.output(tensor).dtype for tensor in tensors} | {output.dtype for output in op.outputs}
    if dtypes.isdisjoint(FLOAT_TYPES) and not (None in dtypes and op.type in ORT_SELECTORS):
        return False
    return not tensors or not all(work.is_constant(tensor) for tensor in tensors)


def _ort_verdict(removed: RemovedOps, outcomes: dict[OpKey, str | BrokenRule], graph: Graph, op: Op) -> Verdict:
    """Return the verdict on an op of the model, from its own outcome or the outcome of the op that does its work."""
    key = graph.name, op.name
    host_name, host_key = removed.host_names.get(key), key
    while host_key in removed.host_names:
        host_key = graph.name, removed.host_names[host_key]
    outcome = outcomes.get(host_key, "")
    status: RunStatus = "int8" if host_name is None else "fused"
    if isinstance(outcome, BrokenRule) or not outcome:
        if key in removed.host_types:
            outcome = removed.host_types[key]
        elif isinstance(outcome, BrokenRule):
            return _make_ort_verdict(graph, op, "float", op.type, outcome)
    return _make_ort_verdict(graph, op, status, str(outcome), None)


def _make_ort_verdict(graph: Graph, op: Op, status: RunStatus, runs_as: str, broken_rule: BrokenRule | None) -> Verdict:
    return Verdict(graph=graph.name, op=op.name, type=op.type, status=status, runs_as=runs_as, broken_rule=broken_rule)


ORT_FUSABLE_KINDS = dict.fromkeys(
    ("conv", "depthwise_conv", "matmul", "gemm", "add", "mul"), frozenset({"relu", "relu6", "clip"})
)
"""Kinds of activations that are fused with an op of each kind if no quantization is between them."""

ONNXRUNTIME = Backend(
    name="onnxruntime",
    description="CPU kernels of ONNX Runtime on x86",
    predict=predict_onnxruntime,
    fuses=ORT_FUSABLE_KINDS,
)
ONNXRUNTIME_ARM = Backend(
    name="onnxruntime-arm",
    description="CPU kernels of ONNX Runtime on ARM, which accept int8 activations",
    predict=partial(predict_onnxruntime, int8=True),
    fuses=ORT_FUSABLE_KINDS,
)
