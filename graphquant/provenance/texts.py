"""The keys under which a model says where it came from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphquant.ir import Model

PREFIX = "graphquant."
"""What all keys of a model's metadata start with."""

RECORD = "record"
"""The key of the record."""

OPS = "ops"
"""The key under which an old ONNX model, whose nodes have no metadata, has each op's rule and anchor."""


def said_of_ops(model: Model) -> str:
    """Rule and anchor of each op that graphquant made, as JSON: by graph and op; "" if there is none."""
    said: dict[str, dict[str, list[str]]] = {}
    for name, graph in model.graphs.items():
        made = {op.name: [op.rule, op.anchor] for op in graph.ops() if op.rule and op.kind != "constant"}
        if made:
            said[name] = dict(sorted(made.items()))
    return json.dumps(dict(sorted(said.items())), separators=(",", ":")) if said else ""


__all__ = ["OPS", "PREFIX", "RECORD", "said_of_ops"]
