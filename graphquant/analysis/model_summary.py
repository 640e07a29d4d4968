"""Model summary: quantization ops with scale and zero point, and float ops with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphquant.formats import provenance_of
from graphquant.ir import (
    DATA_MOVEMENT_KINDS,
    FLOAT_TYPES,
    MAC_KINDS,
    QUANTIZATION_KINDS,
    STORED_KINDS,
    TRANSPARENT_KINDS,
    FunctionClones,
    Graph,
    Model,
    Op,
    Output,
    Parameters,
    StoredQuantization,
    TensorRef,
    Use,
    follow_to_end,
)
from graphquant.ir.op_matching import is_barrier
from graphquant.numerics import DynamicQParams
from graphquant.qdq import DYNAMIC_FORM, family_of
from graphquant.quantize.integer_io import BoundaryTensor, integer_tensors

if TYPE_CHECKING:
    from graphquant.numerics import QParams

COPYING_KINDS = DATA_MOVEMENT_KINDS | TRANSPARENT_KINDS | {"pad", "reduce_max"}
"""Kinds whose outputs are copies of their inputs. They run quantized without Q/DQ pairs of their own."""

MAX_MOVEMENT_OPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOp:
    """One quantization op of a model."""

    graph: str  # its graph, "" for the main graph
    op: str
    type: str  # its op type
    tensor: TensorRef  # the float tensor or integer constant that it quantizes
    consumers: tuple[Use, ...]  # the uses of the result
    params: QParams | DynamicQParams | None  # Scale and zero point; None if they are computed at run time.
    rule: str  # rule that inserted it, "" if it is not from graphquant
    rounding: str = ""  # rounding mode, "" if unknown
    learned: bool = False  # True if scale and zero point are variables, which training can change
    copies: tuple[QuantizationOp, ...] = ()  # ops with the same parameters in copies of its function


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScaleTensor:
    """Tensor of a format that stores scales in its tensors."""

    tensor: TensorRef
    kind: str  # kind of the op that produces it
    output: Output  # its name, dtype and shape
    stored: StoredQuantization  # its index in the file, scale and zero point


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCoverage:
    """A weighted op, and the reason if it does not compute on quantized inputs."""

    graph: str
    op: str
    kind: str
    quantized: bool
    reason: str
    partly_quantized: bool  # true if only some of its inputs are, such as its weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """Contents of `inspect`."""

    model: Model
    op_types: dict[str, int]  # number of ops per op type, the most frequent first
    quantization_ops: tuple[QuantizationOp, ...]  # quantization ops that a run can reach, in graph order
    # The same and those of functions that only Python code calls. Ops in copies of a function are one entry.
    distinct_ops: tuple[QuantizationOp, ...]
    coverage: tuple[OpCoverage, ...]  # weighted ops
    # All tensors by their index in the file for formats with scales in tensors (TFLite), else empty.
    tensors: tuple[StoredScaleTensor, ...]
    unreachable_functions: tuple[str, ...]  # functions that neither the main graph nor Python code reaches
    # Weighted ops of saved functions that stay float. Rules apply to reachable graphs and their clones only.
    float_clone_ops: tuple[OpCoverage, ...]

    io: tuple[BoundaryTensor, ...]  # integer inputs and outputs in place of floats, as graphquant recorded them

    @property
    def inputs(self) -> tuple[Op, ...]:
        """Inputs of the main graph."""
        return tuple(map(self.model.main.op, self.model.main.inputs))

    @property
    def op_counts(self) -> dict[str, int]:
        """Number of ops by graph, without saved functions."""
        graphs, saved = self.model.graphs, self.model.saved_functions
        return {name: len(graph) for name, graph in graphs.items() if name not in saved}


def summarize_model(model: Model) -> ModelSummary:
    """Summarize the quantization of `model`. Unreachable graphs are only counted."""
    parameters = Parameters(model)
    clones = FunctionClones(model, parameters)
    live = model.reachable_graphs()
    types: Counter[str] = Counter()
    quantization_ops, tensors = [], []
    for name in live:
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind not in {"input", "output", "constant"}:
                types[op.type] += 1
            stored = [
                StoredScaleTensor(
                    tensor=TensorRef(name, op.name, port), kind=op.kind, output=output, stored=output.quantization
                )
                for port, output in enumerate(op.outputs)
                if output.quantization is not None
            ]
            tensors += stored
            if op.kind in QUANTIZATION_KINDS and not stored and not _is_paired_quantize(graph, op):
                quantization_ops.append(_read_quantization_op(graph, op, parameters))
    clone_ops = ((model.graphs[name], op) for name in clones.clone_graphs for op in model.graphs[name].ops())
    python_ops = [
        _read_quantization_op(graph, op, parameters)
        for graph, op in clone_ops
        if op.kind in QUANTIZATION_KINDS and not _is_paired_quantize(graph, op)
    ]
    coverage = weighted_op_coverage(model)
    graph_order = {name: number for number, name in enumerate(live)}
    alive = {*live, *clones.clone_graphs, *model.saved_functions}
    unreachable = tuple(name for name in model.graphs if name not in alive)
    quantized = {(op_coverage.graph, op_coverage.op) for op_coverage in coverage if op_coverage.quantized}
    tensors.sort(key=lambda stored_tensor: (graph_order[stored_tensor.tensor.graph], stored_tensor.stored.index))
    return ModelSummary(
        model=model,
        io=integer_tensors(provenance_of(model)),
        op_types=dict(sorted(types.items(), key=lambda entry: (-entry[1], entry[0]))),
        quantization_ops=tuple(quantization_ops),
        distinct_ops=tuple(_merge_copies(model, quantization_ops, python_ops, clones)),
        coverage=coverage,
        tensors=tuple(tensors),
        unreachable_functions=unreachable,
        float_clone_ops=tuple(_float_clone_ops(model, clones, quantized)),
    )


def weighted_op_coverage(model: Model) -> tuple[OpCoverage, ...]:
    """Return the weighted ops that the outputs need, and the reasons of those with float inputs."""
    needed = model.needed_ops()
    weighted_ops = [(graph, op) for graph, op in model.reachable_ops() if op.kind in MAC_KINDS]
    return tuple(_op_coverage(graph, op) for graph, op in weighted_ops if op.name in needed.get(graph.name, ()))


def _merge_copies(
    model: Model, ops: list[QuantizationOp], python_ops: list[QuantizationOp], clones: FunctionClones
) -> Iterator[QuantizationOp]:
    """Yield one op of those that are copies.

    Ops that run are copies in functions of the same ops. Those of functions that only Python code calls are copies of
    one with the same name and parameters, because tracing in another mode removes or adds some ops of a function.
    """
    functions = {op.graph for op in ops if op.graph}  # the main graph, which may be very large, is no copy
    ops_of = {name: frozenset((op.name, op.type) for op in model.graphs[name].ops()) for name in functions}
    copies: dict[Any, list[QuantizationOp]] = {}
    by_name: dict[Any, list[QuantizationOp]] = {}
    for op in ops:
        key = op.op, op.type, _params_key(op.params)
        copies_ = copies.setdefault((ops_of.get(op.graph), *key), [])
        copies_.append(op)
        by_name.setdefault(key, copies_)
    for op in python_ops:
        _, name = clones.original_op(op.graph, op.op) or (op.graph, op.op)
        key = name, op.type, _params_key(op.params)
        if key not in by_name:
            by_name[key] = copies.setdefault(key, [])
        by_name[key].append(op)
    for copies_ in copies.values():
        yield replace(copies_[0], copies=tuple(copies_[1:]))


def _params_key(params: QParams | DynamicQParams | None) -> tuple[object, ...]:
    """Return a value that is equal for equal parameters."""
    if params is None or isinstance(params, DynamicQParams):
        return (params,)
    return params.type, params.narrow, params.axis, params.block, params.scale.tobytes(), params.zero_point.tobytes()


def _float_clone_ops(model: Model, clones: FunctionClones, quantized: set[tuple[str, str]]) -> Iterator[OpCoverage]:
    """Ops of clones without a known scale, or that are float although their counterpart is not."""
    for name in clones.clone_graphs:
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind not in MAC_KINDS:
                continue
            original, covered = clones.original_op(name, op.name), _op_coverage(graph, op)
            if original is None and covered.reason:
                yield replace(covered, reason="no op that runs computes the same on the same variables")
            elif original in quantized and covered.reason:
                yield covered


def _is_paired_quantize(graph: Graph, op: Op) -> bool:
    """Return True if `op` is a quantize op whose dequantize op has the same information."""
    readers = graph.consumers(TensorRef(graph.name, op.name)) if op.kind == "quantize" else []
    return bool(readers) and all(graph.graphs[use.graph].op(use.op).kind == "dequantize" for use in readers)


def _read_quantization_op(graph: Graph, op: Op, parameters: Parameters) -> QuantizationOp:
    family = family_of(op)
    tensor = graph.source_of(Use(graph.name, op.name, 0)) or TensorRef(graph.name, op.name)
    if op.kind == "dequantize" and graph.graphs[tensor.graph].op(tensor.op).kind == "quantize":
        tensor = graph.graphs[tensor.graph].source_of(Use(tensor.graph, tensor.op, 0)) or tensor
    ends = [slot for slot in graph.slots(op.name)[1:] if slot is not None and parameters.is_parameter(slot)]
    return QuantizationOp(
        graph=graph.name,
        op=op.name,
        type=op.type,
        tensor=tensor,
        consumers=tuple(graph.consumers(TensorRef(graph.name, op.name))),
        params=None if family is None else family.read_restricted_params(graph, op, parameters),
        rule=op.rule,
        rounding="" if family is None else family.rounding_mode_of(op),
        learned=any(
            graph.graphs[source.graph].op(source.op).kind == "variable" for source in map(parameters.root_tensor, ends)
        ),
    )


def _op_coverage(graph: Graph, op: Op) -> OpCoverage:
    """Return the coverage of a weighted op, whose reason is its first input without quantization."""
    factors = [
        (op.role(slot), tensor, _look_through_movement(graph, tensor))
        for slot, tensor in enumerate(graph.slots(op.name))
        if tensor is not None and op.role(slot) in {"input", "weight", "recurrent_weight"}
        if graph.output(tensor).dtype in FLOAT_TYPES | {None}
    ]
    floats = [factor for factor in factors if factor[2].kind not in QUANTIZATION_KINDS]
    reason, partly = "", 0 < len(floats) < len(factors)
    if not any((source.fused_attrs or {}).get("form") == DYNAMIC_FORM for *_, source in factors):
        reason = f"its {floats[0][0]} {floats[0][1]} is float" if floats else ""
        if floats and not partly and not any(source.kind in STORED_KINDS for *_, source in floats):
            reason = (
                f"it has no weight; its factors are computed in each run: {', '.join(str(each[1]) for each in floats)}"
            )
    elif op.kind == "attention":
        reason, partly = "only the product of its weight is in int8; those of scores and values are float", True
    return OpCoverage(
        graph=graph.name,
        op=op.name,
        kind=op.kind,
        quantized=not reason,
        reason=reason,
        partly_quantized=partly and bool(reason),
    )


def _look_through_movement(graph: Graph, tensor: TensorRef) -> Op:
    """Op that produces `tensor`, through data-movement ops."""

    def moved_input(current: TensorRef) -> TensorRef | None:
        home = graph.graphs[current.graph]
        op = home.op(current.op)
        # graphquant casts half precision to float32 before a FakeQuant, and back after it.
        is_copy = op.kind in COPYING_KINDS or is_barrier(home, op) or (op.kind == "cast" and bool(op.rule))
        return home.source_of(Use(current.graph, current.op, op.main_slot)) if is_copy else None

    source = follow_to_end(tensor, moved_input, MAX_MOVEMENT_OPS)
    return graph.graphs[source.graph].op(source.op)
