"""Drawings for other tools: JSON, GraphML and Graphviz DOT.

DOT omits constants, and shows quantization ops as colored nodes with their scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphquant.errors import escape_unprintable
from graphquant.ir import Graph, Model, Op, Parameters, TensorRef
from graphquant.numerics import DynamicQParams
from graphquant.qdq import read_qparams
from graphquant.visualize.annotations import annotation_text
from graphquant.visualize.json_export import JSON_SCHEMA_VERSION, tensor_json
from graphquant.visualize.viewer_data import attributes_text, drawing_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.numerics import Array
    from graphquant.visualize.annotations import Annotation
    from graphquant.visualize.drawing import Drawing, DrawnConstant


def graph_json(drawing: Drawing) -> dict[str, Any]:
    """Return nodes and edges by number, with quantization and layout positions."""
    layout = drawing_layout(drawing)
    return {
        "schema": JSON_SCHEMA_VERSION,
        "title": drawing.title,
        "format": drawing.format,
        "planned": drawing.planned,
        "nodes": [
            {
                "id": number,
                "graph": box.graph,
                "name": box.op.name,
                "type": box.op.type,
                "kind": box.op.kind,
                "group": box.group if box.group >= 0 else None,
                "layer": layout.layer[number],
                "x": layout.x[number],
                "inputs": box.inputs or None,
                "reason": box.reason,
                "rule": box.op.rule,
                "attributes": attributes_text(box.op).split("\n") if box.op.attrs else [],
                "outputs": [
                    {
                        "name": output.name,
                        "dtype": output.dtype,
                        "shape": None if output.shape is None else list(output.shape),
                    }
                    for output in box.op.outputs
                ],
                "constants": [_constant_json(constant) for constant in box.constants],
                "quantization": list(box.annotations),
            }
            for number, box in enumerate(drawing.boxes)
        ],
        "edges": [
            {
                "source": wire.source,
                "port": wire.port,
                "target": wire.target,
                "slot": wire.slot if wire.slot >= 0 else None,
                "quantization": list(wire.annotations),
                "reason": wire.reason,
            }
            for wire in drawing.wires
        ],
        "groups": [
            {"label": group.label, "parent": group.parent if group.parent >= 0 else None, "graph": group.graph or None}
            for group in drawing.groups
        ],
        "quantization": [
            _annotation_json(annotation, ops)
            for annotation, ops in zip(drawing.annotations, drawing.folded_ops, strict=True)
        ],
    }


def _constant_json(constant: DrawnConstant) -> dict[str, Any]:
    return {
        "slot": constant.slot,
        "role": constant.role,
        "name": constant.name,
        "dtype": constant.dtype or None,
        "shape": constant.shape or None,
        "quantization": list(constant.annotations),
        "reason": constant.reason,
    }


def _annotation_json(annotation: Annotation, ops: Sequence[tuple[str, str]]) -> dict[str, Any]:
    params = annotation.params
    return {
        "tensor": tensor_json(annotation.tensor),
        "ops": [{"type": type_, "name": name} for type_, name in ops],
        "dtype": annotation.dtype or None,
        "dynamic": annotation.dynamic,
        "scale": None if params is None else params.scale.astype(float).tolist(),
        "zero_point": None if params is None else params.zero_point.tolist(),
        "axis": None if params is None else params.axis,
        "rule": annotation.rule,
        "why": annotation.why,
        "scheme": annotation.scheme,
        "note": annotation.note,
    }


def graph_graphml(drawing: Drawing) -> str:
    """Return GraphML for yEd, Gephi and networkx. Characters that XML cannot hold are escaped as in Python."""
    import networkx as nx

    graph: nx.MultiDiGraph[int] = nx.MultiDiGraph()
    for number, box in enumerate(drawing.boxes):
        identity = {"graph": box.graph, "name": box.op.name, "type": box.op.type, "kind": box.op.kind}
        annotation_texts = [
            f"{constant.role} {annotation_text(drawing.annotations[number])}"
            for constant in box.constants
            for number in constant.annotations
        ]
        annotation_texts += [annotation_text(drawing.annotations[mark]) for mark in box.annotations]
        attributes = {
            **identity,
            "inputs": box.inputs,
            "reason": box.reason,
            "quantization": "; ".join(annotation_texts),
        }
        graph.add_node(number, **{key: escape_unprintable(value) for key, value in attributes.items()})
    for wire in drawing.wires:
        wire_annotations = "; ".join(annotation_text(drawing.annotations[mark]) for mark in wire.annotations)
        graph.add_edge(
            wire.source,
            wire.target,
            port=wire.port,
            slot=wire.slot,
            quantization=wire_annotations,
            reason=escape_unprintable(wire.reason),
        )
    return "\n".join(nx.generate_graphml(graph)) + "\n"


FILL_COLOURS = {
    "quantize": "#fde68a",
    "dequantize": "#bbf7d0",
    "qdq": "#bbf7d0",
    "input": "#dbeafe",
    "output": "#dbeafe",
}


def graphviz_dot(model: Model, subdrawing: Drawing | None = None) -> str:
    """Return DOT text with one cluster per reachable graph.

    Args:
        model: The model.
        subdrawing: Limits the ops to those in it, including folded quantization ops.
    """
    return "\n".join(_dot_lines(model, None if subdrawing is None else _shown_ops(subdrawing))) + "\n"


def _shown_ops(subdrawing: Drawing) -> set[tuple[str, str]]:
    """Return the ops that a drawing shows or folds."""
    boxed = {(box.graph, box.op.name) for box in subdrawing.boxes}
    annotated = [
        (subdrawing.boxes[wire.target].graph, annotation)
        for wire in subdrawing.wires
        for annotation in wire.annotations
    ]
    annotated += [
        (box.graph, annotation)
        for box in subdrawing.boxes
        for constant in box.constants
        for annotation in constant.annotations
    ]
    return boxed | {(graph, name) for graph, annotation in annotated for _, name in subdrawing.folded_ops[annotation]}


def _dot_lines(model: Model, selection: set[tuple[str, str]] | None) -> Iterator[str]:
    parameters = Parameters(model)
    yield "digraph graphquant {"
    yield '  rankdir=TB; node [shape=box, style="rounded,filled", fillcolor=white, fontname=Helvetica, fontsize=10];'
    yield "  edge [fontname=Helvetica, fontsize=8];"
    for number, name in enumerate(model.reachable_graphs()):
        graph = model.graphs[name]
        if name:
            yield f"  subgraph cluster_{number} {{ label={_dot_quoted(name)};"
        for op in graph.ops():
            if op.kind != "constant" and (selection is None or (name, op.name) in selection):
                label, fill = _dot_label(graph, op, parameters), _dot_quoted(_fill_colour(op))
                yield f"  {_dot_node(name, op.name)} [label={label}, fillcolor={fill}];"
        if name:
            yield "  }"
    for name in model.reachable_graphs():
        yield from _dot_edges(model.graphs[name], selection)
    yield "}"


def _dot_edges(graph: Graph, selection: set[tuple[str, str]] | None) -> Iterator[str]:
    for op in graph.ops():
        for slot, tensor in enumerate(graph.slots(op.name)):
            if tensor is None or graph.graphs[tensor.graph].op(tensor.op).kind == "constant":
                continue
            if selection is not None and not {(graph.name, op.name), tensor[:2]} <= selection:
                continue
            role = op.role(slot)
            label = "" if role == "input" else f" [label={_dot_quoted(role)}]"
            yield f"  {_dot_node(tensor.graph, tensor.op)} -> {_dot_node(graph.name, op.name)}{label};"


def _dot_label(graph: Graph, op: Op, parameters: Parameters) -> str:
    text = f"{op.name}\n{op.type}" if op.kind not in {"input", "output"} else op.name.removeprefix("@")
    params = read_qparams(graph, op, parameters)
    if isinstance(params, DynamicQParams):
        text += f"\n{params.type.name} dynamic"
    elif params is not None:
        text += f"\n{params.type.name} scale {_scale_range_text(params.scale)} zp {params.zero_point.flat[0]}"
    for output in op.outputs:
        if output.quantization is not None and output.quantization.scale.size and output.quantization.zero_point.size:
            text += (
                f"\n{output.dtype} scale {_scale_range_text(output.quantization.scale)} zp"
                f" {output.quantization.zero_point[0]}"
            )
    return _dot_quoted(text)


def _scale_range_text(scale: Array) -> str:
    return f"{scale.min():.4g}" + (f"..{scale.max():.4g}" if scale.size > 1 else "")


def _fill_colour(op: Op) -> str:
    return FILL_COLOURS.get(op.kind, "#ede9fe" if op.rule else "#ffffff")


def _dot_node(graph: str, op: str) -> str:
    return _dot_quoted(str(TensorRef(graph, op)).rpartition(":")[0])


def _dot_quoted(text: str) -> str:
    lines = [escape_unprintable(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n")]
    return '"' + "\\n".join(lines) + '"'
