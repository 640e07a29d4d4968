"""What integer hardware can compute, as limits on scales.

A `Fit` is an int32 bias: its values, counted in input scale times weight scale, must fit. A `Shift` is of hardware that
computes with powers of two: positions, which are -log2 of scales, of some tensors less those of others must not exceed
a number. `worklist` says how they are met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.ir import WEIGHTED_KINDS, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.ir import Shape
    from graphquant.solve.draft import Draft

CUT = (0, 16)
"""Limits of weight plus input minus output on AMD's DPU, in positions."""

BIAS_CUT = 15
"""Largest weight plus input minus bias."""

ADD_READ, ADD_WRITE = (0, 7), (-7, 25)
"""Limits of the largest minus the smallest input of a sum, and of the smallest input minus the output."""

MUL_WRITE = (0, 32)
"""Limits of the sum of the inputs of a product minus its output."""

MOST_ADDENDS = 8
"""Inputs of a sum that are held together; models have two, and pairs grow with the square."""

LARGEST = (1 << 31) - 1
"""What int32 holds."""

FUSED = frozenset({"bias_add", "relu", "relu6", "leaky_relu", "prelu"})
"""Kinds that are one with the op before them."""

LONGEST = 4
"""Ops that are looked through for where an op's output is quantized."""

INTEGER_BIASES = frozenset({"onnx-qdq", "fake-quant"})
"""Families whose readers make a float bias int32 themselves, onnxruntime's optimizer and TFLite's converter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The bias of an op must fit int32.

    Attributes:
        bias: The bias.
        data: Where the op reads its input.
        weight: Where it reads its weight.
        rule: The rule that quantizes the bias, "" if none does and the backend will.
        most: The largest integer there is for it.
    """

    bias: TensorRef
    data: Use
    weight: Use
    rule: str
    most: int

    @property
    def uses(self) -> tuple[Use, ...]:
        """Where the scales are read that it is on."""
        return self.data, self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Positions at `more`, less those at `less`, are together at most `most`.

    Attributes:
        name: What the hardware shifts by, for people.
        op: The op.
        more: Where tensors are read whose scales may be raised, the first choice first.
        less: Where those are read that count negatively.
        most: The largest sum.
    """

    name: str
    op: str
    more: tuple[Use, ...]
    less: tuple[Use, ...]
    most: int

    @property
    def uses(self) -> tuple[Use, ...]:
        """Where the scales are read that it is on."""
        return *self.more, *self.less


def limits_of(draft: Draft) -> list[Fit | Shift]:
    """The limits on the scales of a draft, in the order of its sites."""
    found: list[Fit | Shift] = []
    seen: set[tuple[str, str]] = set()
    outputs: dict[TensorRef, Use] = {}
    for index, site in enumerate(draft.sites):
        if index in draft.params:
            outputs.setdefault(site.tensor, site.uses[0])
    for index, site in enumerate(draft.sites):
        for use in site.uses if index in draft.params else ():
            if (use.graph, use.op) not in seen:
                seen.add((use.graph, use.op))
                found += _limits(draft, use.graph, use.op, outputs)
    return found


def _limits(draft: Draft, graph: str, name: str, outputs: dict[TensorRef, Use]) -> Iterator[Fit | Shift]:
    """The limits of one op."""
    op = draft.model.graphs[graph].op(name)
    roles: dict[str, list[Use]] = {}
    for slot in range(len(draft.model.graphs[graph].slots(name))):
        roles.setdefault(op.role(slot), []).append(Use(graph, name, slot))
    read = [use for role in ("input", "weight") for use in roles.get(role, ()) if draft.of(use) is not None]
    if op.kind in WEIGHTED_KINDS and len(read) == 2:  # noqa: PLR2004  # an input and a weight
        bias = _bias_use(draft, graph, name, roles)
        if bias is not None and not _shifts(draft, read[1]):
            yield from _fits(draft, bias, read[0], read[1])
    if op.kind in WEIGHTED_KINDS | {"add", "mul"} and read and all(_shifts(draft, use) for use in read):
        output = _output(draft, TensorRef(graph, name), outputs)
        if output is not None and _shifts(draft, output):
            yield from _shifts_of(draft, op.kind, name, read, roles, output)


def _shifts(draft: Draft, use: Use) -> bool:
    """Whether the scheme at a use is for hardware that shifts."""
    return draft.of(use) is not None and draft.sites[draft.feeding[use]].scheme.shifts is not None


def _fits(draft: Draft, bias: Use, data: Use, weight: Use) -> Iterator[Fit]:
    tensor = draft.model.graphs[bias.graph].producer(bias)
    site = draft.sites[draft.feeding[bias]] if bias in draft.feeding else None
    family = draft.sites[draft.feeding[weight]].scheme.family
    own = site is not None and site.scheme.observe.name == "bias"
    if tensor is None or not draft.parameters.is_parameter(tensor):
        return
    if own and site is not None:
        yield Fit(bias=tensor, data=data, weight=weight, rule=site.rule, most=int(site.scheme.type.limits()[1]))
    elif site is None and family in INTEGER_BIASES and _is_vector(draft.model.output(tensor).shape):
        yield Fit(bias=tensor, data=data, weight=weight, rule="", most=LARGEST)


def _is_vector(shape: Shape | None) -> bool:
    """Whether all elements lie along one axis, as those of a bias do."""
    return shape is not None and sum(size != 1 for size in shape) <= 1


def _bias_use(draft: Draft, graph: str, name: str, roles: dict[str, list[Use]]) -> Use | None:
    """Where an op's bias is read: by itself, or by the only op behind it, which adds it."""
    home = draft.model.graphs[graph]
    if "bias" in roles and home.producer(roles["bias"][0]) is not None:
        return roles["bias"][0]
    readers = home.consumers(TensorRef(graph, name))
    if len(readers) != 1 or readers[0].graph != graph:
        return None
    behind = home.op(readers[0].op)
    others = [slot for slot in range(len(home.slots(behind.name))) if slot != readers[0].slot]
    return Use(graph, behind.name, others[0]) if behind.kind in {"bias_add", "add"} and len(others) == 1 else None


def _output(draft: Draft, tensor: TensorRef, outputs: dict[TensorRef, Use]) -> Use | None:
    """Where an op's output is read quantized, behind what is one with it."""
    home = draft.model.graphs[tensor.graph]
    for _ in range(LONGEST):
        if tensor in outputs:
            return outputs[tensor]
        readers = home.consumers(tensor)
        if len(readers) != 1 or readers[0].graph != tensor.graph or home.op(readers[0].op).kind not in FUSED:
            return None
        tensor = TensorRef(tensor.graph, readers[0].op)
    return None


def _shifts_of(
    draft: Draft, kind: str, op: str, read: list[Use], roles: dict[str, list[Use]], output: Use
) -> Iterator[Shift]:
    """The limits of AMD's DPU; see CUT and the others."""

    def at_most(name: str, more: tuple[Use, ...], less: tuple[Use, ...], most: int) -> Shift:
        return Shift(name=name, op=op, more=more, less=less, most=most)

    if kind == "add":
        for one in read[:MOST_ADDENDS]:
            for other in read[:MOST_ADDENDS]:
                if one is not other:
                    yield at_most("shift between inputs", (one,), (other,), ADD_READ[1])
            yield at_most("shift of an input to the output", (output,), (one,), -ADD_WRITE[0])
            yield at_most("shift of an input to the output", (one,), (output,), ADD_WRITE[1])
    elif kind == "mul":
        yield at_most("shift of the product", (output,), tuple(read), -MUL_WRITE[0])
        yield at_most("shift of the product", tuple(read), (output,), MUL_WRITE[1])
    elif len(read) == 2:  # noqa: PLR2004  # an input and a weight
        data, weight = read
        bias = _bias_use(draft, data.graph, op, roles)
        yield at_most("shift of weight plus input minus output", (output,), (weight, data), -CUT[0])
        yield at_most("shift of weight plus input minus output", (weight, data), (output,), CUT[1])
        if bias is not None and _shifts(draft, bias):
            yield at_most("shift of weight plus input minus bias", (weight, data), (bias,), BIAS_CUT)
