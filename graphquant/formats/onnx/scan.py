"""A Scan written as the Loop that does the same: a Loop can carry a sequence of values out of its body, a Scan cannot.

states, outs = Scan(states, xs)    becomes    states, outs = Loop(length of xs, , states), where x = Gather(xs, i)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnx import TensorProto, helper

from graphquant.errors import UnwatchableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OPSET_STEPS = 10
"""First opset whose Slice has steps, which turn around what a Scan collects from the last place to the first."""

BEFORE_FIRST = -(1 << 63)
"""Where a Slice backwards ends."""


def as_loop(graph: Any, node: Any, body: Any, opset: int, fresh: Callable[[], str]) -> None:
    """Makes the Scan `node` of `graph` a Loop with the same body, in place.

    Args:
        graph: The GraphProto that holds the node.
        node: A Scan of opset 9 or later.
        body: Its body.
        opset: Opset of the default domain.
        fresh: Gives a new value name.

    Raises:
        UnwatchableError: How its outputs are laid out cannot be said with a Loop.
    """
    given = {attr.name: list(attr.ints) for attr in node.attribute}
    states = len(node.input) - next(attr.i for attr in node.attribute if attr.name == "num_scan_inputs")
    scanned, slices = list(node.input[states:]), [info.name for info in body.input[states:]]
    outputs = len(body.output) - states
    axes, turned = (given.get(f"scan_input_{name}", [0] * len(scanned)) for name in ("axes", "directions"))
    out_axes, out_turned = (given.get(f"scan_output_{name}", [0] * outputs) for name in ("axes", "directions"))
    after: list[Any] = []
    renamed: dict[int, str] = {}
    for place, info in enumerate(body.output[states : len(node.output)], states):
        axis, back = out_axes[place - states], bool(out_turned[place - states])
        if node.output[place] and (axis or back):
            renamed[place] = fresh()
            after += _arranged(renamed[place], node.output[place], info.type.tensor_type, axis, back, opset, fresh)
    for place, made in renamed.items():
        node.output[place] = made
    before, count, last = _length(scanned[0], axes[0], fresh)
    turn, condition, condition_out = fresh(), fresh(), fresh()
    head = [helper.make_node("Identity", [condition], [condition_out])]
    for source, value, axis, back in zip(scanned, slices, axes, turned, strict=True):
        index = fresh() if back else turn
        head += [helper.make_node("Sub", [last, turn], [index])] if back else []
        head.append(helper.make_node("Gather", [source, index], [value], axis=axis))
    _insert(body.node, 0, head)
    del body.input[states:]
    ends = [helper.make_tensor_value_info(turn, TensorProto.INT64, [])]
    _insert(body.input, 0, [*ends, helper.make_tensor_value_info(condition, TensorProto.BOOL, [])])
    _insert(body.output, 0, [helper.make_tensor_value_info(condition_out, TensorProto.BOOL, [])])
    for attr in [attr for attr in node.attribute if attr.name != "body"]:
        node.attribute.remove(attr)
    node.op_type = "Loop"
    node.input[:] = [count, "", *node.input[:states]]
    at = next(k for k, other in enumerate(graph.node) if other is node)
    _insert(graph.node, at + 1, after)
    _insert(graph.node, at, before)


def _length(value: str, axis: int, fresh: Callable[[], str]) -> tuple[list[Any], str, str]:
    """Nodes that give the size of `value` along `axis`, its name, and the name of that size less one."""
    place, one, shape, count, last = (fresh() for _ in range(5))
    nodes = [
        _constant(place, axis),
        _constant(one, 1),
        helper.make_node("Shape", [value], [shape]),
        helper.make_node("Gather", [shape, place], [count], axis=0),
        helper.make_node("Sub", [count, one], [last]),
    ]
    return nodes, count, last


def _arranged(
    made: str, wanted: str, type_: Any, axis: int, back: bool, opset: int, fresh: Callable[[], str]
) -> list[Any]:
    """Nodes that turn what a Loop stacked into what the Scan gives: last place first, and along another axis."""
    nodes = []
    if back:
        if opset < OPSET_STEPS:
            raise UnwatchableError("it is inside a Scan that collects from the last place to the first")
        start, end, place, turned = (fresh() for _ in range(4))
        nodes += [
            _constant(start, -1, dims=[1]),
            _constant(end, BEFORE_FIRST, dims=[1]),
            _constant(place, 0, dims=[1]),
            helper.make_node("Slice", [made, start, end, place, start], [turned if axis else wanted]),
        ]
        made = turned
    if axis:
        if not type_.HasField("shape"):
            raise UnwatchableError("it is inside a Scan that collects along an axis of a tensor of unknown rank")
        rank = len(type_.shape.dim) + 1
        perm = list(range(1, rank))
        perm.insert(axis % rank, 0)
        nodes.append(helper.make_node("Transpose", [made], [wanted], perm=perm))
    return nodes


def _constant(name: str, value: int, dims: Sequence[int] = ()) -> Any:
    tensor = TensorProto(data_type=TensorProto.INT64, dims=dims, int64_data=[value])
    return helper.make_node("Constant", [], [name], value=tensor)


def _insert(repeated: Any, place: int, items: Sequence[Any]) -> None:
    for offset, item in enumerate(items):
        repeated.insert(place + offset, item)
