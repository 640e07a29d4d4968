"""What onnxruntime does to a graph before it looks for ops to run on integers: its own steps, in its own order.

Each step takes the working copy and one graph of it and tells whether it changed anything. Which op does the work of
one that is gone is written down in `Gone`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.backends.onnxruntime.clips import absorb_clips
from graphquant.backends.onnxruntime.operands import quantize_bias, where_scalar
from graphquant.backends.onnxruntime.work import FIRST_OPSET, is_dq, is_q, names
from graphquant.ir import FLOAT_TYPES, NO_ATTRS, Op, Output, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.backends.onnxruntime.work import Gone, Work
    from graphquant.ir import Graph

    Sizes = tuple[int | str | None, ...]

ROUNDS = 10
"""How often onnxruntime goes over a graph before it gives up changing it."""

PROPAGATES = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"})
"""Ops that a quantization may move past, so that they need none of their own on the other side."""


def simplify(work: Work, graph: Graph, gone: Gone) -> None:
    """Every step, until nothing changes any more."""
    _known_shapes(work, graph)
    _unique_dq(work, graph)
    for _ in range(ROUNDS):
        changed = [step(work, graph, gone) for step in _STEPS]
        if not any(changed):
            break
    absorb_clips(work, graph, gone)


def _known_shapes(work: Work, graph: Graph) -> None:
    """A Shape whose answer is known becomes a constant, and reads nothing any more."""
    for name in names(graph, lambda op: op.kind == "shape"):
        read = work.slot(graph, name, 0)
        sizes = work.shape(read) if read is not None else None
        if sizes is not None and None not in sizes:
            graph.connect(Use(graph.name, name, 0), None)


def _forwarding(work: Work, graph: Graph, gone: Gone) -> bool:
    """Identity and Dropout are dropped, as far as no graph output needs their name."""
    changed = False
    for name in names(graph, lambda op: op.kind in {"identity", "dropout"}):
        source = work.slot(graph, name, 0)
        if source is None or len(graph.readers(name)) > 1 or 0 not in graph.readers(name):
            continue
        home = graph.graphs[source.graph]
        if work.is_output(graph, name) and (
            source.graph != graph.name
            or home.op(source.op).kind in {"input", "constant"}
            or len(work.readers(home, source.op)) > 1
        ):
            continue
        gone.into[graph.name, name] = ""
        work.bypass(graph, name)
        changed = True
    return changed


def _double_pairs(work: Work, graph: Graph, _gone: Gone) -> bool:
    """Of Q, DQ, Q, DQ in a row, the inner two go."""
    changed = False
    for name in names(graph, is_dq):
        before = work.producer(graph, name, 0)
        child = work.only(graph, name)
        if before is None or not is_q(before) or child is None or not is_q(graph.op(child.op)):
            continue
        if work.folded(graph, before.name):
            continue
        last = work.only(graph, child.op)
        if work.only(graph, before.name) is None or last is None or not is_dq(graph.op(last.op)):
            continue
        first, second = work.dtype(graph, name), work.dtype(graph, child.op)
        fits = work.same_params(graph, before.name, name) and work.same_params(graph, child.op, last.op)
        if not fits or first != second or first not in {"int8", "uint8"}:
            continue
        _merge(work, graph, (before.name, name, child.op, last.op), first)
        graph.connect(last, TensorRef(graph.name, before.name))
        work.drop(graph, child.op)
        work.drop(graph, name)
        changed = True
    return changed


def _merge(work: Work, graph: Graph, chain: tuple[str, str, str, str], dtype: str) -> None:
    """The outer Q and DQ get the range that both pairs have in common."""
    least, most = (-128, 127) if dtype == "int8" else (0, 255)
    ends = []
    for name in chain[1:3]:
        _, given, middle_ = work.inputs(graph, name)
        step, middle = work.number(given) or 0.0, work.number(middle_) or 0.0
        ends.append(((least - middle) * step, (most - middle) * step))
    if ends[0] == ends[1]:
        return
    low, high = max(ends[0][0], ends[1][0]), min(ends[0][1], ends[1][1])
    scale = (high - low) / (most - least)
    zero = round(least - low / scale) if scale else least
    for name in (chain[0], chain[3]):
        known = Output("", "float32", ())
        graph.connect(Use(graph.name, name, 1), work.stand_in(graph, f"{name}/scale", "float32", known, scale))
        middle = min(max(zero, least), most)
        graph.connect(Use(graph.name, name, 2), work.stand_in(graph, f"{name}/zero", dtype, known, middle))


def _common(work: Work, graph: Graph, _gone: Gone) -> bool:
    """Quantizations of one tensor with equal parameters become one."""
    first: dict[tuple[object, ...], str] = {}
    changed = False
    for name in names(graph, is_q):
        data, scale, zero = work.inputs(graph, name)
        if not work.scalar(graph, name) or work.is_output(graph, name) or work.folded(graph, name):
            continue
        key = (data, work.number(scale), None if zero is None else work.number(zero), work.dtype(graph, name))
        twin = first.setdefault(key, name)
        if twin != name:
            for use in work.readers(graph, name):
                work.model.graphs[use.graph].connect(use, TensorRef(graph.name, twin))
            work.drop(graph, name)
            changed = True
    return changed


def _unique_dq(work: Work, graph: Graph, _gone: Gone | None = None) -> bool:
    """Each reader gets a DQ of its own; one that is a graph output, or is read in a body, keeps only those."""
    changed = False
    for name in names(graph, is_dq):
        uses = work.readers(graph, name)
        mine = [use for use in uses if use.graph == graph.name and graph.op(use.op).kind != "output"]
        keep = 1 if len(mine) == len(uses) else 0
        for use in mine[keep:]:
            graph.connect(use, work.add(graph, graph.op(name), name, graph.slots(name)))
            changed = True
    return changed


def _matmul_add(work: Work, graph: Graph, gone: Gone) -> bool:
    """MatMul and the Add of a bias become a Gemm, between Reshapes where the input has not two axes.

    The bias need be no constant. Of two products that are added, the one that stands last takes the other for its bias.
    """
    changed = False
    for name in reversed(names(graph, lambda op: op.type == "MatMul" and not op.domain)):
        use = work.only(graph, name)
        if use is None or graph.op(use.op).type != "Add":
            continue
        left, right = work.slot(graph, name, 0), work.slot(graph, name, 1)
        bias = work.slot(graph, use.op, 1 - use.slot)
        if left is None or right is None or bias is None or graph.output(left).dtype not in FLOAT_TYPES | {None}:
            continue
        a, b, c = (work.sizes(tensor) for tensor in (left, right, bias))
        if not a or b is None or c is None or len(b) != 2 or not _gemm_bias(a, b, c):  # noqa: PLR2004  # a matrix
            continue
        if len(a) != 2 and not all(isinstance(size, int) for size in (*a, *b)):  # noqa: PLR2004  # the same
            continue
        _to_gemm(work, graph, name, use.op, bias)
        gone.into[graph.name, use.op] = name
        changed = True
    return changed


def _gemm_bias(a: Sizes, b: Sizes, c: Sizes) -> bool:
    """Whether Gemm can add a bias of shape `c` to the product of shapes `a` and `b`."""
    columns = b[1]
    if len(c) == 1:
        return c[0] == columns and columns is not None
    if len(a) != 2 or len(c) != 2:  # noqa: PLR2004  # a matrix
        return False
    return (c[0] == 1 and c[1] == columns) or (c[0] == a[0] is not None and c[1] in {1, columns})


def _to_gemm(work: Work, graph: Graph, name: str, add: str, bias: TensorRef) -> None:
    matmul = graph.op(name)
    left = work.slot(graph, name, 0)
    readers = work.readers(graph, add)
    known = graph.output(TensorRef(graph.name, add))
    graph.replace(replace(matmul, kind="gemm", type="Gemm", attrs=NO_ATTRS, roles=("input", "weight", "bias")))
    for use in readers:
        work.model.graphs[use.graph].connect(use, TensorRef(graph.name, name))
    work.drop(graph, add)
    work.stand_for(TensorRef(graph.name, name), TensorRef(graph.name, add))
    graph.connect(Use(graph.name, name, 2), bias)
    sizes = work.shape(left) if left is not None else None
    if sizes is None or len(sizes) == 2:  # noqa: PLR2004  # a matrix
        return
    rows = math.prod(size or 1 for size in sizes[:-1])
    wide = Output("", known.dtype, (rows, sizes[-1]))
    reshape = Op(name="", kind="reshape", type="Reshape", roles=("input", "shape"), outputs=(wide,))
    shape = work.stand_in(graph, f"{name}/shape", "int64", Output("", "int64", (2,)))
    into = work.add(graph, reshape, f"{name}/in", [left, shape])
    work.stand_for(into, left or into)
    graph.connect(Use(graph.name, name, 0), into)
    back = replace(reshape, outputs=(known,))
    after = work.add(graph, back, f"{name}/out", [TensorRef(graph.name, name), shape])
    work.stand_for(after, TensorRef(graph.name, add))
    for use in readers:
        work.model.graphs[use.graph].connect(use, after)


def _reshapes(work: Work, graph: Graph, gone: Gone) -> bool:
    """Of two Reshapes in a row the first goes, if the shape behind the second is known."""
    changed = False
    for name in names(graph, lambda op: op.type == "Reshape" and not op.domain):
        if name not in graph:
            continue
        before = work.producer(graph, name, 0)
        shape = graph.op(name).outputs[0].shape
        if before is None or before.type != "Reshape" or shape is None or None in shape:
            continue
        if work.only(graph, before.name) is not None:
            gone.into[graph.name, before.name] = name
            work.bypass(graph, before.name)
            changed = True
    return changed


def _propagates(work: Work, op: Op) -> bool:
    known = op.type in PROPAGATES and not op.domain
    return known and work.model.opset >= FIRST_OPSET.get(op.type, 0)


def _forward(work: Work, graph: Graph, _gone: Gone) -> bool:
    """Behind an op that a DQ may move past, a pair is put, unless something quantizes what it makes already."""
    changed = False
    for name in names(graph, is_dq):
        use = work.only(graph, name)
        if use is None or not work.scalar(graph, name):
            continue
        todo = [use.op]
        while todo:
            passed = todo.pop()
            if not _propagates(work, graph.op(passed)):
                continue
            uses = graph.readers(passed).get(0, [])
            inner = [one for one in uses if work.model.graphs[one.graph].op(one.op).kind != "output"]
            if inner and len(inner) != len(uses):
                continue
            if not uses or any(is_q(work.model.graphs[one.graph].op(one.op)) for one in uses):
                continue
            work.pair(graph, TensorRef(graph.name, passed), uses, name)
            changed = True
            todo += [one.op for one in uses if one.graph == graph.name and graph.op(one.op).kind != "output"]
    return changed


def _backward(work: Work, graph: Graph, _gone: Gone) -> bool:
    """Before an op that a Q may move past, a pair is put where there is none."""
    changed = False
    for name in names(graph, is_q):
        if not work.scalar(graph, name) or work.folded(graph, name):
            continue
        here = Use(graph.name, name, 0)
        while True:
            tensor = graph.producer(here)
            if tensor is None or tensor.graph != graph.name or len(work.readers(graph, tensor.op)) != 1:
                break
            op = graph.op(tensor.op)
            if not _propagates(work, op):
                break
            here = Use(graph.name, op.name, 0)
            before = graph.producer(here)
            if before is None or before.graph != graph.name or is_dq(graph.op(before.op)) or work.constant(before):
                break
            given = graph.op(before.op).kind == "input"
            if not given and len(graph.consumers(before)) != 1:
                break
            made = work.pair(graph, before, [here], name)
            changed = True
            if given:
                break
            read = work.producer(graph, made[0].op, 0)
            if read is None:
                break
            here = Use(graph.name, read.name, 0)
    return changed


def to_uint8(work: Work, graph: Graph) -> None:
    """A pair of int8 becomes one of uint8 where its Q has one reader: kernels for x86 want uint8 activations."""
    for name in names(graph, is_q):
        use = work.only(graph, name)
        if use is None or not is_dq(graph.op(use.op)) or work.dtype(graph, name) != "int8":
            continue
        if work.folded(graph, name):
            continue
        zeros = [work.number(work.inputs(graph, one)[2]) for one in (name, use.op)]
        if zeros[0] is None or zeros[0] != zeros[1] or not work.own(graph, work.inputs(graph, name)[2]):
            continue
        op = graph.op(name)
        graph.replace(replace(op, outputs=(replace(op.outputs[0], dtype="uint8"),)))
        for one in (name, use.op):
            zero = work.stand_in(graph, f"{one}/zero", "uint8", Output("", "uint8", ()), zeros[0] + 128)
            graph.connect(Use(graph.name, one, 2), zero)


_STEPS: tuple[Callable[[Work, Graph, Gone], bool], ...] = (
    _forwarding,
    _double_pairs,
    _common,
    _matmul_add,
    _reshapes,
    _forward,
    _backward,
    quantize_bias,
    where_scalar,
    _unique_dq,
)
