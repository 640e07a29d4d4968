"""What onnxruntime runs on integers on a CPU, told by doing to a copy of the model what its optimizer does.

The steps before the choice of ops are in `passes`, the choice in `selectors`; both follow onnxruntime's own, at its
default settings. `tests/backends/test_oracle.py` and `benchmarks/oracle.py` hold them to what it really does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from graphquant.backends.onnxruntime.around import around
from graphquant.backends.onnxruntime.passes import simplify, to_uint8
from graphquant.backends.onnxruntime.selectors import SELECTORS
from graphquant.backends.onnxruntime.work import Gone, Work
from graphquant.backends.types import Backend, Broken, Verdict
from graphquant.ir import FLOAT_TYPES, QUANTIZATION_KINDS, bulk

if TYPE_CHECKING:
    from graphquant.backends.types import Status
    from graphquant.ir import Graph, Model, Op

Key = tuple[str, str]
"""Graph and op."""

SILENT = QUANTIZATION_KINDS | {
    *("input", "output", "constant", "variable", "shape", "if", "loop", "scan", "call", "identity", "dropout", "cast")
}
"""Kinds that compute nothing on floats, or whose bodies have verdicts of their own."""

INTEGER_OPS = frozenset(
    {"ConvInteger", "MatMulInteger", "QGemm", "MatMulIntegerToFloat", "MatMulNBits", "DynamicQuantizeMatMul"}
)
"""Op types that compute on integers by themselves, beside those called QLinear..."""

INTEGERS = frozenset({"int8", "uint8", "int16", "uint16"})
"""Types whose ops count as low precision; longer ones are indices and shapes."""

NO_KERNEL = "no-kernel"


def predict(model: Model, *, int8: bool = False) -> tuple[Verdict, ...]:
    """For each op of a live graph that computes on floats, or on integers by its own nature, how it will run.

    Args:
        model: An ONNX model; it is not changed.
        int8: Whether kernels take int8 activations, as they do on ARM; on x86 pairs are made uint8 where possible.
    """
    gone = Gone()
    with bulk():
        work = Work(model)
        for name in model.live():
            simplify(work, work.model.graphs[name], gone)
            if not int8:
                to_uint8(work, work.model.graphs[name])
    outcomes = _outcomes(work, gone, int8=int8)
    return tuple(
        _verdict(gone, outcomes, graph, op)
        for graph in map(model.graphs.__getitem__, model.live())
        for op in graph.ops()
        if _asked(work, graph, op)
    )


def _outcomes(work: Work, gone: Gone, *, int8: bool) -> dict[Key, str | Broken]:
    """What each op becomes, or why it stays; a Relu or Clip that goes with it is written down in `gone`."""
    found: dict[Key, str | Broken] = {}
    for name in work.model.live():
        graph = work.model.graphs[name]
        for op in graph.ops():
            if op.kind in SILENT:
                continue
            found[name, op.name] = _outcome(work, gone, graph, op, int8=int8)
    return found


def _outcome(work: Work, gone: Gone, graph: Graph, op: Op, *, int8: bool) -> str | Broken:
    if _is_integer(op):
        return op.type
    if dtype := _on_integers(graph, op):
        return f"{op.type} on {dtype}"
    if op.domain or op.type not in SELECTORS:
        says = f"onnxruntime has no {op.type} on integers"
        return Broken(rule=NO_KERNEL, says=says, fix="leave it float, or quantize what is around it only")
    here = around(work, graph, op, int8=int8)
    if isinstance(here, Broken):
        return here
    outcome = SELECTORS[op.type](here)
    if here.clip and isinstance(outcome, str):
        gone.into[graph.name, here.clip] = op.name
    return outcome


def _is_integer(op: Op) -> bool:
    return op.type.startswith("QLinear") or op.type in INTEGER_OPS


def _on_integers(graph: Graph, op: Op) -> str:
    """The integer type of few bits that an op of the model itself reads; "" if it reads something else."""
    tensor = next(iter(graph.slots(op.name)), None)
    dtype = None if tensor is None else graph.output(tensor).dtype
    return dtype if dtype in INTEGERS else ""


def _asked(work: Work, graph: Graph, op: Op) -> bool:
    """Whether an op gets a verdict: it is no quantization, and floats go in or out, or it is an integer op."""
    if op.kind in SILENT:
        return False
    if _is_integer(op) or _on_integers(graph, op):
        return True
    tensors = [tensor for tensor in graph.slots(op.name) if tensor is not None]
    dtypes = {graph.output(tensor).dtype for tensor in tensors} | {output.dtype for output in op.outputs}
    if dtypes.isdisjoint(FLOAT_TYPES) and not (None in dtypes and op.type in SELECTORS):
        return False
    return not tensors or not all(work.constant(tensor) for tensor in tensors)


def _verdict(gone: Gone, outcomes: dict[Key, str | Broken], graph: Graph, op: Op) -> Verdict:
    """The verdict on an op of the model, from what became of it or of the op that does its work."""
    key = graph.name, op.name
    into, here = gone.into.get(key), key
    while here in gone.into:
        here = graph.name, gone.into[here]
    outcome = outcomes.get(here, "")
    status: Status = "low" if into is None else "absorbed"
    if isinstance(outcome, Broken) or not outcome:
        if key in gone.how:
            outcome = gone.how[key]
        elif isinstance(outcome, Broken):
            return _made(graph, op, "float", op.type, outcome)
    return _made(graph, op, status, str(outcome), None)


def _made(graph: Graph, op: Op, status: Status, runs_as: str, broken: Broken | None) -> Verdict:
    return Verdict(graph=graph.name, op=op.name, type=op.type, status=status, runs_as=runs_as, broken=broken)


FUSES = dict.fromkeys(("conv", "depthwise_conv", "matmul", "gemm", "add", "mul"), frozenset({"relu", "relu6", "clip"}))
"""What is absorbed behind what, if no quantization stands between."""

ONNXRUNTIME = Backend(name="onnxruntime", explains="onnxruntime's CPU kernels on x86", predict=predict, fuses=FUSES)
ONNXRUNTIME_ARM = Backend(
    name="onnxruntime-arm",
    explains="onnxruntime's CPU kernels on ARM, which take int8 activations as they are",
    predict=partial(predict, int8=True),
    fuses=FUSES,
)
