"""BatchNorms behind a convolution taken up into its weight and bias.

Keras 3 spells a BatchNorm out: what is folded of it is a Mul and an Add that read one value per channel each.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.ir import CONTROL, DataType, Graph, Model, Op, Output, Parameters, TensorRef, Use
from graphquant.numerics import Array, along
from graphquant.prepare.steps import Left, Step, drop_unread, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "fold-batchnorm"

LIVES_ON: Final = "it is not folded: its values are variables, with which training goes on; freeze the model to fold it"

FOLDABLE = frozenset({"conv", "depthwise_conv", "conv_transpose", "gemm"})
"""Kinds whose weight can take up a BatchNorm that reads them."""


def fold_batchnorm(model: Model) -> Iterator[Step]:
    """Y = scale * (conv(x) - mean) / sqrt(variance + epsilon) + offset becomes one conv with other weights and bias.

    What is held in variables is left: constants in its place could not be trained any more, and would be apart from
    what copies of the graph read.

    Source of the formula: Ioffe and Szegedy 2015, "Batch Normalization", section 3.1.
    """
    parameters = Parameters(model)  # what is folded was no parameter before and is none after
    for name in model.live():
        graph = model.graphs[name]
        for op in list(graph.ops()):
            place = _place(graph, op, parameters)
            if place is None or _is_variable(graph, place, parameters):
                continue
            fold = _fold(graph, place, parameters)
            if fold is not None:
                yield _apply(model, place, fold)


def unfolded(model: Model) -> Iterator[Left]:
    """The BatchNorms that could be folded were their values no variables."""
    parameters = Parameters(model)
    for name in model.live():
        graph = model.graphs[name]
        for op in graph.ops():
            place = _place(graph, op, parameters)
            if place is not None and _is_variable(graph, place, parameters):
                yield Left(step=NAME, tensor=TensorRef(name, op.name), reason=LIVES_ON)


@dataclass(frozen=True, slots=True)
class _Place:
    """A BatchNorm that may be folded, by the structure of the graph around it.

    Attributes:
        norm: The BatchNorm, or the Add at the end of one that is spelled out.
        mul: The Mul before that Add.
        values: Where scale, offset, mean and variance are read, or what is multiplied by and what is added.
        weighted: The conv or gemm before it.
        bias_add: The bias_add between them, as TensorFlow has it.
        weight: Where the weight is read.
        bias: Where the bias is read, or would be; None if it needs an op of its own.
    """

    norm: Op
    mul: Op | None
    values: tuple[Use, ...]
    weighted: Op
    bias_add: Op | None
    weight: Use
    bias: Use | None


@dataclass(frozen=True, slots=True)
class _Fold:
    """The values of one folding.

    Attributes:
        statistics: scale, offset, mean and variance, each (C,).
        weight: The weight before.
        bias: The bias before, None if there was none.
        new_weight: float32, of the same shape.
        new_bias: float32 (C,).
    """

    statistics: list[Array]
    weight: Array
    bias: Array | None
    new_weight: Array
    new_bias: Array


def _place(graph: Graph, norm: Op, parameters: Parameters) -> _Place | None:
    """The ops that a folding would change; None if another op needs what lies between them, or they do not fit."""
    mul, data = None, 0
    values = tuple(Use(graph.name, norm.name, slot) for slot in range(1, 5))
    if norm.kind == "add":
        data = _data_slot(graph, norm, parameters)
        mul = _alone(graph, Use(graph.name, norm.name, data))
        if mul is None or mul.kind != "mul" or mul.type != "Mul" or _ordered(graph, mul.name):
            return None
        inner = _data_slot(graph, mul, parameters)
        values = (Use(graph.name, mul.name, 1 - inner), Use(graph.name, norm.name, 1 - data))
        read = [graph.producer(use) for use in values]
        if not all(tensor is not None and parameters.is_parameter(tensor) for tensor in read):
            return None
        start = Use(graph.name, mul.name, inner)
    elif norm.kind == "batchnorm":
        start = Use(graph.name, norm.name, 0)
    else:
        return None
    training = norm.attrs.get("training_mode") or norm.attrs.get("is_training")
    if training or set(graph.readers(norm.name)) - {0} or _ordered(graph, norm.name):
        return None
    return _behind(graph, norm, mul, values, start)


def _data_slot(graph: Graph, op: Op, parameters: Parameters) -> int:
    """Which operand of a Mul or Add is no parameter; the first of two."""
    slots = graph.slots(op.name)
    return int(bool(slots) and slots[0] is not None and parameters.is_parameter(slots[0]))


def _behind(graph: Graph, norm: Op, mul: Op | None, values: tuple[Use, ...], start: Use) -> _Place | None:
    """The place of what begins where `start` reads the result of a convolution, or of the bias_add behind one."""
    source = _alone(graph, start)
    bias_add = None
    if source is not None and source.kind == "bias_add":
        bias_add = source
        source = _alone(graph, Use(graph.name, bias_add.name, 0))
    if source is None or not _takes_up(source):
        return None
    ops = [op for op in (norm if mul is None else None, bias_add, source) if op is not None]
    layouts = {str(_plain(op.attrs.get("data_format"))) for op in ops}
    if len(layouts) > 1 or (mul is not None and layouts != {"NHWC"}):
        return None
    bias: Use | None = None
    if bias_add is not None:
        bias = Use(graph.name, bias_add.name, 1)
    elif "bias" in source.roles:
        bias = Use(graph.name, source.name, source.roles.index("bias"))
    weight = Use(graph.name, source.name, source.roles.index("weight"))
    return _Place(norm, mul, values, source, bias_add, weight, bias)


def _is_variable(graph: Graph, place: _Place, parameters: Parameters) -> bool:
    """Whether a value that a folding would replace comes from a variable."""
    uses = [place.weight, *place.values]
    read = [graph.producer(use) for use in (*uses, *([place.bias] if place.bias is not None else []))]
    return any(parameters.is_variable(tensor) for tensor in read if tensor is not None)


def _alone(graph: Graph, use: Use) -> Op | None:
    """The op of this graph whose output 0 `use` alone reads."""
    source = graph.producer(use)
    if source is None or source.graph != graph.name or source.port or len(graph.consumers(source)) != 1:
        return None
    return graph.op(source.op)


def _ordered(graph: Graph, name: str) -> bool:
    """Whether other ops run before or after the op by control edges, which would be lost with it."""
    return bool(graph.control_inputs(name)) or any(CONTROL in edges for edges in graph.nx.adj[name].values())


def _takes_up(op: Op) -> bool:
    """Whether the op is linear in a weight whose channels are known, with nothing fused behind it."""
    if op.kind not in FOLDABLE or "weight" not in op.roles or op.channel_axis is None or op.type.startswith("_Fused"):
        return False
    return op.kind != "gemm" or (op.attrs.get("alpha", 1.0), op.attrs.get("beta", 1.0)) == (1.0, 1.0)


def _fold(graph: Graph, place: _Place, parameters: Parameters) -> _Fold | None:
    """The values of the folding; None if one of them is not constant, or they do not fit each other."""
    known = [_value(graph, use, parameters) for use in place.values]
    values, weight = [value for value in known if value is not None], _value(graph, place.weight, parameters)
    has_bias = place.bias is not None and graph.producer(place.bias) is not None
    bias = _value(graph, place.bias, parameters) if place.bias is not None and has_bias else None
    if len(values) != len(known) or weight is None or (has_bias and bias is None):
        return None
    channels = _channels(place.weighted, weight)
    statistics = values if place.mul is None else _statistics(values)
    if weight.dtype != np.float32 or any(value.shape != (channels,) for value in statistics):
        return None
    if bias is not None and (bias.size not in {1, channels} or bias.shape[-1:] not in {(), (bias.size,)}):
        return None
    scale, offset, mean, variance = (value.astype(np.float64) for value in statistics)
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + (place.norm.number("epsilon", 1e-5) if place.mul is None else 0.0))
        before = 0.0 if bias is None else bias.astype(np.float64).reshape(-1)
        new_bias = (offset + (before - mean) * factor).astype(np.float32)
        new_weight = _scaled(place.weighted, weight, factor)
    if not (np.isfinite(new_bias).all() and np.isfinite(new_weight).all()):
        return None
    return _Fold(statistics, weight, bias, new_weight, new_bias)


def _statistics(values: list[Array]) -> list[Array]:
    """Scale, offset, mean and variance of a normalisation that multiplies by the first value and adds the second."""
    scale, offset = (value.reshape(-1) if value.shape[-1:] == (value.size,) else value for value in values)
    return [scale, offset, np.zeros_like(scale), np.ones_like(scale)]


def _value(graph: Graph, use: Use, parameters: Parameters) -> Array | None:
    tensor = graph.producer(use)
    return None if tensor is None else parameters.value(tensor)


def _channels(weighted: Op, weight: Array) -> int:
    """Number of output channels of the weighted op; 0 if the weight has no such axis."""
    axis = weighted.channel_axis or 0
    if not -weight.ndim <= axis < weight.ndim:
        return 0
    if weighted.kind == "conv_transpose":
        group = int(weighted.number("group", 1))
        return int(weight.shape[axis] * group) if group > 0 and weight.shape[0] % group == 0 else 0
    if _has_multiplier(weighted, weight):
        return int(weight.shape[axis] * weight.shape[axis + 1])
    return int(weight.shape[axis])


def _has_multiplier(weighted: Op, weight: Array) -> bool:
    """Whether the weight is [h, w, c, m], whose output channels lie on two axes (TensorFlow's depthwise)."""
    return weighted.kind == "depthwise_conv" and weighted.channel_axis == weight.ndim - 2


def _scaled(weighted: Op, weight: Array, factor: Array) -> Array:
    """`weight` with each output channel multiplied by its factor (C,), as float32."""
    wide, axis = weight.astype(np.float64), weighted.channel_axis or 0
    group = int(weighted.number("group", 1)) if weighted.kind == "conv_transpose" else 1
    if group > 1:
        split = wide.reshape(group, wide.shape[0] // group, *wide.shape[1:])
        scaled = split * factor.reshape(group, 1, -1, *[1] * (wide.ndim - 2))
        return scaled.reshape(wide.shape).astype(np.float32)
    if _has_multiplier(weighted, weight):
        return (wide * factor.reshape(wide.shape[axis:])).astype(np.float32)
    return (wide * along(factor, axis, wide.ndim)).astype(np.float32)


def _apply(model: Model, place: _Place, fold: _Fold) -> Step:
    """Gives the weighted op new constants, which no other reader of the old ones sees, and takes the BatchNorm out."""
    graph, norm, weighted = model.graphs[place.weight.graph], place.norm, place.weighted
    old_bias = None if place.bias is None else graph.producer(place.bias)
    stale = [graph.producer(place.weight), old_bias, *(graph.producer(use) for use in place.values)]
    undo = {
        "batchnorm": encoded(norm),
        "mul": None if place.mul is None else encoded(place.mul),
        "weighted": weighted.name,
        "weight": str(stale[0]),
        "weight_value": _array(fold.weight),
        "bias": None if old_bias is None else str(old_bias),
        "bias_value": None if fold.bias is None else _array(fold.bias),
        "statistics": [_array(value) for value in fold.statistics],
    }
    graph.connect(place.weight, _constant(graph, f"{weighted.name}/weight_folded", fold.new_weight))
    shift = _constant(graph, f"{weighted.name}/bias_folded", fold.new_bias)
    result = TensorRef(graph.name, weighted.name if place.bias is None else place.bias.op)
    if place.bias is not None:
        graph.connect(place.bias, shift)
    else:
        result = _add_bias(graph, norm, result, shift)
    readers = graph.consumers(TensorRef(graph.name, norm.name))
    graph.reroute(TensorRef(graph.name, norm.name), readers, result)
    graph.remove(norm.name)
    if place.mul is not None:
        graph.remove(place.mul.name)
    ends = [use for use in readers if graph.graphs[use.graph].op(use.op).kind == "output"]
    if ends and model.format == "tensorflow" and not graph.name:
        graph.reroute(result, ends, _namesake(graph, norm, result))
    kinds = None if place.mul is not None else frozenset({"constant", "identity"})
    drop_unread(model, (tensor for tensor in stale if tensor is not None), kinds)
    return Step(step=NAME, target=norm.name, detail=f"folded into {weighted.name}", undo=undo)


def _add_bias(graph: Graph, norm: Op, data: TensorRef, shift: TensorRef) -> TensorRef:
    """Adds a TensorFlow BiasAdd, which knows two names of layouts only; returns its sum."""
    label = graph.fresh(f"{norm.name}/bias_add")
    known = graph.output(TensorRef(graph.name, norm.name))
    layout = str(_plain(norm.attrs.get("data_format", "NHWC")))
    op = Op(
        name=label,
        kind="bias_add",
        type="BiasAdd",
        roles=("input", "bias"),
        outputs=(Output(label, known.dtype, known.shape),),
        attrs={"T": DataType("float32"), "data_format": "NCHW" if layout.startswith("NC") else "NHWC"},
        rule=NAME,
    )
    return graph.add(op, [data, shift])


def _namesake(graph: Graph, norm: Op, result: TensorRef) -> TensorRef:
    """Adds an Identity called as the BatchNorm was: what ends a GraphDef is fetched by its op's name."""
    op = Op(
        name=norm.name,
        kind="identity",
        type="Identity",
        outputs=norm.outputs[:1],
        attrs={"T": DataType("float32")},
        rule=NAME,
    )
    return graph.add(op, [result])


def _plain(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _constant(graph: Graph, name: str, value: Array) -> TensorRef:
    label = graph.fresh(name)
    known = Output(label, str(value.dtype), value.shape)
    op = Op(
        name=label,
        kind="constant",
        type="Const",
        roles=(),
        outputs=(known,),
        value=lambda: value,
        rule=NAME,
    )
    return graph.add(op)


def _array(value: Array) -> dict[str, Any]:
    return {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "data": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
    }
