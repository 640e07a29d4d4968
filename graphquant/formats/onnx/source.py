"""What a loaded ONNX model remembers of its message, so that emit can tell what changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.ir import Op, TensorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSource:
    """One graph as it was read.

    Attributes:
        proto: The GraphProto, or the FunctionProto of a function.
        nodes: Names of the ops in the order of `proto.node`.
        loaded: The ops as they were read, by name.
        values: What each value name of this graph stands for.
        symbols: Of each value with sizes that are no numbers, their names by axis, "" where there is none.
    """

    proto: Any
    nodes: list[str]
    loaded: dict[str, Op]
    values: dict[str, TensorRef]
    symbols: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A ModelProto, which is never changed.

    Attributes:
        message: The ModelProto.
        graphs: What each graph was, by its name in the model.
        folder: Where its external data is; None for a model built in memory.
    """

    message: Any
    graphs: dict[str, GraphSource]
    folder: Path | None
