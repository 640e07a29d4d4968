"""BatchNorms behind a convolution or matrix product taken up into its weight and bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir import DataType, Graph, Model, Op, Output, Parameters, TensorRef, Use, named
from graphquant.prepare.places import Place, place_of, places, plain_text
from graphquant.prepare.steps import Left, Step, drop_unread
from graphquant.prepare.undo import Edits, Scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphquant.numerics import Array

NAME: Final = "fold-batchnorm"

_MANY: Final = 1 << 10
"""More axes than any tensor has."""


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
            place = place_of(model, graph, op, parameters)
            if isinstance(place, Place):
                fold = _fold(graph, place, parameters)
                if isinstance(fold, _Fold):
                    yield _apply(model, place, fold, parameters)


def unfolded(model: Model) -> Iterator[Left]:
    """The BatchNorms that are still there outside of training, or could be folded were their values no variables."""
    parameters = Parameters(model)
    for graph, op, place in places(model, parameters):
        reason = place if isinstance(place, str) else _fold(graph, place, parameters)
        if isinstance(reason, str):
            yield Left(step=NAME, tensor=TensorRef(graph.name, op.name), reason=reason)


@dataclass(frozen=True, slots=True)
class _Fold:
    """The values of one folding.

    Attributes:
        weight: The weight before.
        factor: float64 (C,), what each output channel is multiplied by.
        split: The shape in which the weight is multiplied.
        along: The shape that the factor has then.
        new_weight: float32, of the weight's shape.
        new_bias: float32 (C,).
    """

    weight: Array
    factor: Array
    split: tuple[int, ...]
    along: tuple[int, ...]
    new_weight: Array
    new_bias: Array


def _fold(graph: Graph, place: Place, parameters: Parameters) -> _Fold | str:
    """The values of the folding, or why there are none."""
    known = [_value(graph, use, parameters) for use in place.values]
    values, weight = [value for value in known if value is not None], _value(graph, place.weight, parameters)
    has_bias = place.bias is not None and graph.producer(place.bias) is not None
    bias = _value(graph, place.bias, parameters) if place.bias is not None and has_bias else None
    if len(values) != len(known) or weight is None or (has_bias and bias is None):
        return f"its values, or those of {place.weighted.name}, are not known before the model runs"
    layout = _layout(place.weighted, weight.shape)
    channels = int(np.prod(layout[1])) if layout is not None else 0
    statistics = values if place.mul is None else _statistics(values, _behind_channels(graph, place, weight))
    if weight.dtype != np.float32:
        return f"the weight of {place.weighted.name} is {weight.dtype}; only float32 is folded"
    if layout is None or any(value.shape != (channels,) for value in statistics):
        return f"it does not have one value for each of the {channels} output channels of {place.weighted.name}"
    if bias is not None and (bias.size not in {1, channels} or bias.shape[-1:] not in {(), (bias.size,)}):
        return f"the bias of {place.weighted.name} is not one number per output channel"
    scale, offset, mean, variance = (value.astype(np.float64) for value in statistics)
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + (place.norm.number("epsilon", 1e-5) if place.mul is None else 0.0))
        before = 0.0 if bias is None else bias.astype(np.float64).reshape(-1)
        new_bias = (offset + (before - mean) * factor).astype(np.float32)
        new_weight = _scaled(weight, factor, *layout)
    if not (np.isfinite(new_bias).all() and np.isfinite(new_weight).all()):
        return "its variance is negative, or its values are too large, so that folding would give no finite weight"
    return _Fold(weight, factor, *layout, new_weight, new_bias)


def _behind_channels(graph: Graph, place: Place, weight: Array) -> int:
    """How many axes of the data lie behind that of its channels."""
    shape = graph.output(TensorRef(graph.name, place.norm.name)).shape
    match place.weighted.type:
        case "Conv" | "ConvTranspose":
            return weight.ndim - 2
        case "BatchNormalization":
            return len(shape) - 2 if shape is not None else _MANY
        case _:
            return 0


def _statistics(values: list[Array], behind: int) -> list[Array]:
    """Scale, offset, mean and variance of a normalisation that multiplies by the first value and adds the second.

    Channels have `behind` axes behind them.
    """
    scale, offset = (_per_channel(value, value.ndim - 1 - behind) for value in values)
    return [scale, offset, np.zeros_like(scale), np.ones_like(scale)]


def _per_channel(value: Array, axis: int) -> Array:
    """The values along the axis of channels, (C,); an array of another shape where they differ along others."""
    return value.reshape(-1) if axis >= 0 and value.shape[axis] == value.size else value[None]


def _value(graph: Graph, use: Use, parameters: Parameters) -> Array | None:
    tensor = graph.producer(use)
    return None if tensor is None else parameters.value(tensor)


def _layout(weighted: Op, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes in which a weight and a factor per output channel are multiplied; None if the weight has no such axis.

    1. Groups of a transposed convolution lie behind each other on the weight's axis 0, their channels on axis 1.
    2. TensorFlow's depthwise weight [h, w, c, m] has its output channels on two axes.
    3. All others have them on one.
    """
    axis = weighted.channel_axis or 0
    if not -len(shape) <= axis < len(shape):
        return None
    axis %= len(shape)
    ones = (1,) * len(shape)
    if weighted.kind == "conv_transpose" and (group := int(weighted.number("group", 1))) != 1:  # Case 1.
        if group < 1 or axis != 1 or shape[0] % group:
            return None
        return (group, shape[0] // group, *shape[1:]), (group, 1, shape[1], *ones[2:])
    if weighted.kind == "depthwise_conv" and axis == len(shape) - 2:  # Case 2.
        return shape, (*ones[:axis], *shape[axis:])
    return shape, (*ones[:axis], shape[axis], *ones[axis + 1 :])


def _scaled(weight: Array, factor: Array, split: tuple[int, ...], along: tuple[int, ...]) -> Array:
    """`weight` with each output channel multiplied by its factor (C,), as float32."""
    product = weight.astype(np.float64).reshape(split) * factor.reshape(along)
    return product.astype(np.float32).reshape(weight.shape)


def _apply(model: Model, place: Place, fold: _Fold, parameters: Parameters) -> Step:
    """Gives the weighted op new constants, which no other reader of the old ones sees, and takes the BatchNorm out."""
    graph, norm, weighted = model.graphs[place.weight.graph], place.norm, place.weighted
    uses = [place.weight, *([] if place.bias is None else [place.bias]), *place.values]
    stale = [tensor for tensor in map(graph.producer, uses) if tensor is not None]
    home = parameters.origin(stale[0])
    origin = model.op(home)
    edits = Edits(model)
    constant = _constant(graph, f"{weighted.name}/weight_folded", fold.new_weight, _reader(fold, origin))
    if origin.kind == "constant":
        edits.scaled(
            Scaled(
                op=home,
                weight=fold.weight,
                now=constant.name,
                product=fold.new_weight,
                factor=fold.factor,
                split=fold.split,
                along=fold.along,
            )
        )
    edits.connect(place.weight, edits.add(graph, constant))
    shift = edits.add(graph, _constant(graph, f"{weighted.name}/bias_folded", fold.new_bias))
    result = TensorRef(graph.name, weighted.name if place.bias is None else place.bias.op)
    if place.bias is not None:
        edits.connect(place.bias, shift)
    else:
        result = edits.add(graph, _adder(model, graph, norm, weighted), [result, shift])
    readers = graph.consumers(TensorRef(graph.name, norm.name))
    for use in readers:
        edits.connect(use, result)
    edits.remove(graph, norm.name)
    if place.mul is not None:
        edits.remove(graph, place.mul.name)
    ends = [use for use in readers if graph.graphs[use.graph].op(use.op).kind == "output"]
    if ends and model.format == "tensorflow" and not graph.name:
        named_so = edits.add(graph, _namesake(norm), [result])
        for use in ends:
            edits.connect(use, named_so)
    single = frozenset({"constant", "identity", "input"})
    drop_unread(model, stale[:1], single, edits)
    drop_unread(model, stale[1:], single if place.mul is None else None, edits)
    detail, undo = f"folded into {weighted.name}", {"weighted": weighted.name, **edits.undo()}
    return Step(step=NAME, target=named(graph.name, norm.name), detail=detail, undo=undo)


def _reader(fold: _Fold, origin: Op) -> Callable[[], Array] | None:
    """What reads the weight from its file again and scales it; None for one that is in memory anyway."""
    read = origin.value
    if not isinstance(fold.weight, np.memmap) or origin.kind != "constant" or read is None:
        return None
    factor, split, along = fold.factor, fold.split, fold.along
    return lambda: _scaled(read(), factor, split, along)


def _adder(model: Model, graph: Graph, norm: Op, weighted: Op) -> Op:
    """An op that adds the bias; TensorFlow's BiasAdd knows two names of layouts only."""
    label = graph.fresh(f"{norm.name}/bias_add")
    known = graph.output(TensorRef(graph.name, weighted.name))
    outputs = (Output(label, known.dtype, known.shape),)
    if model.format != "tensorflow":
        return Op(name=label, kind="add", type="Add", outputs=outputs, rule=NAME)
    layout = str(plain_text(weighted.attrs.get("data_format", "NHWC")))
    return Op(
        name=label,
        kind="bias_add",
        type="BiasAdd",
        roles=("input", "bias"),
        outputs=outputs,
        attrs={"T": DataType("float32"), "data_format": "NCHW" if layout.startswith("NC") else "NHWC"},
        rule=NAME,
    )


def _namesake(norm: Op) -> Op:
    """An Identity called as the BatchNorm was: what ends a GraphDef is fetched by its op's name."""
    return Op(
        name=norm.name,
        kind="identity",
        type="Identity",
        outputs=norm.outputs[:1],
        attrs={"T": DataType("float32")},
        rule=NAME,
    )


def _constant(graph: Graph, name: str, value: Array, read: Callable[[], Array] | None = None) -> Op:
    label = graph.fresh(name)
    return Op(
        name=label,
        kind="constant",
        type="Const",
        roles=(),
        outputs=(Output(label, str(value.dtype), value.shape),),
        value=read or (lambda: value),
        rule=NAME,
    )
