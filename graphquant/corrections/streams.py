"""Streams: tensors whose channels can be multiplied by any positive numbers, since what makes them and reads them can.

Where a convolution makes channels, a Relu and a pool hand them on and another convolution sums over them, a channel may
be divided by a number and the weights that multiply it be multiplied by it: what comes out is the same. Sums of such
tensors belong together, as the branches of a residual net do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from graphquant.corrections.layouts import Layout, carried, channel_layout, held_along
from graphquant.corrections.places import own_constant
from graphquant.ir import Graph, Model, Op, Parameters, TensorRef, Use, named

if TYPE_CHECKING:
    from graphquant.numerics import Array

HOMOGENEOUS: Final = frozenset({"relu", "leaky_relu", "identity", "dropout", "max_pool", "avg_pool", "global_avg_pool"})
"""Kinds that give twice as much of twice as much, each channel by itself, where they leave the axes as they are."""

NORMS: Final = frozenset({"batchnorm", "layernorm", "instancenorm"})
"""Kinds that multiply each channel by a scale and add an offset at the end."""

MULTIPLYING: Final = frozenset({"conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"})


class Held(NamedTuple):
    """A constant that changes with a stream.

    Attributes:
        use: Where it is read.
        home: The constant, which nothing else reads.
        places: int64, broadcast to its shape: the channel that each of its elements belongs to.
        reads: Whether it multiplies the stream, and grows as the stream shrinks; else it makes it, and shrinks too.
        weight: Whether it is what a convolution or product multiplies by.
        scale: Whether it multiplies channels one by one; what is neither is added to them.
    """

    use: Use
    home: TensorRef
    places: Array
    reads: bool
    weight: bool = False
    scale: bool = False


@dataclass(slots=True, kw_only=True)
class Stream:
    """Tensors with common channels.

    Attributes:
        start: The tensor that it was found by, which something multiplies by a weight.
        channels: How many channels it has.
        tensors: All of them, with where their channels lie.
        held: The constants beside them.
        multiplied: The tensors that are multiplied by weights, with the uses of these.
        blocked: Why its channels cannot be scaled, "" if they can.
    """

    start: TensorRef
    channels: int
    tensors: dict[TensorRef, Layout] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    multiplied: dict[TensorRef, list[Use]] = field(default_factory=dict)
    blocked: str = ""

    @property
    def name(self) -> str:
        """What it starts with, as people read it."""
        return named(self.start.graph, self.start.op)


def streams(model: Model) -> list[Stream]:
    """The streams of the graphs that run: each tensor that a known weight multiplies is in one of them."""
    search, found = _Search(model), []
    for start_of in (search.made, search.multiplied):  # what makes channels knows how many there are
        for name in model.live():
            for op in model.graphs[name].ops():
                start = start_of(model.graphs[name], op)
                if start is not None and start[0] not in search.seen:
                    found.append(search.flood(*start))
    for stream in found:
        stream.start = next(iter(stream.multiplied), stream.start)
    return [stream for stream in found if stream.multiplied or stream.start in search.read]


class _Search:
    """Goes from tensor to tensor as far as common channels reach."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.seen: set[TensorRef] = set()
        self.read: set[TensorRef] = set()
        self._parameters = Parameters(model)

    def made(self, graph: Graph, op: Op) -> tuple[TensorRef, Layout, int] | None:
        """What an op makes by its weight, where the channels lie, and how many there are; None if not known."""
        if op.kind not in MULTIPLYING or "weight" not in op.roles or op.type.startswith("_Fused"):
            return None
        read = graph.producer(Use(graph.name, op.name, op.roles.index("weight")))
        shape = None if read is None else self._shape(read)
        known = None if shape is None else held_along(op, shape, reads=False)
        return None if known is None else (TensorRef(graph.name, op.name), known[1], int(known[0].max(initial=-1)) + 1)

    def multiplied(self, graph: Graph, op: Op) -> tuple[TensorRef, Layout, int] | None:
        """What an op multiplies by its weight, where the channels lie, and how many there are; None if not known."""
        if op.kind not in MULTIPLYING or "weight" not in op.roles or "input" not in op.roles:
            return None
        slots = graph.slots(op.name)
        data, weight = op.roles.index("input"), op.roles.index("weight")
        if max(data, weight) >= len(slots) or op.type.startswith("_Fused"):
            return None
        tensor, read = slots[data], slots[weight]
        if tensor is None or read is None or self._parameters.is_parameter(tensor):
            return None
        shape = self._shape(read)
        if shape is None or tensor.graph != graph.name:
            return None
        known = held_along(op, shape, reads=True)
        if known is not None:
            self.read.add(tensor)
        return None if known is None else (tensor, known[1], int(known[0].max(initial=-1)) + 1)

    def flood(self, start: TensorRef, layout: Layout, channels: int) -> Stream:
        """The stream of a tensor."""
        stream = Stream(start=start, channels=channels)
        todo = [(start, layout)]
        while todo:
            tensor, here = todo.pop()
            if tensor in stream.tensors:
                if stream.tensors[tensor] != here:
                    stream.blocked = stream.blocked or "its channels lie in two ways"
                continue
            stream.tensors[tensor] = here
            self.seen.add(tensor)
            reason = self._misfit(tensor, here, channels)
            if not reason:
                for part in (self._made(stream, tensor, here), self._read(stream, tensor, here)):
                    if isinstance(part, str):
                        reason = reason or part
                    else:
                        todo.extend(part)
            stream.blocked = stream.blocked or reason
        return stream

    def _misfit(self, tensor: TensorRef, layout: Layout, channels: int) -> str:
        known = self.model.output(tensor)
        if known.dtype not in {None, "float32"}:
            return f"it is {known.dtype}"
        size = layout.size(known.shape)
        if size is not None and size % (channels * layout.block):
            return "a tensor of it has another number of channels"
        return ""

    def _made(self, stream: Stream, tensor: TensorRef, layout: Layout) -> list[tuple[TensorRef, Layout]] | str:
        """What else is in the stream by the op that makes `tensor`."""
        graph, op = self.model.graphs[tensor.graph], self.model.op(tensor)
        if tensor.port:
            return "an op with several outputs makes it"
        if op.kind in MULTIPLYING:
            return self._product(stream, graph, op, layout)
        if op.kind in NORMS and "scale" in op.roles:
            return self._given(stream, graph, op, ("scale", "offset"), layout)
        return self._through(stream, graph, op, layout)

    def _product(self, stream: Stream, graph: Graph, op: Op, layout: Layout) -> list[tuple[TensorRef, Layout]] | str:
        """The weight and bias that make a stream."""
        if op.type.startswith("_Fused"):
            return "an op that is fused with others makes it"
        use = Use(graph.name, op.name, op.roles.index("weight")) if "weight" in op.roles else None
        read = None if use is None else graph.producer(use)
        shape = None if read is None else self._shape(read)
        known = None if shape is None else held_along(op, shape, reads=False)
        if use is None or known is None or known[1] != layout or known[0].max(initial=-1) + 1 != stream.channels:
            return f"how a {op.type} of this form makes its channels is not known"
        reason = self._hold(stream, use, known[0], reads=False, weight=True)
        return reason or self._given(stream, graph, op, ("bias",), layout)

    def _given(
        self, stream: Stream, graph: Graph, op: Op, roles: tuple[str, ...], layout: Layout
    ) -> list[tuple[TensorRef, Layout]] | str:
        """The constants with one value per channel that an op reads as `roles`."""
        for role in roles:
            slot = op.roles.index(role) if role in op.roles else -1
            if slot < 0 or graph.producer(Use(graph.name, op.name, slot)) is None:
                continue
            reason = self._vector(stream, Use(graph.name, op.name, slot), layout, op)
            if reason:
                return reason
        return []

    def _vector(self, stream: Stream, use: Use, layout: Layout, op: Op, *, reads: bool = False) -> str:
        """Takes a constant with one value per channel into the stream; why not, "" if it was done."""
        read = self.model.graphs[use.graph].producer(use)
        shape = None if read is None else self._shape(read)
        if shape is None:
            return "what is added or multiplied is not known before the model runs"
        bare = op.kind in NORMS | MULTIPLYING | {"bias_add"}
        rank = self.model.output(TensorRef(use.graph, op.name)).shape
        if bare and op.kind not in MULTIPLYING and channel_layout(op, None if rank is None else len(rank)) != layout:
            return f"a {op.type} has its channels along another axis"
        fits = math.prod(shape) == stream.channels and layout.block == 1
        index = np.arange(stream.channels).reshape(shape) if fits else None
        index = index if bare else layout.vector(shape, stream.channels)
        if index is None:
            return f"what a {op.type} adds or multiplies by is not one number per channel"
        scale = op.kind == "mul" or op.role(use.slot) == "scale"
        return self._hold(stream, use, index, reads=reads, scale=scale)

    def _hold(
        self, stream: Stream, use: Use, index: Array, *, reads: bool, weight: bool = False, scale: bool = False
    ) -> str:
        """Takes a constant into the stream; why not, "" if it was done."""
        read = self.model.graphs[use.graph].producer(use)
        value = None if read is None else self._shape(read)
        home = None if value is None else own_constant(self.model, use, value)
        if read is None or home is None or self.model.output(home).dtype not in {None, "float32"}:
            return "a weight or bias beside it is a variable, or others read it too"
        stream.held.append(Held(use, home, index, reads, weight, scale))
        return ""

    def _read(self, stream: Stream, tensor: TensorRef, layout: Layout) -> list[tuple[TensorRef, Layout]] | str:
        """What else is in the stream by what reads `tensor`; all of it, also where something blocks."""
        more: list[tuple[TensorRef, Layout]] = []
        blocked = ""
        for use in self.model.graphs[tensor.graph].consumers(tensor):
            graph = self.model.graphs[use.graph]
            op = graph.op(use.op)
            part: list[tuple[TensorRef, Layout]] | str
            if op.kind == "shape":
                part = []
            elif use.graph != tensor.graph or op.kind == "output":
                part = "it is an output, or read in another graph"
            elif op.kind in MULTIPLYING:
                part = self._multiply(stream, graph, op, use, layout)
            else:
                part = self._through(stream, graph, op, layout, out=True)
            if isinstance(part, str):
                blocked = blocked or part
            else:
                more += part
        return blocked or more

    def _multiply(
        self, stream: Stream, graph: Graph, op: Op, use: Use, layout: Layout
    ) -> list[tuple[TensorRef, Layout]] | str:
        start = self.multiplied(graph, op) if op.role(use.slot) == "input" else None
        if start is None or start[1].axis != layout.axis:
            return "it is multiplied by what is not known before the model runs"
        weight = Use(graph.name, op.name, op.roles.index("weight"))
        read = graph.producer(weight)
        shape = None if read is None else self._shape(read)
        known = None if shape is None else held_along(op, shape, reads=True)
        if known is None or start[2] % stream.channels:
            return f"a {op.type} of this form reads it"
        index = known[0] // layout.block % stream.channels
        reason = self._hold(stream, weight, index, reads=True, weight=True)
        if not reason:
            stream.multiplied.setdefault(start[0], []).append(weight)
        return reason or []

    def _through(
        self, stream: Stream, graph: Graph, op: Op, layout: Layout, *, out: bool = False
    ) -> list[tuple[TensorRef, Layout]] | str:
        """What an op that hands channels on ties together: its other tensors, as seen from its output or an input."""
        output = TensorRef(graph.name, op.name)
        slots = [slot for slot in graph.slots(op.name) if slot is not None]
        if op.kind in {"add", "bias_add", "sub", "mul", "div"}:
            return self._joined(stream, graph, op, layout, out=out)
        if not slots or slots[0].graph != graph.name:
            return "an input or constant makes it"
        if not out and slots[0] in stream.tensors:
            return []
        if op.kind in HOMOGENEOUS:
            return [(output, layout), (slots[0], layout)]
        values = [self._parameters.value(slot) if self._parameters.is_parameter(slot) else None for slot in slots[1:]]
        shapes = (self.model.output(slots[0]).shape, self.model.output(output).shape)
        other = carried(op, layout, shapes, values, stream.channels, out=out)
        if other is None:
            return f"it goes through a {op.type}, which hands no factors on"
        return [(output, other), (slots[0], layout)] if out else [(output, layout), (slots[0], other)]

    def _joined(
        self, stream: Stream, graph: Graph, op: Op, layout: Layout, *, out: bool
    ) -> list[tuple[TensorRef, Layout]] | str:
        """What a sum ties together; a product with one value per channel ends one stream and makes another."""
        output = TensorRef(graph.name, op.name)
        more, known = [(output, layout)], []
        for slot, tensor in enumerate(graph.slots(op.name)):
            if tensor is not None and self._parameters.is_parameter(tensor):
                known.append((Use(graph.name, op.name, slot), self._shape(tensor)))
            elif tensor is not None and tensor.graph == graph.name:
                more.append((tensor, layout))
            else:
                return "an op reads another graph"
        if op.kind in {"add", "sub", "bias_add"}:
            if any(held.use == use for held in stream.held for use, _ in known):
                return []
            return next(filter(None, (self._vector(stream, use, layout, op) for use, _ in known)), "") or more
        use, shape = known[0] if len(known) == 1 else (Use("", "", 0), None)
        if shape is not None and math.prod(shape) == 1 and (op.kind == "mul" or use.slot):
            return more
        if shape is None or op.kind == "div":
            return "it is multiplied or divided by another tensor"
        return self._vector(stream, use, layout, op, reads=out) or []

    def _shape(self, tensor: TensorRef) -> tuple[int, ...] | None:
        """The shape of a parameter, None if it is none or has no known size."""
        if not self._parameters.is_parameter(tensor):
            return None
        for one in (tensor, self._parameters.origin(tensor)):
            shape = self.model.output(one).shape
            if shape is not None and None not in shape:
                return tuple(int(size or 0) for size in shape)
        value = self._parameters.value(tensor)
        return None if value is None else value.shape


__all__ = ["Held", "Stream", "streams"]
