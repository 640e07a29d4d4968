"""The values of the IR: names of tensors and their uses, and what is known of an op."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphquant.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


Shape = tuple[int | None, ...]
"""Static sizes, outermost first; None stands for a size known only when the model runs."""

FLOAT_TYPES = frozenset({"float16", "bfloat16", "float32", "float64"})

QUANTIZATION_KINDS = frozenset({"quantize", "dequantize", "qdq"})
"""Kinds that are quantization already: what they make or read is not quantized again."""

WEIGHTED_KINDS = frozenset({"conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"})
"""Kinds that multiply by one weight and add up; what fuses with them comes behind."""

CLAMPING_KINDS = frozenset({"max", "min"})
"""Kinds that families put before a quantization whose type leaves some of its container out."""

NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


class DataType(str):
    """A dtype as the value of an op's attribute, by its numpy-like name."""

    __slots__ = ()


class TensorRef(NamedTuple):
    """Output `port` of op `op` in graph `graph` ("" is the main one)."""

    graph: str
    op: str
    port: int = 0

    def __str__(self) -> str:
        return f"{self.graph}/{self.op}:{self.port}" if self.graph else f"{self.op}:{self.port}"


class Use(NamedTuple):
    """Input `slot` of op `op` in graph `graph`: one place where a tensor is read."""

    graph: str
    op: str
    slot: int

    def __str__(self) -> str:
        return f"{self.graph}/{self.op}[{self.slot}]" if self.graph else f"{self.op}[{self.slot}]"


def qualified_op_name(graph: str, op: str) -> str:
    """An op as people read it, with its graph where that is not the main one."""
    return f"{graph}/{op}" if graph else op


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredQuantization:
    """What a file says of a tensor itself, where scales belong to tensors and not to ops beside them (TFLite).

    Attributes:
        index: Its position in the graph's list of tensors.
        sizes: The sizes that are written for it; `Output.shape` has None where they may change.
        scale: float32 (C,), real units per step; (0,) if the tensor is not quantized.
        zero_point: int64 (C,), steps.
        axis: The axis that the scales lie along, where there are several.
        low: float32 (C,), the smallest value that training or calibration saw; mostly (0,).
        high: float32 (C,), the largest.
        details: The form of a quantization that is not one scale and zero point per tensor or channel, else "".
    """

    index: int
    sizes: tuple[int, ...]
    scale: np.ndarray[Any, Any] = field(default_factory=partial(np.empty, 0, np.float32))
    zero_point: np.ndarray[Any, Any] = field(default_factory=partial(np.empty, 0, np.int64))
    axis: int = 0
    low: np.ndarray[Any, Any] = field(default_factory=partial(np.empty, 0, np.float32))
    high: np.ndarray[Any, Any] = field(default_factory=partial(np.empty, 0, np.float32))
    details: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """What is known of one output: its name in the file, numpy-like dtype name and static shape.

    `name` is "" for an optional output that the op leaves out; `quantization` is None where scales are in ops.
    """

    name: str
    dtype: str | None = None
    shape: Shape | None = None
    quantization: StoredQuantization | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A graph that an op runs: a branch or loop body, or a function.

    Attributes:
        attr: The op's attribute that names or holds the graph.
        graph: The graph's name in the model.
        offset: Operand `i + offset` of the op becomes input `i` of the graph; None where they do not correspond.
        loop: The graph's outputs come back as its inputs, so that an input is a parameter only if it is passed through.
    """

    attr: str
    graph: str
    offset: int | None = None
    loop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """A node of a graph: an operation, a graph input ("input"), a constant, a variable or a graph output ("output").

    Attributes:
        name: Unique in its graph.
        kind: The framework-neutral kind ("conv", "matmul", ...) or "other".
        type: The framework's own op type.
        domain: The ONNX domain, "" for the default one and for TensorFlow.
        roles: What each input slot is ("input", "weight", "bias", ...); the last one stands for all that follow.
        channel_axis: The output channel axis of the "weight" slot's tensor, None if there is none.
        outputs: One entry per output port.
        attrs: The op's attributes, decoded when they are read.
        read_value: Gives the value of a constant or variable when called, None for all else or if it cannot be read.
        calls: The graphs that the op runs.
        source: The node of the source message; None for an op that graphquant made.
        rule: The rule or step that made the op, "" for one of the source.
        anchor: The tensor that a rule made it for, "" for one of the source.
    """

    name: str
    kind: str
    type: str
    domain: str = ""
    roles: tuple[str, ...] = ("input",)
    channel_axis: int | None = None
    outputs: tuple[Output, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)
    read_value: Callable[[], np.ndarray[Any, Any]] | None = None
    calls: tuple[Call, ...] = ()
    source: Any = None
    rule: str = ""
    anchor: str = ""

    def role(self, slot: int) -> str:
        """The role of input `slot`."""
        return self.roles[min(slot, len(self.roles) - 1)] if self.roles else "input"

    @property
    def main_slot(self) -> int:
        """The first slot that reads data; 0 if none does."""
        return self.roles.index("input") if "input" in self.roles else 0

    def numeric_attr(self, attr: str, default: float) -> float:
        """The attribute `attr` as a number, `default` if the op has none.

        Raises:
            ModelError: It is something else.
        """
        value = self.attrs.get(attr, default)
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
        raise ModelError(f"{self.name} has {attr} = {str(value)[:60]!r}, which is no number. Export the model again.")
