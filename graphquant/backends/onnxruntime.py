"""Ask the installed ONNX Runtime which ops it runs on integers, and name the rules that keep other ops in float.

The verdicts follow from the model that ONNX Runtime writes after its optimizations. Each op of the given model is
traced to the op that does its work there. `onnxruntime_conditions` explains why an op stayed float. Its conditions are
checked on the optimized model, where Q/DQ pairs have moved already and pairs without effect are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from graphquant.backends.findings import (
    UNJUDGED_KINDS,
    Backend,
    BrokenRule,
    RejectedModelError,
    RunStatus,
    Verdict,
    make_verdict,
)
from graphquant.backends.onnxruntime_conditions import CONDITIONS, FUSED_TYPES, UNKNOWN_REASON, FloatOp, element_type
from graphquant.backends.requirements import QuantizationReader
from graphquant.ir import (
    DATA_MOVEMENT_KINDS,
    FLOAT_TYPES,
    QUANTIZATION_KINDS,
    Graph,
    Model,
    Op,
    OpKey,
    Parameters,
    TensorRef,
    Use,
    paused_gc,
)
from graphquant.ir.op_matching import is_barrier
from graphquant.qdq import DYNAMIC_ATTENTION, DYNAMIC_PRODUCT, FamilyArguments, FusedForm

if TYPE_CHECKING:
    from graphquant.formats.onnx import OptimizedModel

ResultT = TypeVar("ResultT")

INTEGER_OP_TYPES = frozenset(
    {"ConvInteger", "MatMulInteger", "QGemm", "MatMulIntegerToFloat", "MatMulNBits", DYNAMIC_PRODUCT}
    | {"DynamicQuantizeLSTM", DYNAMIC_ATTENTION, "QEmbedLayerNormalization", "QMoE"}
)
"""Op types that compute on integers by definition, in addition to the QLinear types."""

WEIGHT_SLOTS = {
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QGemm"), 3),
    **dict.fromkeys(("MatMulInteger", "MatMulIntegerToFloat", DYNAMIC_PRODUCT, DYNAMIC_ATTENTION), 1),
}
"""Inputs with the weight, by types of ops that multiply integer matrices."""

LOW_PRECISION_DTYPES = frozenset({"int8", "uint8", "int16", "uint16"})
"""Integer types that count as low precision. Wider ones are indices and shapes."""

NO_KERNEL_RULE = "no-kernel"

REJECTION_REMEDIES = {
    "Missing required weight": "move the weight, its scales and zero points into the subgraph that reads them",
    "dilations": "remove the attribute 'dilations' of an AveragePool if it is 1, or keep the op in float",
    "'tensor(float8": "quantize to 8-bit integers, or keep these ops in float",
    "same node name": "update onnxruntime to 1.31 or newer, or keep the op in float",
    "crashes on it": "update onnxruntime to 1.28 or newer",
}
"""Remedies by a part of the error of ONNX Runtime."""

UNKNOWN_REJECTION_REMEDY = "if the float model loads, keep the op that the message names in float"


@paused_gc()
def ask_onnxruntime(model: Model, *, int8: bool = False) -> tuple[Verdict, ...]:
    """Return how the installed ONNX Runtime runs each op that computes on floats or is an integer op by definition.

    Args:
        model: An ONNX model. It is not modified.
        int8: Whether kernels accept int8 activations, as on ARM. On x86, Q/DQ pairs become uint8 where possible.

    Raises a RejectedModelError if ONNX Runtime cannot load the model.
    """
    # imported when needed, because onnxruntime is slow to import
    from graphquant.formats.onnx import optimize_model

    parameters, verdicts = Parameters(model), dict[OpKey, Verdict]()
    for optimized in _explain_rejection(partial(optimize_model, model, int8_activations=int8)):
        known = _RuntimeJudge(model, optimized, parameters).verdicts()
        verdicts |= known
        pairs = (zip(copies, ops, strict=True) for copies, ops in optimized.copies)
        for (graph, name), key in chain.from_iterable(pairs):
            if key in known:
                verdicts[graph, name] = replace(known[key], graph=graph, op=name)
        # Graphs refer to each other, so that only a garbage collection, which is paused, would free them.
        optimized.model.graphs.clear()
    keys = ((graph.name, op.name) for graph, op in model.reachable_ops())
    return tuple(verdicts[key] for key in keys if key in verdicts)


def load_in_onnxruntime(model: Model) -> None:
    """Load an ONNX model in the installed ONNX Runtime, and discard the session.

    Raises a ModelError if the model cannot be emitted, and a RejectedModelError if ONNX Runtime cannot load the model.
    """
    from graphquant.formats.onnx import require_loadable

    _explain_rejection(partial(require_loadable, model))


def _explain_rejection(load: Callable[[], ResultT]) -> ResultT:
    """Return the result of a function that loads a model; its SessionError becomes a RejectedModelError with advice."""
    from graphquant.formats.onnx import SessionError

    try:
        return load()
    except SessionError as error:
        message = str(error)
        remedies = (remedy for part, remedy in REJECTION_REMEDIES.items() if part in message)
        raise RejectedModelError(message, next(remedies, UNKNOWN_REJECTION_REMEDY), error.op_key) from error


class _RuntimeJudge:
    """Verdicts on the ops of a model, or on some of them, from its optimized form."""

    def __init__(self, model: Model, optimized: OptimizedModel, parameters: Parameters) -> None:
        self.model, self.optimized, self.parameters = model, optimized, parameters
        self.quantizations = QuantizationReader(optimized.model)
        self.own_ops: dict[OpKey, OpKey] = {}
        for key, origin in optimized.origins.items():
            kind = optimized.model.graphs[key[0]].op(key[1]).kind
            # ONNX Runtime names the quantizations and casts that it adds to an op after that op.
            if kind not in UNJUDGED_KINDS or kind == model.graphs[origin[0]].op(origin[1]).kind:
                self.own_ops.setdefault(origin, key)
        self.producers = {
            tensor: (result.graph, result.op)
            for result, tensor in optimized.tensors.items()
            if optimized.model.op(result).kind not in {"input", "constant", "output"}
        }
        self.hosts: dict[OpKey, OpKey | None] = {}
        graphs = (model.graphs[name] for name in model.reachable_graphs())
        ops = optimized.nearby_ops or [(graph.name, name) for graph in graphs for name in graph.topological_order()]
        for name, op_name in reversed(ops):
            if model.graphs[name].op(op_name).kind != "constant":
                self.hosts[name, op_name] = self._find_host(model.graphs[name], op_name)

    def _find_host(self, graph: Graph, name: str) -> OpKey | None:
        """Return the op of the optimized model that does the work of an op; None if it was removed."""
        key = graph.name, name
        if key in self.own_ops:
            return self.own_ops[key]
        is_movement = graph.op(name).kind in DATA_MOVEMENT_KINDS
        for port in range(len(graph.op(name).outputs)):
            producer = self.producers.get(TensorRef(graph.name, name, port))
            # ONNX Runtime adds ops that move values, as the Reshapes around a Gemm.
            while producer is not None and not (is_movement or producer in self.optimized.origins):
                if self._host_op(producer).kind not in DATA_MOVEMENT_KINDS:
                    break
                source = self.optimized.model.graphs[producer[0]].slots(producer[1])[0]
                producer = None if source is None else (source.graph, source.op)
            if producer is not None:
                return producer
        uses = (use for uses in graph.consumers_by_port(name).values() for use in uses)
        host = next(filter(None, (self.hosts.get((use.graph, use.op)) for use in uses)), None)
        # A Reshape without effect is removed, it does not become part of the Conv that reads it.
        is_removed = is_movement and host is not None and self._host_op(host).kind not in DATA_MOVEMENT_KINDS
        return None if is_removed else host

    def _host_op(self, key: OpKey) -> Op:
        return self.optimized.model.graphs[key[0]].op(key[1])

    def verdicts(self) -> dict[OpKey, Verdict]:
        keys = self.hosts if self.optimized.ops is None else self.optimized.ops
        ops = ((self.model.graphs[graph], self.model.graphs[graph].op(name)) for graph, name in keys)
        return {(graph.name, op.name): self._judge(graph, op) for graph, op in ops if self._needs_verdict(graph, op)}

    def _needs_verdict(self, graph: Graph, op: Op) -> bool:
        """Return whether an op gets a verdict: an integer op, or an op other than a quantization that uses floats."""
        if op.kind in UNJUDGED_KINDS or is_barrier(graph, op):
            return False
        if _integer_kernel(self.model, graph, op):
            return True
        tensors = [tensor for tensor in graph.slots(op.name) if tensor is not None]
        dtypes = {graph.output(tensor).dtype for tensor in tensors} | {output.dtype for output in op.outputs}
        if dtypes.isdisjoint(FLOAT_TYPES) and not (None in dtypes and op.type in CONDITIONS):
            return False
        return not tensors or not all(map(self._is_constant, tensors))

    def _is_constant(self, tensor: TensorRef) -> bool:
        """Return whether ONNX Runtime folds `tensor` into a constant."""
        graph = self.model.graphs[tensor.graph]
        if graph.op(tensor.op).kind == "quantize":
            source = graph.source_of(Use(tensor.graph, tensor.op, 0))
            return source is not None and self._is_constant(source)
        return graph.op(tensor.op).kind != "input" and self.parameters.is_parameter(tensor)

    def _judge(self, graph: Graph, op: Op) -> Verdict:
        key = graph.name, op.name
        if (host_key := self.hosts[key]) is None:
            return make_verdict(graph, op, "removed", "")
        host_graph, host = self.optimized.model.graphs[host_key[0]], self._host_op(host_key)
        is_own = self.optimized.origins.get(host_key, key) == key
        kernel = _integer_kernel(self.optimized.model, host_graph, host)
        if kernel or host.kind in QUANTIZATION_KINDS:
            status: RunStatus = "int8" if is_own and kernel else "fused"
            fault = _find_fault(self.optimized.model, host_graph, host, op.type) if is_own else ""
            return make_verdict(graph, op, status, kernel or host.type, fault=fault)
        return make_verdict(graph, op, "float", host.type, broken_rule=self._find_reason(op, host_graph, host))

    def _find_reason(self, op: Op, host_graph: Graph, host: Op) -> BrokenRule:
        """Return the rule that keeps `op` in float, from the surroundings of its host."""
        if host.type == "LSTM":
            message = "ONNX Runtime computes an LSTM on integers only with the ranges of each step"
            return BrokenRule("dynamic-ranges", message, "use --rules dynamic, often faster for large ones")
        host_type = FUSED_TYPES.get(host.type, host.type)
        if op.domain or op.type not in CONDITIONS or host_type not in CONDITIONS:
            message = f"ONNX Runtime has no integer kernel for {op.type}"
            if op.type in CONDITIONS:
                message = f"ONNX Runtime fuses it into {host.type}, which has no integer kernel"
            return BrokenRule(NO_KERNEL_RULE, message, "keep it in float, and quantize only the ops around it")
        context = FloatOp(
            optimized=self.optimized,
            quantizations=self.quantizations,
            opset=self.model.opset,
            graph=host_graph,
            op=host,
            type=host_type,
        )
        return next(filter(None, (condition(context) for condition in CONDITIONS[host_type])), UNKNOWN_REASON)


def _integer_kernel(model: Model, graph: Graph, op: Op) -> str:
    """Return the kernel of an op that computes on integers, for example "QLinearConv" or "Reshape on uint8", or ""."""
    if op.type.startswith("QLinear") or op.type in INTEGER_OP_TYPES:
        return op.type
    tensor = next(iter(graph.slots(op.name)), None)
    dtype = None if tensor is None or op.kind in UNJUDGED_KINDS else element_type(model, tensor)
    return f"{op.type} on {dtype}" if dtype in LOW_PRECISION_DTYPES else ""


def _find_fault(model: Model, graph: Graph, op: Op, original_type: str) -> str:
    """Return a sentence if this CPU and the installed release compute the integer products of an op wrong, or "".

    ONNX Runtime itself packs the weights of an op whose `original_type` is another.
    """
    from graphquant.formats.onnx.runtime import (
        PRODUCT_TYPES,
        find_wrong_product,
        packs_two_bits_right,
        supports_fused_form,
    )

    slots = graph.slots(op.name)
    if op.type == "MatMulNBits":
        args = FamilyArguments(accuracy_level=4 if op.numeric_attr("accuracy_level", 0) == 4 else 0)  # noqa: PLR2004  # level
        bits, has_zero_points = int(op.numeric_attr("bits", 4)), len(slots) > 3 and slots[3] is not None  # noqa: PLR2004  # slot
        form = FusedForm(op_type=op.type, bits=bits, args=args, has_zero_points=has_zero_points)
        if not supports_fused_form(form):
            return f"this onnxruntime computes products of {bits}-bit weights wrong on this CPU"
        columns = int(op.numeric_attr("N", 0))
        if original_type != op.type and bits == 2 and not packs_two_bits_right(columns):  # noqa: PLR2004  # bits
            return f"this onnxruntime packs {columns} columns of 2 bits wrong, but not 4 bits or the family onnx-fused"
        return ""
    if op.type not in WEIGHT_SLOTS:
        return ""
    tensors = slots[0], slots[WEIGHT_SLOTS[op.type]]
    types = tuple("" if tensor is None else element_type(model, tensor) for tensor in tensors)
    if op.type == DYNAMIC_PRODUCT:
        types = "uint8", types[1]  # it quantizes its input
    shape = None if tensors[1] is None else graph.output(tensors[1]).shape
    if not shape or types not in PRODUCT_TYPES:
        return ""
    if op.type == "QLinearConv":
        columns = (shape[0] or 0) // int(op.numeric_attr("group", 1))
    else:
        columns = shape[0 if op.type == "QGemm" and op.numeric_attr("transB", 0) else -1] or 0
    rows = columns and find_wrong_product(*types, columns)
    return f"this onnxruntime computes {rows} or more rows of {columns} columns wrong on this CPU" if rows else ""


ORT_FUSABLE_KINDS = dict.fromkeys(
    ("conv", "depthwise_conv", "matmul", "gemm", "add", "mul"), frozenset({"relu", "relu6", "clip"})
)
"""Kinds of activations that are fused with an op of each kind if no quantization is between them."""

ONNXRUNTIME = Backend(
    name="onnxruntime", description="CPU kernels of ONNX Runtime on x86", judge=ask_onnxruntime, fuses=ORT_FUSABLE_KINDS
)
ONNXRUNTIME_ARM = Backend(
    name="onnxruntime-arm",
    description="CPU kernels of ONNX Runtime on ARM, which accept int8 activations",
    judge=partial(ask_onnxruntime, int8=True),
    fuses=ORT_FUSABLE_KINDS,
)
