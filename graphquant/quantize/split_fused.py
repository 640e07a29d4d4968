"""Split ops into others that compute the same: PRelu, and those that ONNX Runtime fused when it saved a model.

No backend quantizes com.microsoft's FusedConv, FusedGemm and FusedMatMul. Their parts are quantized as in any other
model, and the runtime fuses those that stay float again.

ONNX Runtime's PRelu tests the sign of each value, and takes up to 4 ns for one where signs alternate. A product and a
maximum take 0.2 ns together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from numbers import Real
from typing import Any, Final

import numpy as np

from graphquant.ir import FUSED_PREFIX, RELU6_BOUNDS, Graph, Model, Op, Parameters, Shape, TensorRef, Use
from graphquant.qdq.family import new_constant, new_op
from graphquant.quantize.preparation_undo import Candidate, RecordedEdits, Step
from graphquant.quantize.source_record import node_notes

SPLIT_FUSED_STEP: Final = "split-fused"
SPLIT_PRELU_STEP: Final = "split-prelu"

ACTIVATIONS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "Relu": ("relu", ()),
    "Sigmoid": ("sigmoid", ()),
    "Tanh": ("tanh", ()),
    "LeakyRelu": ("leaky_relu", ("alpha",)),
    "HardSigmoid": ("hard_sigmoid", ("alpha", "beta")),
    "Clip": ("clip", ("min", "max")),
}
"""Kind of each activation, and its attributes in the order of FusedConv's `activation_params`."""

GEMM_PARAMETERS: Final = ("activation_alpha", "activation_beta", "activation_gamma")
TRANSPOSING: Final = ("transA", "transB")
FUSED_ATTRIBUTES: Final = frozenset({"activation", "activation_params", *GEMM_PARAMETERS})
FUSED_MATMUL_ATTRIBUTES: Final = frozenset({"alpha", *TRANSPOSING, "transBatchA", "transBatchB"})
SUMMAND_SLOT: Final = 3  # input of a FusedConv that is added before the activation
INPUT_LIMITS_OPSET: Final = 11  # from this opset the limits of Clip are inputs
BROADCASTING_OPSET: Final = 8  # from this opset the inputs of Max and Min are broadcast


def split_fused_ops(model: Model) -> Iterator[Step]:
    """Replace each fused op by the product, and by ops for the factor, the summand and the activation after it."""
    for graph, op, obstacle in fused_ops(model):
        if obstacle is None:
            yield _Split(model, graph, op).apply()


def fused_ops(model: Model) -> Iterator[Candidate]:
    """Yield the fused ops."""
    for graph, op in [(graph, op) for graph, op in model.reachable_ops() if op.kind.startswith(FUSED_PREFIX)]:
        yield graph, op, _split_obstacle(graph, op)


def _split_obstacle(graph: Graph, op: Op) -> str | None:
    """Return the reason why the op cannot be split, or None."""
    activation = op.text_attr("activation", "")
    if not op.type.startswith("Fused"):
        return "its weight is stored for one kind of processor; use the model before ONNX Runtime optimized its layout"
    if activation and activation not in ACTIVATIONS:
        return f"its activation {activation!r} is not supported"
    if activation and len(_activation_values(op)) != len(ACTIVATIONS[activation][1]):
        return f"it does not have the parameters of its activation {activation!r}"
    if op.kind == "fused_matmul":
        if any(op.numeric_attr(name, 0) for name in ("transBatchA", "transBatchB")):
            return "it exchanges batch axes"
        for slot, name in enumerate(TRANSPOSING):
            tensor = graph.source_of(Use(graph.name, op.name, slot))
            shape = None if tensor is None else graph.output(tensor).shape
            if op.numeric_attr(name, 0) and (shape is None or len(shape) < 2):  # noqa: PLR2004  # a matrix
                return f"it transposes input {slot}, whose number of axes is not known"
    return None


def _activation_values(op: Op) -> list[float]:
    """Return the parameters of the activation, as many as the op has; none if they are no list of numbers."""
    if (values := op.attrs.get("activation_params")) is not None:
        is_numeric = isinstance(values, list) and all(isinstance(value, Real) for value in values)
        return list(map(float, values)) if is_numeric else []
    count = len(ACTIVATIONS[op.text_attr("activation", "")][1])
    return [op.numeric_attr(name, 0.0) for name in GEMM_PARAMETERS[:count] if name in op.attrs]


class _Split:
    """The split of one fused op."""

    def __init__(self, model: Model, graph: Graph, fused: Op) -> None:
        self._graph, self._fused, self._edits = graph, fused, RecordedEdits(model)
        self._inputs = graph.slots(fused.name)
        self._output = graph.output(TensorRef(graph.name, fused.name))
        self._has_limit_inputs = model.opset >= INPUT_LIMITS_OPSET
        self._types: list[str] = []

    def apply(self) -> Step:
        """Turn the op into the product of the same name, followed by the other ops."""
        graph, fused = self._graph, self._fused
        result = TensorRef(graph.name, fused.name)
        readers, kind = graph.consumers(result), fused.kind.removeprefix(FUSED_PREFIX)
        factor = fused.numeric_attr("alpha", 1.0) if kind == "matmul" else 1.0
        summand = self._inputs[SUMMAND_SLOT] if len(self._inputs) > SUMMAND_SLOT else None
        activation = fused.text_attr("activation", "")
        dropped = FUSED_ATTRIBUTES | (FUSED_MATMUL_ATTRIBUTES if kind == "matmul" else frozenset())
        attrs = {name: value for name, value in fused.attrs.items() if name not in dropped}
        fields: dict[str, Any] = {"kind": kind, "type": fused.type.removeprefix("Fused"), "domain": "", "source": None}
        if factor != 1.0 or summand is not None or activation:  # a later op has the result, perhaps a graph output
            fields["outputs"] = (replace(self._output, name=graph.unique_name(f"{fused.name}/product")),)
        self._types.append(fields["type"])
        self._edits.replace(graph, replace(fused, attrs=attrs, roles=fused.roles[:-1], **fields))
        if kind == "matmul":
            self._transpose_inputs()
        if factor != 1.0:
            result = self._add("factor", [result, self._add_constant("alpha", factor)], kind="mul", type="Mul")
        if summand is not None:
            self._edits.connect(Use(graph.name, fused.name, SUMMAND_SLOT), None)
            result = self._add("sum", [result, summand], kind="add", type="Add")
        if activation:
            result = self._add_activation(activation, result)
        for use in readers:
            self._edits.connect(use, result)
        return self._edits.to_step(SPLIT_FUSED_STEP, graph, fused, f"is {', '.join(self._types)}")

    def _transpose_inputs(self) -> None:
        """Add the transpositions of a FusedMatMul."""
        for slot, name in enumerate(TRANSPOSING):
            source = self._inputs[slot]
            shape = None if source is None else self._graph.output(source).shape
            if shape is not None and self._fused.numeric_attr(name, 0):
                axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
                sizes = tuple(shape[axis] for axis in axes)
                fields: dict[str, Any] = {"kind": "transpose", "type": "Transpose", "attrs": {"perm": axes}}
                transposed = self._add(f"transpose_{slot}", [source], sizes, **fields)
                self._edits.connect(Use(self._graph.name, self._fused.name, slot), transposed)

    def _add_activation(self, activation: str, tensor: TensorRef) -> TensorRef:
        kind, names = ACTIVATIONS[activation]
        attrs, limits = dict(zip(names, _activation_values(self._fused), strict=True)), list[TensorRef]()
        if activation == "Clip" and tuple(attrs.values()) == RELU6_BOUNDS:
            kind = "relu6"
        if activation == "Clip" and self._has_limit_inputs:
            limits, attrs = [self._add_constant(name, value) for name, value in attrs.items()], {}
        roles = ("input", *names[: len(limits)])
        return self._add("activation", [tensor, *limits], kind=kind, type=activation, attrs=attrs, roles=roles)

    def _add(self, name: str, operands: list[TensorRef | None], shape: Shape | None = None, **fields: Any) -> TensorRef:
        self._types.append(fields["type"])
        shape = self._output.shape if shape is None else shape
        op = new_op(
            self._graph, f"{self._fused.name}/{name}", self._output.dtype, shape, rule=SPLIT_FUSED_STEP, **fields
        )
        return self._edits.add(self._graph, op, operands)

    def _add_constant(self, name: str, value: float) -> TensorRef:
        array = np.array(value, self._output.dtype or "float32")
        name = f"{self._fused.name}/{name}"
        op = new_constant(self._graph, name, array, op_type="Const", rule=SPLIT_FUSED_STEP)
        return self._edits.add(self._graph, op)


def split_prelus(model: Model) -> Iterator[Step]:
    """Replace each float32 PRelu with constant slopes by the maximum of x and slope * x, which has the same values.

    With a slope above 1 it is the sum of the positive values and of the products of the negative ones, and with a slope
    of 0 too, because the product of 0 and an infinite value is no number.
    """
    parameters = Parameters(model)
    if not model.traits.named_values or model.opset < BROADCASTING_OPSET:
        return
    for graph, op in [(graph, op) for graph, op in model.reachable_ops() if op.kind == "prelu"]:
        tensor, slope = [*graph.slots(op.name), None, None][:2]  # a file may lack one
        values = None if slope is None else parameters.value(slope)
        if tensor is None or slope is None or values is None or graph.is_function or op.outputs[0].dtype != "float32":
            continue
        if not np.isfinite(values).all():  # positive values would become NaN
            continue
        yield _split_prelu(model, graph, op, (tensor, slope), is_maximum=bool(((values <= 1) & (values != 0)).all()))


def _split_prelu(
    model: Model, graph: Graph, op: Op, operands: tuple[TensorRef, TensorRef], *, is_maximum: bool
) -> Step:
    edits, (tensor, slope) = RecordedEdits(model), operands

    def add(name: str, kind: str, op_type: str, *inputs: TensorRef) -> TensorRef:
        dtype, shape, roles = op.outputs[0].dtype, op.outputs[0].shape, ("input",) * len(inputs)
        fields: dict[str, Any] = {"kind": kind, "type": op_type, "roles": roles, "rule": SPLIT_PRELU_STEP}
        return edits.add(graph, new_op(graph, f"{op.name}/{name}", dtype, shape, **fields), [*inputs])

    if is_maximum:
        kind, op_type, terms = "max", "Max", (tensor, add("product", "mul", "Mul", tensor, slope))
    else:
        zero = new_constant(graph, f"{op.name}/zero", np.zeros((), np.float32), op_type="Const", rule=SPLIT_PRELU_STEP)
        negative = add("negative", "min", "Min", tensor, edits.add(graph, zero))
        positive = add("positive", "relu", "Relu", tensor)
        kind, op_type, terms = "add", "Add", (positive, add("product", "mul", "Mul", negative, slope))
    joined = replace(op, kind=kind, type=op_type, roles=("input", "input"), attrs={}, source=None, notes=node_notes(op))
    edits.replace(graph, joined)
    for slot, term in enumerate(terms):
        edits.connect(Use(graph.name, op.name, slot), term)
    return edits.to_step(SPLIT_PRELU_STEP, graph, op, f"is {op_type} of products with its slopes")
