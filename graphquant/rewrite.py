"""Plan and scales to a new graph: QDQ ops are added and exactly the planned uses are rerouted to them."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import InternalError, UsageError
from graphquant.ir import Graph, Model, Parameters, TensorRef, Use, bulk, check
from graphquant.numerics import Array, Dynamic, FloatType, IntType, QParams, blocks_of, quantize, slabs
from graphquant.plans import Plan, Site, check_plan
from graphquant.prepare import drop_unread
from graphquant.qdq import FAMILIES, Lowering

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from graphquant.ir import Shape

FRAMES = frozenset({"enter", "switch"})
"""Kinds that only TF1 loop and cond frames have; a constant without inputs would sit outside them."""

PRODUCTS = frozenset({"matmul", "gemm"})
"""Kinds of products of two matrices."""

MAX_RUN_TIME_BITS = 16
"""Widest type to which ops quantize while the model runs; wider ones are for constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inserted:
    """What one site became.

    Attributes:
        site: The site.
        params: Its scale and zero point, or that its range is that of each run.
        outputs: The dequantized tensors that its uses read now, one for each graph that reads it.
        folded: Whether the weight was stored as integers.
    """

    site: Site
    params: QParams | Dynamic
    outputs: tuple[TensorRef, ...]
    folded: bool

    @property
    def output(self) -> TensorRef:
        """The dequantized tensor that its first use reads."""
        return self.outputs[0]


class Folds:
    """Integers of weights, made when they are first asked for and kept for other models that have them too."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._made: dict[tuple[Callable[[], Array], QParams | Dynamic], Array] = {}

    def of(self, value: Callable[[], Array], params: QParams | Dynamic, make: Callable[[], Array]) -> Array:
        """What `make` makes of a constant: the same as before for the same `value` and `params`."""
        if (value, params) not in self._made:
            self._made[value, params] = make()
        return self._made[value, params]


@bulk()
def rewrite(
    model: Model,
    plan: Plan,
    params: Mapping[int, QParams | Dynamic],
    *,
    float_weights: bool = False,
    folds: Folds | None = None,
) -> tuple[Model, list[Inserted]]:
    """A copy of `model` in which every site of `plan` that has params is quantized and dequantized.

    Args:
        model: The prepared model that the plan names.
        plan: The sites.
        params: Scale and zero point by the site's position.
        float_weights: Keep weights as they are, with a whole QDQ pair, instead of storing integers.
        folds: Where integers of weights are kept, None if they are to be made each time that they are read.

    Raises:
        UsageError: The plan does not fit the model.
    """
    check_plan(model, plan)
    changed = model.copy()
    parameters = Parameters(model)
    names = _Names(plan, params)
    framed = {name for name, graph in changed.graphs.items() if any(op.kind in FRAMES for op in graph.ops())}
    variables = _Variables(changed)
    fed = {use for index, site in enumerate(plan.sites) if index in params for use in site.uses}
    inserted = []
    for index, site in enumerate(plan.sites):
        if index not in params:
            continue
        graph = changed.graphs[site.graph]
        name = names.take(graph, site)
        lowering = _lowering(model, parameters, site, params[index], name, float_weights=float_weights, folds=folds)
        learned = variables.take(site, name) if site.scheme.range == "learned" else ""
        lowering = replace(lowering, in_frame=site.graph in framed, learned=learned)
        with _anchored(changed, site):
            outputs = _insert(changed, site, lowering, fed)
        inserted.append(Inserted(site=site, params=params[index], outputs=outputs, folded=lowering.value is not None))
    drop_unread(changed, (done.site.tensor for done in inserted if done.folded))
    check(changed, "rewrite")
    return changed, inserted


@contextmanager
def _anchored(model: Model, site: Site) -> Iterator[None]:
    """Notes in the ops that are added what they are for."""
    graphs = [model.graphs[name] for name in dict.fromkeys([site.graph, *(use.graph for use in site.uses)])]
    for graph in graphs:
        graph.anchor = str(site.tensor)
    yield
    for graph in graphs:
        graph.anchor = ""


def _insert(model: Model, site: Site, lowering: Lowering, fed: AbstractSet[Use]) -> tuple[TensorRef, ...]:
    """Adds the ops of one site and lets its uses read them; returns the dequantized tensor of each graph.

    What is quantized in one graph is dequantized in each body that reads it: an op runs on integers only if the
    DequantizeLinear is in its own graph, and what it reads was quantized by an op that nobody else reads in float.

    Args:
        model: The model, which is changed.
        site: The site.
        lowering: What its family is to make.
        fed: All uses that read dequantized tensors in the end.
    """
    lower = FAMILIES[site.scheme.family or ""].lower
    home = model.graphs[site.graph]
    readers: dict[str, list[Use]] = {}
    for use in site.uses:
        readers.setdefault(use.graph, []).append(use)
    made = None
    outputs = []
    for name, uses in readers.items():
        graph = model.graphs[name]
        if name != site.graph and lowering.value is not None and _alone(graph, uses, fed):
            output = lower(graph, replace(lowering, name=graph.fresh(lowering.name)))
        else:
            made = made or lower(home, lowering)
            output = made if name == site.graph else _again(home, made, graph)
        model.graphs[site.tensor.graph].reroute(site.tensor, uses, output)
        outputs.append(output)
    if made is not None and site.graph not in readers:
        home.remove(made.op)
    return tuple(outputs)


def _alone(graph: Graph, uses: Sequence[Use], fed: AbstractSet[Use]) -> bool:
    """Whether a weight is multiplied by values that stay float.

    onnxruntime makes an op for matrices of few bits of that, and refuses a model in which the integers of one are not
    in the body that multiplies by it.
    """
    others = (
        Use(use.graph, use.op, slot)
        for use in uses
        if graph.op(use.op).kind in PRODUCTS
        for slot in range(len(graph.slots(use.op)))
        if graph.op(use.op).role(slot) in {"input", "weight"}
    )
    return any(other not in fed for other in others)


def _again(home: Graph, dequantized: TensorRef, graph: Graph) -> TensorRef:
    """A copy in `graph` of the op that makes `dequantized` in `home`; it reads what that reads."""
    op = home.op(dequantized.op)
    label = graph.fresh(op.name)
    outputs = tuple(replace(output, name=label) for output in op.outputs)
    return graph.add(replace(op, name=label, outputs=outputs), home.slots(op.name))


def _lowering(
    model: Model,
    parameters: Parameters,
    site: Site,
    params: QParams | Dynamic,
    name: str,
    *,
    float_weights: bool,
    folds: Folds | None,
) -> Lowering:
    """What the site's family is to make. The weight's value is read here, once, and only if it is needed."""
    shape = model.output(site.tensor).shape
    folding = site.parameter and not float_weights and FAMILIES[site.scheme.family or ""].folds
    unknown = site.axis is not None and (shape is None or None in shape)
    held = _held(model, parameters, site.tensor) if folding else None
    wanted = site.parameter and (folding or float_weights or unknown) and held is None
    value = parameters.value(site.tensor) if wanted else None
    if held is not None:
        shape = held[1]
    elif value is not None:
        shape = value.shape
    seen = site.view or shape
    if (
        not isinstance(params, Dynamic)
        and params.axis is not None
        and seen is not None
        and not _covers(params, params.axis, seen)
    ):
        cells = "channels" if params.block is None else f"blocks of {params.block}"
        raise UsageError(
            f"{site.tensor} of shape {seen} has not {params.scale.size} {cells} on axis {params.axis}, as the plan"
            " says. Mend its site, or make the plan anew."
        )
    folded = partial(_value, parameters, site.tensor) if folding and (held or value is not None) else None
    if folded is None and FAMILIES[site.scheme.family or ""].folds and params.type.bits > MAX_RUN_TIME_BITS:
        raise UsageError(
            f"{site.tensor} would be quantized to {params.type.name} at run time, which no op does. Take its site out"
            " of the plan."
        )
    clip = value is None or folded is not None or isinstance(params, Dynamic) or _overflows(value, params, site.view)
    return Lowering(
        tensor=site.tensor,
        name=name,
        params=params,
        rule=site.rule,
        value=folded,
        keep=None if folds is None or held is None else partial(folds.of, held[0], params),
        parameter=site.parameter,
        clip=clip,
        shape=shape,
        view=site.view,
        round=site.scheme.round,
        args=site.scheme.args,
        opset=model.opset,
    )


def _held(model: Model, parameters: Parameters, tensor: TensorRef) -> tuple[Callable[[], Array], Shape] | None:
    """What gives the value of the constant that a weight is, unchanged, and its shape; None if that takes reading."""
    op = model.op(parameters.origin(tensor))
    shape = op.outputs[0].shape
    sure = op.kind == "constant" and (op.source is None or op.type == "Initializer")  # else a file may say otherwise
    return (op.value, shape) if sure and op.value is not None and shape is not None and None not in shape else None


def _value(parameters: Parameters, tensor: TensorRef) -> Array:
    """The value of a weight that was found before, read anew."""
    value = parameters.value(tensor)
    if value is None:
        raise InternalError(f"the weight {tensor} is not there any more.")
    return value


def _covers(params: QParams, axis: int, shape: Shape) -> bool:
    """Whether there is a scale for each channel or block of `shape`."""
    if params.block is None:
        return shape[axis : axis + 1] == params.scale.shape
    known = tuple(size for size in shape if size is not None)
    return len(known) == len(shape) and blocks_of(known, axis, params.block) == params.scale.shape


def _overflows(value: Array, params: QParams, view: tuple[int, ...] | None) -> bool:
    """Whether a value lies outside of what the type represents."""
    if isinstance(params.type, FloatType):
        return False  # its container is the type itself
    if view is not None:
        value = np.resize(value, view)
    wide = IntType(MAX_RUN_TIME_BITS * 2, signed=True)
    parts = ((value[place], part) for place, part in slabs(value.shape, params))
    return not all(
        np.array_equal(quantize(part, some), quantize(part, replace(some, type=wide, narrow=False)))
        for part, some in parts
    )


class _Variables:
    """Names that the variables of learned ranges have in common, one for a site and its copies."""

    def __init__(self, model: Model) -> None:
        ops = (op for graph in model.graphs.values() for op in graph.ops() if op.kind == "variable")
        self._taken = {str(op.attrs.get("shared_name") or op.name).rpartition("/")[0] for op in ops}
        self._names: dict[Use, str] = {}

    def take(self, site: Site, name: str) -> str:
        """The name of its twin's variables, or a new one made of the name of the site's ops."""
        known = None if site.twin is None else self._names.get(site.twin)
        label, k = name, 0
        while known is None and label in self._taken:
            k += 1
            label = f"{name}_{k}"
        self._taken.add(known or label)
        self._names.update(dict.fromkeys(site.uses, known or label))
        return known or label


class _Names:
    """Names of new ops: `<op>/quant`, `_<port>` where it is not 0, `/<rule>` where a tensor has several sites.

    A name that is taken gets the smallest free `_k`, in the order of the plan.
    """

    def __init__(self, plan: Plan, params: Mapping[int, QParams | Dynamic]) -> None:
        done = (site for index, site in enumerate(plan.sites) if index in params)
        self._count = Counter((site.tensor, site.graph) for site in done)
        self._next: dict[tuple[int, str], int] = {}

    def take(self, graph: Graph, site: Site) -> str:
        """A name for the ops of `site` in `graph`; graphs of one name space share what is taken."""
        name = f"{site.tensor.op}/quant" + (f"_{site.tensor.port}" if site.tensor.port else "")
        if self._count[site.tensor, site.graph] > 1:
            name = f"{name}/{site.rule}"
        space = id(graph.taken)
        k = self._next.get((space, name), 0)
        label = f"{name}_{k}" if k else name
        while (space, label) in self._next or label in graph.taken or label in graph:
            k += 1
            label = f"{name}_{k}"
        self._next[space, name] = k + 1
        self._next.setdefault((space, label), 1)
        return label
