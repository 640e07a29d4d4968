"""A drawing for other tools: as JSON data and as GraphML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphquant.errors import printable
from graphquant.view.badge_text import badge_text
from graphquant.view.data import SCHEMA, tensor_json
from graphquant.view.payload import attrs_text, placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.view.badges import Badge
    from graphquant.view.drawing import Constant, Drawing


def graph_json(drawing: Drawing) -> dict[str, Any]:
    """Nodes and edges by number, with their quantization, and where they are drawn."""
    layout = placed(drawing)
    return {
        "schema": SCHEMA,
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
                "attributes": attrs_text(box.op).split("\n") if box.op.attrs else [],
                "outputs": [
                    {"name": one.name, "dtype": one.dtype, "shape": None if one.shape is None else list(one.shape)}
                    for one in box.op.outputs
                ],
                "constants": [_constant(one) for one in box.constants],
                "quantization": list(box.badges),
            }
            for number, box in enumerate(drawing.boxes)
        ],
        "edges": [
            {
                "source": wire.source,
                "port": wire.port,
                "target": wire.target,
                "slot": wire.slot if wire.slot >= 0 else None,
                "quantization": list(wire.badges),
                "reason": wire.reason,
            }
            for wire in drawing.wires
        ],
        "groups": [
            {"label": one.label, "parent": one.parent if one.parent >= 0 else None, "graph": one.graph or None}
            for one in drawing.groups
        ],
        "quantization": [_badge(badge, ops) for badge, ops in zip(drawing.badges, drawing.folded, strict=True)],
    }


def _constant(one: Constant) -> dict[str, Any]:
    return {
        "slot": one.slot,
        "role": one.role,
        "name": one.name,
        "dtype": one.dtype or None,
        "shape": one.shape or None,
        "quantization": list(one.badges),
        "reason": one.reason,
    }


def _badge(badge: Badge, ops: Sequence[tuple[str, str]]) -> dict[str, Any]:
    numbers = badge.numbers
    return {
        "tensor": tensor_json(badge.tensor),
        "ops": [{"type": type_, "name": name} for type_, name in ops],
        "dtype": badge.dtype or None,
        "dynamic": badge.dynamic,
        "scale": None if numbers is None else numbers.scale.astype(float).tolist(),
        "zero_point": None if numbers is None else numbers.zero_point.tolist(),
        "axis": None if numbers is None else numbers.axis,
        "rule": badge.rule,
        "why": badge.why,
        "scheme": badge.scheme,
        "note": badge.note,
    }


def graphml(drawing: Drawing) -> str:
    """GraphML, which yEd, Gephi and networkx read; what XML cannot hold is spelled as Python does."""
    import networkx as nx

    graph: nx.MultiDiGraph[int] = nx.MultiDiGraph()
    for number, box in enumerate(drawing.boxes):
        named = {"graph": box.graph, "name": box.op.name, "type": box.op.type, "kind": box.op.kind}
        stored = [f"{one.role} {badge_text(drawing.badges[mark])}" for one in box.constants for mark in one.badges]
        stored += [badge_text(drawing.badges[mark]) for mark in box.badges]
        told = {**named, "inputs": box.inputs, "reason": box.reason, "quantization": "; ".join(stored)}
        graph.add_node(number, **{key: printable(value) for key, value in told.items()})
    for wire in drawing.wires:
        marked = "; ".join(badge_text(drawing.badges[mark]) for mark in wire.badges)
        graph.add_edge(
            wire.source, wire.target, port=wire.port, slot=wire.slot, quantization=marked, reason=printable(wire.reason)
        )
    return "\n".join(nx.generate_graphml(graph)) + "\n"
