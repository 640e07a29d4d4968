"""An op with the quantizations around it, and the conditions on them that ops of many types share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.backends.onnxruntime.clips import clip_limits, redundant
from graphquant.backends.onnxruntime.work import FIRST_OPSET, is_dq, is_q
from graphquant.backends.types import NOT_QUANTIZED, Broken
from graphquant.ir import FLOAT_TYPES, Op, TensorRef

if TYPE_CHECKING:
    from graphquant.backends.onnxruntime.work import Work
    from graphquant.ir import Graph

REFUSED = "refused"
"""The rule that is broken where onnxruntime does not load the model at all."""

BYTES = frozenset({"int8", "uint8"})

HALVES = frozenset({"int16", "uint16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """An op and the quantizations around it.

    Attributes:
        work: The working copy.
        graph: The op's graph.
        op: The op.
        dqs: The DequantizeLinears that fill its slots, in the order of the slots.
        types: Their integer types.
        filled: How many slots are filled.
        qs: The QuantizeLinears that read it, or that read the Relu or Clip behind it.
        clip: That Relu or Clip, where it does nothing that the Q does not.
        int8: Whether kernels take int8 activations.
    """

    work: Work
    graph: Graph
    op: Op
    dqs: tuple[Op, ...]
    types: tuple[str, ...]
    filled: int
    qs: tuple[Op, ...]
    clip: str
    int8: bool

    @property
    def made(self) -> str:
        """The integer type behind the op."""
        return self.work.dtype(self.graph, self.qs[0].name)


def around(work: Work, graph: Graph, op: Op, *, int8: bool) -> Around | Broken:
    """What is around `op`; or the Relu or Clip behind it that keeps it in float."""
    sources = [work.producer(graph, op.name, slot) for slot in range(len(graph.slots(op.name)))]
    dqs = tuple(source for source in sources if source is not None and is_dq(source))
    clip, tail = "", op.name
    edges = work.edges(graph, op.name)
    if len(edges) == 1 and edges[0].graph == graph.name:
        behind = graph.op(edges[0].op)
        if behind.type in {"Relu", "Clip"} and len(work.edges(graph, behind.name)) == 1:
            clip = "" if work.is_output(graph, behind.name) else behind.name
            tail = clip or tail
    qs = tuple(
        graph.op(use.op) for use in work.edges(graph, tail) if use.graph == graph.name and is_q(graph.op(use.op))
    )
    if clip and (len(qs) != 1 or not redundant(work, graph, clip, qs[0].name)):
        return _clip_broken(work, graph, clip, qs)
    types = tuple(work.dtype(graph, dq.name) for dq in dqs)
    filled = sum(slot is not None for slot in graph.slots(op.name))
    return Around(work=work, graph=graph, op=op, dqs=dqs, types=types, filled=filled, qs=qs, clip=clip, int8=int8)


def _clip_broken(work: Work, graph: Graph, clip: str, qs: tuple[Op, ...]) -> Broken:
    behind = graph.op(clip).type
    if not qs:
        return Broken(
            rule="no-quantized-output",
            says=f"the {behind} {clip} behind it is read by no QuantizeLinear",
            fix=f"quantize the output of {clip}",
        )
    _, scale, zero = work.inputs(graph, qs[0].name)
    step, middle = work.number(scale), 0.0 if zero is None else work.number(zero)
    if behind == "Relu":
        return Broken(
            rule="relu-zero-point",
            says=f"the Relu {clip} behind it has zero point {said(middle)}, which is not its type's smallest value",
            fix=f"quantize the output of {clip} asymmetrically: uint8 with zero point 0, or int8 with -128",
        )
    low, high = clip_limits(work, graph, clip)
    return Broken(
        rule="clip-range",
        says=f"the quantized range behind the Clip {clip} (scale {said(step)}, zero point {said(middle)}) is wider"
        f" than its limits [{said(low)}, {said(high)}]",
        fix=f"give the output of {clip} a range inside of its limits",
    )


def said(number: float | None) -> str:
    """A number for people; "unknown" where only a run can tell."""
    return "unknown" if number is None else f"{number:g}"


def inputs_broken(here: Around, wanted: int | None = None) -> Broken | None:
    """Why not just `wanted` inputs (by default all) come from a DequantizeLinear."""
    if len(here.dqs) == (here.filled if wanted is None else wanted):
        return None
    if not here.dqs and not here.qs and not any(is_dq(here.work.model.op(read)) for read in _filled(here)):
        return NOT_QUANTIZED
    if wanted is not None and len(here.dqs) > wanted:
        says = f"{len(here.dqs)} of its inputs are quantized, and {wanted} may be"
        return Broken(rule="too-many-inputs", says=says, fix="quantize its data input only")
    names = {dq.name for dq in here.dqs}
    slots = enumerate(here.graph.slots(here.op.name))
    others = [(slot, read) for slot, read in slots if read is not None and read.op not in names]
    floats = [one for one in others if here.graph.output(one[1]).dtype in FLOAT_TYPES | {None}]
    return _float_input(here, *(floats or others)[0]) if others else NOT_QUANTIZED


def _filled(here: Around) -> list[TensorRef]:
    return [read for read in here.graph.slots(here.op.name) if read is not None]


def _float_input(here: Around, slot: int, read: TensorRef) -> Broken:
    role, source, named = here.op.role(slot), here.work.model.op(read), here.work.label(read)
    if role == "bias":
        says = f"its bias {named} is float, and is quantized only where a QuantizeLinear follows the op"
        return Broken(rule="float-bias", says=says, fix="quantize its output, or the bias to int32")
    if read.graph != here.graph.name and is_dq(source):
        says = f"its {role} {named} is dequantized in another graph"
        return Broken(rule="outer-input", says=says, fix="put the QuantizeLinear and DequantizeLinear into the body")
    fix = f"insert QuantizeLinear and DequantizeLinear between {named.op} and this op"
    return Broken(rule="float-input", says=f"its {role} {named} is float", fix=fix)


def output_broken(here: Around) -> Broken | None:
    """Why the output does not go to a QuantizeLinear and nowhere else."""
    work, graph, name = here.work, here.graph, here.op.name
    edges = work.edges(graph, name)
    used = {port for port, output in enumerate(here.op.outputs) if output.name or port == 0}
    if not here.qs:
        says = "no QuantizeLinear reads its output"
        if work.is_output(graph, name) and not edges:
            says = "its output is an output of the graph, and float"
        return Broken(rule="no-quantized-output", says=says, fix="quantize its output")
    if work.is_output(graph, name):
        says = "its float output is an output of the graph too"
        return Broken(rule="graph-output", says=says, fix="make the dequantized tensor the graph's output")
    if len(edges) != len(here.qs):
        other = next(use for use in edges if not (use.graph == graph.name and is_q(graph.op(use.op))))
        says = f"{other} reads its float output beside the QuantizeLinear"
        return Broken(rule="float-reader", says=says, fix=f"let {other} read the dequantized tensor")
    if len(here.qs) != len(used):
        says = f"{len(here.qs)} QuantizeLinears with different parameters read it"
        return Broken(rule="several-scales", says=says, fix="give all readers one scale and zero point")
    return None


def type_broken(here: Around, allowed: frozenset[str] = BYTES) -> Broken | None:
    """Why the types do not fit: inputs and output have one, and it must be allowed."""
    types = list(dict.fromkeys([*here.types, *([here.made] if here.qs else [])]))
    if len(types) > 1:
        says = f"its inputs and output are {' and '.join(types)}"
        return Broken(rule="mixed-types", says=says, fix="give all of them one integer type")
    if types[0] not in allowed:
        return no_type(here.op, types[0])
    return None


def no_type(op: Op, dtype: str) -> Broken:
    """There is no kernel for that integer type."""
    if dtype.startswith("float8"):
        says = f"onnxruntime takes {op.type} on {dtype} for one of its own and then refuses the model"
        return Broken(rule=REFUSED, says=says, fix="quantize it to 8-bit integers, or leave it float")
    says = f"onnxruntime has no {op.type} for {dtype}"
    return Broken(rule="type", says=says, fix="use 8 bits here: uint8 activations, int8 weights")


def no_int8(here: Around) -> Broken | None:
    """Why an int8 activation is not taken: x86 kernels want uint8, and only some int8 pairs are made uint8."""
    if here.types[0] != "int8" or (here.int8 and here.types[1] == "int8"):
        return None
    says = "its activation is int8 and cannot be made uint8, since its QuantizeLinear has several readers or is missing"
    if here.int8:
        says = f"its activation is int8 and its weight {here.types[1]}"
    return Broken(rule="int8-activation", says=says, fix="quantize activations to uint8")


def group_broken(here: Around, wanted: int | None = None) -> Broken | None:
    """Why the op does not stand between quantizations on all sides."""
    return inputs_broken(here, wanted) or output_broken(here)


def clip_behind(here: Around) -> Broken | None:
    """A Relu or Clip stands behind an op that cannot absorb one."""
    if not here.clip:
        return None
    says = f"{here.clip} stands between it and the QuantizeLinear"
    return Broken(rule="clip-behind", says=says, fix="quantize its output too")


def too_old(here: Around) -> Broken | None:
    """The op of this opset is not the one that onnxruntime knows on integers."""
    first = FIRST_OPSET.get(here.op.type, 0)
    if here.work.model.opset >= first:
        return None
    says = (
        f"onnxruntime has {here.op.type} on integers from opset {first} on, and the model has {here.work.model.opset}"
    )
    return Broken(rule="opset", says=says, fix=f"raise the model to opset {first}")
