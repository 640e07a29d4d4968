"""Split ops into others that compute the same: PRelu, norms, and those that ONNX Runtime fused when it saved a model.

No backend quantizes com.microsoft's FusedConv, FusedGemm and FusedMatMul. Their parts are quantized as in any other
model, and the runtime fuses those that stay float again.

ONNX Runtime's PRelu tests the sign of each value, and takes up to 4 ns for one where signs alternate. A product and a
maximum take 0.2 ns together.

Since release 1.30 its SkipLayerNormalization takes up to 8 times as long as a sum and a LayerNormalization, and the six
ops of a root mean square norm take three times as long as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from numbers import Real
from typing import Any, Final

import numpy as np

from graphquant.ir import FUSED_PREFIX, MATRIX_PRODUCT_KINDS, RELU6_BOUNDS, Graph, Model, Op, Parameters, TensorRef, Use
from graphquant.qdq.family import FamilyArguments, FusedForm
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN
from graphquant.quantize.preparation_undo import Candidate, OpEdits, Step
from graphquant.rules.conditions import find_bindings
from graphquant.rules.pattern_syntax import parse_pattern

SPLIT_FUSED_STEP: Final = "split-fused"
SPLIT_PRELU_STEP: Final = "split-prelu"
REWRITE_NORMS_STEP: Final = "rewrite-norms"

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
BROADCASTING_OPSET: Final = 8  # from this opset the inputs of Max, Min and Sum are broadcast
RMS_NORM_OPSET: Final = 23  # from this opset RMSNormalization is a standard op
REWRITTEN_NORM: Final = FusedForm("LayerNormalization", 32, FamilyArguments())
"""The form of a norm for which a runtime is asked whether `rewrite_norms` saves it time."""

RMS_NORM: Final = parse_pattern(
    ("s = square(x)", "v = reduce_mean(s)", "a = add(v, e)", "n = divide_by_sqrt(x, a)", "y = mul(n, g)")
)
BIASED_GELUS: Final = {"BiasGelu": ("gelu", "Gelu"), "FastGelu": ("other", "FastGelu")}
"""Kind and type of the ops of com.microsoft that remain of an activation whose second input is a bias."""


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


class _Split(OpEdits):
    """The split of one fused op."""

    def __init__(self, model: Model, graph: Graph, fused: Op) -> None:
        super().__init__(SPLIT_FUSED_STEP, model, graph, fused)
        self._inputs = graph.slots(fused.name)
        self._output = graph.output(TensorRef(graph.name, fused.name))

    def apply(self) -> Step:
        """Turn the op into the product of the same name, followed by the other ops."""
        graph, fused = self.graph, self.op
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
        self.replace(graph, replace(fused, attrs=attrs, roles=fused.roles[:-1], **fields))
        if kind == "matmul":
            self._transpose_inputs()
        if factor != 1.0:
            result = self.insert("factor", "mul", "Mul", [result, self.insert_constant("alpha", factor)])
        if summand is not None:
            self.connect(Use(graph.name, fused.name, SUMMAND_SLOT), None)
            result = self.insert("sum", "add", "Add", [result, summand])
        if activation:
            result = self._add_activation(activation, result)
        for use in readers:
            self.connect(use, result)
        return self.to_step(self.step, graph, fused, f"is {', '.join([fields['type'], *self.types])}")

    def _transpose_inputs(self) -> None:
        """Add the transpositions of a FusedMatMul."""
        for slot, name in enumerate(TRANSPOSING):
            source = self._inputs[slot]
            shape = None if source is None else self.graph.output(source).shape
            if shape is not None and self.op.numeric_attr(name, 0):
                axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
                fields: dict[str, Any] = {"shape": tuple(shape[axis] for axis in axes), "attrs": {"perm": axes}}
                transposed = self.insert(f"transpose_{slot}", "transpose", "Transpose", [source], **fields)
                self.connect(Use(self.graph.name, self.op.name, slot), transposed)

    def _add_activation(self, activation: str, tensor: TensorRef) -> TensorRef:
        kind, names = ACTIVATIONS[activation]
        attrs, limits = dict(zip(names, _activation_values(self.op), strict=True)), list[TensorRef]()
        if activation == "Clip" and tuple(attrs.values()) == RELU6_BOUNDS:
            kind = "relu6"
        if activation == "Clip" and self._model.opset >= INPUT_LIMITS_OPSET:
            limits, attrs = [self.insert_constant(name, value) for name, value in attrs.items()], {}
        roles = ("input", *names[: len(limits)])
        return self.insert("activation", kind, activation, [tensor, *limits], attrs=attrs, roles=roles)


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
    edits, (tensor, slope) = OpEdits(SPLIT_PRELU_STEP, model, graph, op), operands
    if is_maximum:
        kind, op_type, terms = "max", "Max", [tensor, edits.insert("product", "mul", "Mul", [tensor, slope])]
    else:
        negative = edits.insert("negative", "min", "Min", [tensor, edits.insert_constant("zero", 0)])
        positive = edits.insert("positive", "relu", "Relu", [tensor])
        kind, op_type, terms = "add", "Add", [positive, edits.insert("product", "mul", "Mul", [negative, slope])]
    detail = f"is {op_type} of products with its slopes"
    return edits.turn(kind, op_type, terms, detail, roles=("input", "input"), attrs={})


def rewrite_norms(model: Model) -> Iterator[Step]:
    """Write float32 norms, and biases before them or before a Gelu, in the ops that ONNX Runtime computes fastest.

    A Sum before a LayerNormalization has the values of an Add, which ONNX Runtime would join to the norm. A bias in an
    op of its own joins the product before it.
    """
    if not model.traits.named_values or model.opset < BROADCASTING_OPSET:
        return
    parameters = Parameters(model)
    norms = [bound for bound in find_bindings(model, RMS_NORM) if _is_rms_norm(model, bound, parameters)]
    for bound in norms:
        (epsilon,) = parameters.value(bound["e"]).flat  # type: ignore[union-attr]  # it has a value
        op_type = "RMSNormalization" if model.opset >= RMS_NORM_OPSET else "SimplifiedLayerNormalization"
        fields: dict[str, Any] = {"attrs": {"axis": -1, "epsilon": float(epsilon)}, "roles": ("input", "scale")}
        end = bound["y"]
        edits = OpEdits(REWRITE_NORMS_STEP, model, model.graphs[end.graph], model.op(end))
        yield edits.turn("rmsnorm", op_type, [bound["x"], bound["g"]], **fields)
    parameters = Parameters(model)
    for graph, op in list(model.reachable_ops()):
        if graph.is_function or not op.outputs or op.outputs[0].dtype != "float32":
            continue
        edits, is_fused = OpEdits(REWRITE_NORMS_STEP, model, graph, op), op.domain == MICROSOFT_DOMAIN
        inputs = [*graph.slots(op.name), None, None, None]
        if is_fused and op.type == "SkipLayerNormalization":
            if not graph.consumers_by_port(op.name).keys() & {1, 2}:  # mean and deviation
                yield _split_skip(model, edits, inputs)
        elif is_fused and op.type in BIASED_GELUS and inputs[1] is not None:
            kind, op_type = BIASED_GELUS[op.type]
            yield edits.turn(kind, op_type, [edits.insert("biased", "add", "Add", inputs[:2])], roles=("input",))
        elif op.type == "Add" and _is_before_norm(graph, op, parameters):
            yield edits.turn("add", "Sum", inputs[:2])


def _is_rms_norm(model: Model, bound: dict[str, TensorRef], parameters: Parameters) -> bool:
    """Return True if a match of `RMS_NORM` is a norm over the last axis, whose parts nothing else reads."""
    shape, end = parameters.shape(bound["x"]), model.graphs[bound["y"].graph]
    if not shape or shape[-1] is None or end.is_function or model.op(bound["y"]).outputs[0].dtype != "float32":
        return False
    # A branch may read parts of the graph around it.
    slots = {name: [*model.graphs[tensor.graph].slots(tensor.op), None] for name, tensor in bound.items()}
    mean, epsilon, source = model.op(bound["v"]), parameters.value(bound["e"]), slots["v"][1]
    axes = np.asarray(mean.attrs.get("axes", ()) if source is None else parameters.value(source))
    reads = (("s", "x"), ("n", "x"), ("y", "n"), ("y", "g"))  # without an op in between
    return (
        axes.reshape(-1).tolist() in ([-1], [len(shape) - 1])
        and bool(mean.numeric_attr("keepdims", 1))
        and epsilon is not None
        and epsilon.size == 1
        and parameters.shape(bound["g"]) == shape[-1:]
        and len(parameters.shape(bound["y"]) or ()) == len(shape)  # a constant of more axes would add some
        and all(bound[read] in slots[reader] for reader, read in reads)
        and len(end.consumers(bound["n"])) == 1
    )


def _is_before_norm(graph: Graph, add: Op, parameters: Parameters) -> bool:
    """Return True if a LayerNormalization of three axes reads a sum of two computed tensors.

    ONNX Runtime joins only those.
    """
    readers = graph.consumers(TensorRef(graph.name, add.name))
    types = {graph.op(use.op).type for use in readers if use.graph == graph.name and use.slot == 0}
    if "LayerNormalization" not in types or len(add.outputs[0].shape or ()) != 3:  # noqa: PLR2004
        return False
    return not any(parameters.is_parameter(tensor) for tensor in graph.slots(add.name) if tensor is not None)


def _split_skip(model: Model, edits: OpEdits, inputs: list[TensorRef | None]) -> Step:
    """Add the bias, to a product if there is one, and the other summand, before a LayerNormalization."""
    graph, op, terms, (scale, offset, bias) = edits.graph, edits.op, inputs[:2], inputs[2:5]
    if bias is not None:
        kinds = [model.op(term).kind if term else "" for term in terms]
        slot = next((slot for slot, kind in enumerate(kinds) if kind in MATRIX_PRODUCT_KINDS), 0)
        terms[slot] = edits.insert("biased", "add", "Add", [terms[slot], bias])
    total = edits.insert("sum", "add", "Sum", terms, **({"outputs": op.outputs[3:]} if op.outputs[3:] else {}))
    for use in graph.consumers(TensorRef(graph.name, op.name, 3)):  # the output that is the sum
        edits.connect(use, total)
    attrs = {"axis": -1, "epsilon": op.numeric_attr("epsilon", float(np.float32(1e-12)))}
    fields: dict[str, Any] = {"roles": ("input", "scale", "offset"), "outputs": op.outputs[:1]}
    return edits.turn("layernorm", "LayerNormalization", [total, scale, offset], domain="", attrs=attrs, **fields)
