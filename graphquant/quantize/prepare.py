"""Preparation steps before matching. Each applies only what the rules request, and records how to undo it.

`PREPARATION_STEPS` has all of them, in the order of their application. The small steps are in this module; folding and
requantization have modules of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from graphquant.ir import (
    FLOAT_TYPES,
    NO_ATTRS,
    Graph,
    Model,
    Op,
    Parameters,
    TensorRef,
    Use,
    check_invariants,
    follow_to_end,
    paused_gc,
)
from graphquant.ir.op_matching import is_barrier
from graphquant.qdq.family import new_constant
from graphquant.quantize import fold_batchnorm, join_activations, requantize, split_fused
from graphquant.quantize.preparation_undo import (
    Candidate,
    RecordedEdits,
    SkippedStep,
    Step,
    encode_source_node,
    feeds_graph_output,
)

# Constants in the form that every backend expects: initializers that callers cannot override, and no Constant nodes.

INITIALIZER_INPUTS_STEP: Final = "initializer-inputs"
CONSTANT_NODES_STEP: Final = "constant-nodes"


def freeze_initializer_inputs(model: Model) -> Iterator[Step]:
    """Turn initializers that are also graph inputs (IR version 3) into constants, which callers cannot override."""
    graph = model.main
    for position, name in enumerate(graph.inputs):
        op = graph.op(name)
        if op.read_value is not None:
            graph.replace_op(replace(op, kind="constant", type="Initializer", roles=()))
            undo = {"position": position, "input": encode_source_node(op)}
            detail = "initializer is no graph input any more"
            yield Step(step=INITIALIZER_INPUTS_STEP, target=name, detail=detail, undo=undo)
    graph.inputs = [name for name in graph.inputs if graph.op(name).kind == "input"]


def convert_constant_nodes(model: Model) -> Iterator[Step]:
    """Turn ONNX Constant nodes into initializers of their graphs. Functions have no initializers and keep the nodes."""
    for graph, op, obstacle in _constant_nodes(model):
        if obstacle is None:
            edits = RecordedEdits(model)
            initializer = replace(op, type="Initializer", roles=(), attrs=NO_ATTRS, outputs=op.outputs[:1], source=None)
            edits.replace(graph, initializer)
            yield edits.to_step(CONSTANT_NODES_STEP, graph, op, "is an initializer")


def _constant_nodes(model: Model) -> list[Candidate]:
    """Return ONNX Constant nodes in graphs that run and can have initializers."""
    ops = _ops_of_named_values(model, {"Constant"})
    nodes = [(graph, op) for graph, op in ops if op.kind == "constant" and not graph.is_function]
    return [(graph, op, _constant_node_obstacle(graph, op)) for graph, op in nodes]


def _ops_of_named_values(model: Model, types: Container[str]) -> Iterator[tuple[Graph, Op]]:
    """Yield the ops of some types in the graphs that run, if removing an op keeps the name of an output."""
    for name in model.reachable_graphs() if model.traits.named_values else ():
        graph = model.graphs[name]
        yield from [(graph, op) for op in graph.ops() if op.type in types]


def _constant_node_obstacle(graph: Graph, op: Op) -> str | None:
    """Return the reason why a Constant node must stay a node, or None."""
    if op.read_value is None:
        return "its value is an argument of the enclosing function"
    if "sparse_value" in op.attrs:
        return "its value is sparse and would be larger as an initializer"
    if feeds_graph_output(graph, op.name):
        return "it is a graph output, which some runtimes do not accept from an initializer"
    return None


# Remove ONNX ops that forward their input unchanged: Identity, and Dropout in inference mode. A Loop forwards each
# argument that its body returns unchanged, such as the weights of a cell of tf2onnx.
#
# TensorFlow's Identity ops stay: they are fetched by name, carry control dependencies and read variables.

DROP_IDENTITY_STEP: Final = "drop-identity"
DROP_DROPOUT_STEP: Final = "drop-dropout"
_DROPPED_TYPES = {DROP_IDENTITY_STEP: "Identity", DROP_DROPOUT_STEP: "Dropout"}

_INFERENCE_BY_DEFAULT_OPSET: Final = 7  # Dropout of an older opset trains unless its `is_test` attribute is set


def drop_forwarding_ops(model: Model, step: str) -> Iterator[Step]:
    """Let the consumers of each Identity, or of each Dropout in inference mode, read its input."""
    for graph, op, obstacle in _forwarding_ops(model, step):
        source = graph.source_of(Use(graph.name, op.name, 0))
        if obstacle is None and source is not None:
            edits = RecordedEdits(model)
            for use in graph.consumers(TensorRef(graph.name, op.name)):
                edits.connect(use, source)
            edits.remove(graph, op.name)
            yield edits.to_step(step, graph, op, f"its readers read {source}")
    if step == DROP_IDENTITY_STEP:
        yield from _drop_loop_invariants(model)


def _drop_loop_invariants(model: Model) -> Iterator[Step]:
    """Let the bodies of ONNX Loops read parameters that each iteration returns unchanged from where they are stored.

    Such an argument is no constant in the body, so that each iteration would quantize a weight anew. The Loop keeps its
    slots, and passes on a zero.
    """
    parameters = Parameters(model)
    for graph, op in list(_ops_of_named_values(model, {"Loop"})):
        if not op.calls:  # without a body, only a runtime can say what is wrong
            continue
        body = model.graphs[op.calls[0].graph]
        for slot in range(2, min(len(body.inputs), len(body.outputs) + 1)):
            operand = graph.source_of(Use(graph.name, op.name, slot))
            argument, result = TensorRef(body.name, body.inputs[slot]), TensorRef(graph.name, op.name, slot - 2)
            uses, returned = body.consumers(argument), Use(body.name, body.outputs[slot - 1], 0)
            readers = [use for use in (*uses, *graph.consumers(result)) if use != returned]
            is_named = any(model.graphs[use.graph].op(use.op).kind == "output" for use in readers)
            if operand is None or is_named or returned not in uses or len(uses) == 1:
                continue
            dtype = model.output(operand).dtype
            if dtype in FLOAT_TYPES and parameters.is_parameter(operand):
                edits = RecordedEdits(model)
                for use in readers:
                    edits.connect(use, operand)
                zero = new_constant(graph, f"{op.name}/unused", np.zeros((), dtype), op_type="Initializer", rule="")
                edits.connect(Use(graph.name, op.name, slot), edits.add(graph, zero))
                yield edits.to_step(DROP_IDENTITY_STEP, graph, op, f"its body reads {operand}")


def look_through_dropped_ops(model: Model, tensor: TensorRef, parameters: Parameters) -> TensorRef:
    """Return the tensor behind ops that these steps remove, or would remove if they did not name an output."""

    def source_of_dropped_op(current: TensorRef) -> TensorRef | None:
        graph = model.graphs[current.graph]
        op = graph.op(current.op)
        is_dropped = op.type in _DROPPED_TYPES.values() and not op.domain and not current.port
        if not is_dropped or (op.kind == "dropout" and _dropout_trains(model, graph, op, parameters)):
            return None
        return graph.source_of(Use(graph.name, op.name, 0))

    limit = len(model.graphs[tensor.graph]) if model.traits.named_values else 0
    return follow_to_end(tensor, source_of_dropped_op, limit)


def _forwarding_ops(model: Model, step: str) -> list[Candidate]:
    """Return the ops of a step. Barriers are Clips that forward their input, and `rewrite` adds those that it needs."""
    types = {_DROPPED_TYPES[step], *({"Clip"} if step == DROP_IDENTITY_STEP else ())}
    ops = [(graph, op) for graph, op in _ops_of_named_values(model, types) if not op.domain]
    forwarding = [(graph, op) for graph, op in ops if op.type != "Clip" or is_barrier(graph, op)]
    parameters = Parameters(model)
    return [(graph, op, _drop_obstacle(model, graph, op, parameters)) for graph, op in forwarding]


def _drop_obstacle(model: Model, graph: Graph, op: Op, parameters: Parameters) -> str | None:
    """Return the reason why the op must stay, or None."""
    if graph.source_of(Use(graph.name, op.name, 0)) is None:
        return "it has no input"
    if feeds_graph_output(graph, op.name):
        return "it names a graph output"
    if set(graph.consumers_by_port(op.name)) - {0}:
        return "its mask has consumers"
    if op.kind == "dropout" and _dropout_trains(model, graph, op, parameters):
        return "it is, or may be, in training mode; export the model for inference"
    return None


def _dropout_trains(model: Model, graph: Graph, op: Op, parameters: Parameters) -> bool:
    """Return True if a Dropout may change its input."""
    if model.opset < _INFERENCE_BY_DEFAULT_OPSET:
        return not op.attrs.get("is_test")
    if (training_mode := graph.source_of(Use(graph.name, op.name, 2))) is None:
        return False
    value = parameters.value(training_mode)
    return value is None or bool(value.any())


# Switch BatchNorms that use the statistics of each batch, as in training, to their moving statistics.

INFERENCE_BATCHNORM_STEP: Final = "inference-batchnorm"
INFERENCE_STEP_HINT: Final = (
    f'; a rule file with prepare = ["{INFERENCE_BATCHNORM_STEP}"] switches it to its moving mean and variance'
)

ONNX_TRAINING_MODE: Final = (
    "it normalizes by the mean and variance of each batch (training_mode); export the model for inference"
)

NO_MOVING_STATISTICS: Final = "; its moving mean and variance are not in the graph"


def inference_batchnorm(model: Model) -> Iterator[Step]:
    """Make BatchNorms in training mode use their moving statistics, so that samples are independent."""
    parameters = Parameters(model)  # no value changes by this
    for graph, op in _tensorflow_training_batchnorms(model):
        if (statistics := _moving_statistics(graph, op, parameters)) is None:
            continue
        edits = RecordedEdits(model)
        edits.replace(graph, replace(op, attrs={**op.attrs, "is_training": False}))
        for slot, tensor in zip((3, 4), statistics, strict=True):
            if graph.source_of(Use(graph.name, op.name, slot)) != tensor:
                edits.connect(Use(graph.name, op.name, slot), tensor)
        yield edits.to_step(INFERENCE_BATCHNORM_STEP, graph, op, f"takes {statistics[0]} and {statistics[1]}")


def find_training_batchnorms(model: Model, *, step_requested: bool) -> Iterator[SkippedStep]:
    """Yield the BatchNorms in training mode, with a hint if `inference_batchnorm` was not requested."""
    parameters = Parameters(model)
    reasons = {}
    for graph, op in _tensorflow_training_batchnorms(model):
        has_statistics = _moving_statistics(graph, op, parameters) is not None
        hint = INFERENCE_STEP_HINT if has_statistics and not step_requested else NO_MOVING_STATISTICS
        reason = f"it normalizes by the mean and variance of each batch (is_training){hint}"
        reasons[TensorRef(graph.name, op.name)] = reason
    for graph, op in model.reachable_ops():
        if op.kind == "batchnorm" and op.attrs.get("training_mode"):
            reasons[TensorRef(graph.name, op.name)] = ONNX_TRAINING_MODE
    for tensor, reason in reasons.items():
        yield SkippedStep(step=INFERENCE_BATCHNORM_STEP, tensor=tensor, reason=reason)


def _tensorflow_training_batchnorms(model: Model) -> list[tuple[Graph, Op]]:
    """Return TensorFlow's BatchNorms in training mode, in the graphs that run."""
    return [
        (graph, op)
        for graph, op in model.reachable_ops()
        if op.kind == "batchnorm" and op.type.startswith("FusedBatchNorm") and op.attrs.get("is_training")
    ]


def _moving_statistics(graph: Graph, op: Op, parameters: Parameters) -> tuple[TensorRef, TensorRef] | None:
    """Return the moving mean and variance: the tensors the op reads, or the ones its batch statistics are added to."""
    statistics = []
    for slot, port in ((3, 1), (4, 2)):
        updated = [_moving_average(graph, use) for use in graph.consumers(TensorRef(graph.name, op.name, port))]
        for candidate in (graph.source_of(Use(graph.name, op.name, slot)), *updated):
            value = None if candidate is None else parameters.value(candidate)
            # A graph in training mode may pass an empty vector.
            if candidate is not None and value is not None and value.ndim == 1 and value.size:
                statistics.append(candidate)
                break
        else:
            return None
    return statistics[0], statistics[1]


def _moving_average(graph: Graph, use: Use) -> TensorRef | None:
    """Return the average that the value at `use` is subtracted from, as `assign_moving_average` does to update it."""
    if use.graph != graph.name or graph.op(use.op).kind != "sub" or use.slot != 1:
        return None
    average = graph.source_of(Use(graph.name, use.op, 0))
    must_wait = average is None or graph.control_inputs(average.op)  # a dependency may be on the consumer
    return None if must_wait else average


class Preparation(NamedTuple):
    """One kind of preparation step."""

    purpose: str  # its purpose, for people
    apply: Callable[[Model], Iterator[Step]]  # changes a model and yields each change
    # Returns the ops that the step applies to.
    find_candidates: Callable[[Model], Iterable[Candidate]] | None = None


PREPARATION_STEPS: dict[str, Preparation] = {
    requantize.REQUANTIZE_STEP: Preparation(
        purpose="rules replace the model's quantization by their own",
        apply=requantize.requantize,
        find_candidates=requantize.remaining_quantization_ops,
    ),
    INITIALIZER_INPUTS_STEP: Preparation(
        purpose="a weight that callers may override is no constant and cannot be quantized ahead of time",
        apply=freeze_initializer_inputs,
    ),
    CONSTANT_NODES_STEP: Preparation(
        purpose="runtimes expect weights to be initializers",
        apply=convert_constant_nodes,
        find_candidates=_constant_nodes,
    ),
    INFERENCE_BATCHNORM_STEP: Preparation(
        purpose="an output must depend on its own sample only, not on the rest of the batch", apply=inference_batchnorm
    ),
    split_fused.SPLIT_FUSED_STEP: Preparation(
        purpose="runtimes quantize a product and an activation, but no op that joins them",
        apply=split_fused.split_fused_ops,
        find_candidates=split_fused.fused_ops,
    ),
    DROP_IDENTITY_STEP: Preparation(
        purpose="an op that changes nothing prevents fusions in the runtime",
        apply=partial(drop_forwarding_ops, step=DROP_IDENTITY_STEP),
        find_candidates=partial(_forwarding_ops, step=DROP_IDENTITY_STEP),
    ),
    DROP_DROPOUT_STEP: Preparation(
        purpose="in inference mode it changes nothing and prevents fusions in the runtime",
        apply=partial(drop_forwarding_ops, step=DROP_DROPOUT_STEP),
        find_candidates=partial(_forwarding_ops, step=DROP_DROPOUT_STEP),
    ),
    fold_batchnorm.FOLD_BATCHNORM_STEP: Preparation(
        purpose="a BatchNorm between a product and its quantization keeps the product in float",
        apply=fold_batchnorm.fold_batchnorm,
        find_candidates=fold_batchnorm.remaining_batchnorms,
    ),
    split_fused.SPLIT_PRELU_STEP: Preparation(
        purpose="onnxruntime tests the sign of each value for a PRelu, which takes longer than a product and a maximum",
        apply=split_fused.split_prelus,
    ),
    split_fused.REWRITE_NORMS_STEP: Preparation(
        purpose="onnxruntime computes a sum and a norm in less time than the op that joins them, or parts of a norm",
        apply=split_fused.rewrite_norms,
    ),
    join_activations.JOIN_ACTIVATIONS_STEP: Preparation(
        purpose="behind an op on integers, onnxruntime computes an activation in parts one by one",
        apply=join_activations.join_activations,
    ),
}
"""The steps by name, in the order of their application."""


@paused_gc()
def prepare(model: Model, requested: Sequence[str]) -> tuple[Model, tuple[Step, ...]]:
    """Return a copy of `model` after the requested steps, and the steps' records.

    Return the model itself if nothing changed. Raises a ModelError if a weight in the model's files cannot be read.
    """
    ordered_names = [name for name in PREPARATION_STEPS if name in requested]
    changed = model.copy() if ordered_names else model
    applied: list[Step] = []
    for name in ordered_names:
        preparation = PREPARATION_STEPS[name]
        new_steps = [replace(step, why=preparation.purpose) for step in preparation.apply(changed)]
        if new_steps:
            check_invariants(changed, name)
            applied.extend(new_steps)
    if not applied:
        if changed is not model:
            changed.graphs.clear()  # they refer to each other, so that only a garbage collection would free the copy
        return model, ()
    _record_positions(model, applied)
    changed.digest = prepared_digest(model.digest, applied)
    return changed, tuple(applied)


def find_skipped_steps(prepared: Model, requested: Sequence[str]) -> tuple[SkippedStep, ...]:
    """Return the ops that the requested steps skipped, and all BatchNorms in training mode.

    Raises a ModelError if a weight in the model's files cannot be read.
    """
    skipped = list(find_training_batchnorms(prepared, step_requested=INFERENCE_BATCHNORM_STEP in requested))
    for name, step in PREPARATION_STEPS.items():
        for graph, op, obstacle in step.find_candidates(prepared) if name in requested and step.find_candidates else ():
            if obstacle is not None:
                skipped.append(SkippedStep(step=name, tensor=TensorRef(graph.name, op.name), reason=obstacle))
    return tuple(skipped)


def prepared_digest(source: str, steps: Sequence[Step]) -> str:
    """Return the hex SHA-256 that identifies the model `source` after `steps`."""
    if not steps:
        return source
    payload = json.dumps([source, [[step.step, step.target, step.detail] for step in steps]])
    return hashlib.sha256(payload.encode()).hexdigest()


def format_step_counts(names: Iterable[str]) -> str:
    """Format step names with their counts, for the metadata of a written model. `parse_step_names` reads it back."""
    return ", ".join(f"{name} ({count})" for name, count in Counter(names).items())


def parse_step_names(text: str) -> list[str]:
    """Return the step names in a text from `format_step_counts`."""
    return [entry.partition(" (")[0] for entry in text.split(", ") if entry]


def _record_positions(source: Model, steps: Sequence[Step]) -> None:
    """Add to the records the position of each removed op among the ops of its graph."""
    by_graph: dict[str, list[dict[str, Any]]] = {}
    for step in steps:
        for record in step.undo.get("removed", ()):
            by_graph.setdefault(record.get("graph", ""), []).append(record)
    for name, records in by_graph.items():
        order = {op.name: position for position, op in enumerate(source.graphs[name].ops())}
        for record in records:
            if record["op"] in order:
                record["position"] = order[record["op"]]
