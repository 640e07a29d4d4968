"""A model as a Graphviz drawing: constants left out, quantization ops coloured, with their scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.errors import printable
from graphquant.ir import Graph, Model, Op, Parameters, TensorRef
from graphquant.numerics import Dynamic
from graphquant.qdq import params_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.numerics import Array
    from graphquant.view.drawing import Drawing

FILL = {"quantize": "#fde68a", "dequantize": "#bbf7d0", "qdq": "#bbf7d0", "input": "#dbeafe", "output": "#dbeafe"}


def dot(model: Model, part: Drawing | None = None) -> str:
    """DOT text with one cluster per live graph; of the ops in `part` alone, quantization ops between them too."""
    return "\n".join(_lines(model, None if part is None else _ops(part))) + "\n"


def _ops(part: Drawing) -> set[tuple[str, str]]:
    """The ops that a drawing shows or folds."""
    shown = {(box.graph, box.op.name) for box in part.boxes}
    badges = [(part.boxes[wire.target].graph, badge) for wire in part.wires for badge in wire.badges]
    badges += [(box.graph, badge) for box in part.boxes for one in box.constants for badge in one.badges]
    return shown | {(graph, name) for graph, badge in badges for _, name in part.folded[badge]}


def _lines(model: Model, kept: set[tuple[str, str]] | None) -> Iterator[str]:
    parameters = Parameters(model)
    yield "digraph graphquant {"
    yield '  rankdir=TB; node [shape=box, style="rounded,filled", fillcolor=white, fontname=Helvetica, fontsize=10];'
    yield "  edge [fontname=Helvetica, fontsize=8];"
    for number, name in enumerate(model.live()):
        graph = model.graphs[name]
        if name:
            yield f"  subgraph cluster_{number} {{ label={_quoted(name)};"
        for op in graph.ops():
            if op.kind != "constant" and (kept is None or (name, op.name) in kept):
                label, fill = _label(graph, op, parameters), _quoted(_fill(op))
                yield f"  {_node(name, op.name)} [label={label}, fillcolor={fill}];"
        if name:
            yield "  }"
    for name in model.live():
        yield from _edges(model.graphs[name], kept)
    yield "}"


def _edges(graph: Graph, kept: set[tuple[str, str]] | None) -> Iterator[str]:
    for op in graph.ops():
        for slot, tensor in enumerate(graph.slots(op.name)):
            if tensor is None or graph.graphs[tensor.graph].op(tensor.op).kind == "constant":
                continue
            if kept is not None and not {(graph.name, op.name), tensor[:2]} <= kept:
                continue
            role = op.role(slot)
            label = "" if role == "input" else f" [label={_quoted(role)}]"
            yield f"  {_node(tensor.graph, tensor.op)} -> {_node(graph.name, op.name)}{label};"


def _label(graph: Graph, op: Op, parameters: Parameters) -> str:
    text = f"{op.name}\n{op.type}" if op.kind not in {"input", "output"} else op.name.removeprefix("@")
    params = params_of(graph, op, parameters)
    if isinstance(params, Dynamic):
        text += f"\n{params.type.name} dynamic"
    elif params is not None:
        text += f"\n{params.type.name} scale {_span(params.scale)} zp {params.zero_point.flat[0]}"
    for output in op.outputs:
        if output.stored is not None and output.stored.scale.size and output.stored.zero_point.size:
            text += f"\n{output.dtype} scale {_span(output.stored.scale)} zp {output.stored.zero_point[0]}"
    return _quoted(text)


def _span(scale: Array) -> str:
    return f"{scale.min():.4g}" + (f"..{scale.max():.4g}" if scale.size > 1 else "")


def _fill(op: Op) -> str:
    return FILL.get(op.kind, "#ede9fe" if op.rule else "#ffffff")


def _node(graph: str, op: str) -> str:
    return _quoted(str(TensorRef(graph, op)).rpartition(":")[0])


def _quoted(text: str) -> str:
    lines = [printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'
