"""Plan and scales to a new graph: QDQ ops are added and exactly the planned uses are rerouted to them."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import InternalError, UsageError
from graphquant.ir import Graph, Model, Parameters, TensorRef, Use, check_invariants, paused_gc
from graphquant.numerics import (
    Array,
    DynamicQParams,
    FloatType,
    IntType,
    QParams,
    block_scale_shape,
    iter_slabs,
    quantize,
)
from graphquant.qdq import FAMILIES, QDQSite
from graphquant.quantize.plan import Plan, Site
from graphquant.quantize.plan_json import check_plan
from graphquant.quantize.preparation_undo import remove_unread_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from graphquant.ir import Shape


FRAME_KINDS = frozenset({"enter", "switch"})
"""Kinds that only TF1 loop and cond frames have; a constant without inputs would sit outside them."""

MATRIX_PRODUCT_KINDS = frozenset({"matmul", "gemm"})
"""Kinds of products of two matrices."""

MAX_RUN_TIME_BITS = 16
"""Widest type to which ops quantize while the model runs; wider ones are for constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertedPair:
    """What one site became.

    Attributes:
        site: The site.
        params: Its scale and zero point, or that its range is that of each run.
        outputs: The dequantized tensors that its uses read now, one for each graph that reads it.
        folded: Whether the weight was stored as integers.
    """

    site: Site
    params: QParams | DynamicQParams
    outputs: tuple[TensorRef, ...]
    folded: bool

    @property
    def output(self) -> TensorRef:
        """The dequantized tensor that its first use reads."""
        return self.outputs[0]


class IntegerCache:
    """Integers of weights, made when they are first asked for and kept for other models that have them too."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._integers: dict[tuple[Callable[[], Array], QParams | DynamicQParams], Array] = {}

    def get_or_compute(
        self, value: Callable[[], Array], params: QParams | DynamicQParams, compute: Callable[[], Array]
    ) -> Array:
        """What `compute` makes of a constant: the same as before for the same `value` and `params`."""
        if (value, params) not in self._integers:
            self._integers[value, params] = compute()
        return self._integers[value, params]


@paused_gc()
def rewrite(
    model: Model,
    plan: Plan,
    params: Mapping[int, QParams | DynamicQParams],
    *,
    float_weights: bool = False,
    integer_cache: IntegerCache | None = None,
) -> tuple[Model, list[InsertedPair]]:
    """A copy of `model` in which every site of `plan` that has params is quantized and dequantized.

    Args:
        model: The prepared model that the plan names.
        plan: The sites.
        params: Scale and zero point by the site's position.
        float_weights: Keep weights as they are, with a whole QDQ pair, instead of storing integers.
        integer_cache: Where integers of weights are kept, None if they are to be made each time that they are read.

    Raises:
        UsageError: The plan does not fit the model.
    """
    check_plan(model, plan)
    changed = model.copy()
    parameters = Parameters(model)
    names = _InsertedOpNames(plan, params)
    framed = {name for name, graph in changed.graphs.items() if any(op.kind in FRAME_KINDS for op in graph.ops())}
    variables = _LearnedVariableNames(changed)
    quantized_uses = {use for index, site in enumerate(plan.sites) if index in params for use in site.uses}
    inserted = []
    for index, site in enumerate(plan.sites):
        if index not in params:
            continue
        graph = changed.graphs[site.graph]
        name = names.make_name(graph, site)
        lowering = _make_lowering(
            model, parameters, site, params[index], name, float_weights=float_weights, integer_cache=integer_cache
        )
        learned = variables.get_name(site, name) if site.scheme.range == "learned" else ""
        lowering = replace(lowering, in_frame=site.graph in framed, variable_prefix=learned)
        with _record_anchor(changed, site):
            outputs = _insert_site(changed, site, lowering, quantized_uses)
        inserted.append(
            InsertedPair(site=site, params=params[index], outputs=outputs, folded=lowering.read_value is not None)
        )
    remove_unread_ops(changed, (pair.site.tensor for pair in inserted if pair.folded))
    check_invariants(changed, "rewrite")
    return changed, inserted


@contextmanager
def _record_anchor(model: Model, site: Site) -> Iterator[None]:
    """Notes in the ops that are added what they are for."""
    graphs = [model.graphs[name] for name in dict.fromkeys([site.graph, *(use.graph for use in site.uses)])]
    for graph in graphs:
        graph.anchor = str(site.tensor)
    yield
    for graph in graphs:
        graph.anchor = ""


def _insert_site(
    model: Model, site: Site, lowering: QDQSite, quantized_uses: AbstractSet[Use]
) -> tuple[TensorRef, ...]:
    """Adds the ops of one site and lets its uses read them; returns the dequantized tensor of each graph.

    What is quantized in one graph is dequantized in each body that reads it: an op runs on integers only if the
    DequantizeLinear is in its own graph, and what it reads was quantized by an op that nobody else reads in float.

    Args:
        model: The model, which is changed.
        site: The site.
        lowering: What its family is to make.
        quantized_uses: All uses that read dequantized tensors in the end.
    """
    lower = FAMILIES[site.scheme.family or ""].add_ops
    home = model.graphs[site.graph]
    readers: dict[str, list[Use]] = {}
    for use in site.uses:
        readers.setdefault(use.graph, []).append(use)
    dequantized = None
    outputs = []
    for name, uses in readers.items():
        graph = model.graphs[name]
        if (
            name != site.graph
            and lowering.read_value is not None
            and _multiplies_float_values(graph, uses, quantized_uses)
        ):
            output = lower(graph, replace(lowering, name=graph.unique_name(lowering.name)))
        else:
            dequantized = dequantized or lower(home, lowering)
            output = dequantized if name == site.graph else _copy_dequantize(home, dequantized, graph)
        model.graphs[site.tensor.graph].reroute(site.tensor, uses, output)
        outputs.append(output)
    if dequantized is not None and site.graph not in readers:
        home.remove_op(dequantized.op)
    return tuple(outputs)


def _multiplies_float_values(graph: Graph, uses: Sequence[Use], quantized_uses: AbstractSet[Use]) -> bool:
    """Whether a weight is multiplied by values that stay float.

    onnxruntime makes an op for matrices of few bits of that, and refuses a model in which the integers of one are not
    in the body that multiplies by it.
    """
    operand_uses = (
        Use(use.graph, use.op, slot)
        for use in uses
        if graph.op(use.op).kind in MATRIX_PRODUCT_KINDS
        for slot in range(len(graph.slots(use.op)))
        if graph.op(use.op).role(slot) in {"input", "weight"}
    )
    return any(operand_use not in quantized_uses for operand_use in operand_uses)


def _copy_dequantize(home: Graph, dequantized: TensorRef, graph: Graph) -> TensorRef:
    """A copy in `graph` of the op that makes `dequantized` in `home`; it reads what that reads."""
    op = home.op(dequantized.op)
    label = graph.unique_name(op.name)
    outputs = tuple(replace(output, name=label) for output in op.outputs)
    return graph.add_op(replace(op, name=label, outputs=outputs), home.slots(op.name))


def _make_lowering(
    model: Model,
    parameters: Parameters,
    site: Site,
    params: QParams | DynamicQParams,
    name: str,
    *,
    float_weights: bool,
    integer_cache: IntegerCache | None,
) -> QDQSite:
    """What the site's family is to make. The weight's value is read here, once, and only if it is needed."""
    shape = model.output(site.tensor).shape
    folding = site.parameter and not float_weights and FAMILIES[site.scheme.family or ""].stores_integer_weights
    unknown = site.axis is not None and (shape is None or None in shape)
    stored = _find_stored_constant(model, parameters, site.tensor) if folding else None
    needs_value = site.parameter and (folding or float_weights or unknown) and stored is None
    value = parameters.value(site.tensor) if needs_value else None
    if stored is not None:
        shape = stored[1]
    elif value is not None:
        shape = value.shape
    viewed_shape = site.view or shape
    if (
        not isinstance(params, DynamicQParams)
        and params.axis is not None
        and viewed_shape is not None
        and not _scales_cover_shape(params, params.axis, viewed_shape)
    ):
        cells = "channels" if params.block is None else f"blocks of {params.block}"
        raise UsageError(
            f"{site.tensor} of shape {viewed_shape} has not {params.scale.size} {cells} on axis {params.axis}, as the plan"
            " says. Mend its site, or make the plan anew."
        )
    folded = partial(_reread_weight, parameters, site.tensor) if folding and (stored or value is not None) else None
    if (
        folded is None
        and FAMILIES[site.scheme.family or ""].stores_integer_weights
        and params.type.bits > MAX_RUN_TIME_BITS
    ):
        raise UsageError(
            f"{site.tensor} would be quantized to {params.type.name} at run time, which no op does. Take its site out"
            " of the plan."
        )
    clip = (
        value is None
        or folded is not None
        or isinstance(params, DynamicQParams)
        or _exceeds_type(value, params, site.view)
    )
    return QDQSite(
        tensor=site.tensor,
        name=name,
        params=params,
        rule=site.rule,
        read_value=folded,
        reuse_integers=None
        if integer_cache is None or stored is None
        else partial(integer_cache.get_or_compute, stored[0], params),
        is_parameter=site.parameter,
        needs_clip=clip,
        shape=shape,
        merged_shape=site.view,
        rounding_mode=site.scheme.round,
        args=site.scheme.args,
        opset=model.opset,
    )


def _find_stored_constant(
    model: Model, parameters: Parameters, tensor: TensorRef
) -> tuple[Callable[[], Array], Shape] | None:
    """What gives the value of the constant that a weight is, unchanged, and its shape; None if that takes reading."""
    op = model.op(parameters.root_tensor(tensor))
    shape = op.outputs[0].shape
    is_reliable = op.kind == "constant" and (
        op.source is None or op.type == "Initializer"
    )  # else a file may say otherwise
    return (
        (op.read_value, shape)
        if is_reliable and op.read_value is not None and shape is not None and None not in shape
        else None
    )


def _reread_weight(parameters: Parameters, tensor: TensorRef) -> Array:
    """The value of a weight that was found before, read anew."""
    value = parameters.value(tensor)
    if value is None:
        raise InternalError(f"the weight {tensor} is not there any more.")
    return value


def _scales_cover_shape(params: QParams, axis: int, shape: Shape) -> bool:
    """Whether there is a scale for each channel or block of `shape`."""
    if params.block is None:
        return shape[axis : axis + 1] == params.scale.shape
    sizes = tuple(size for size in shape if size is not None)
    return len(sizes) == len(shape) and block_scale_shape(sizes, axis, params.block) == params.scale.shape


def _exceeds_type(value: Array, params: QParams, view: tuple[int, ...] | None) -> bool:
    """Whether a value lies outside of what the type represents."""
    if isinstance(params.type, FloatType):
        return False  # its container is the type itself
    if view is not None:
        value = np.resize(value, view)
    wide = IntType(MAX_RUN_TIME_BITS * 2, signed=True)
    pieces = ((value[index], slab_params) for index, slab_params in iter_slabs(value.shape, params))
    return not all(
        np.array_equal(quantize(piece, slab_params), quantize(piece, replace(slab_params, type=wide, narrow=False)))
        for piece, slab_params in pieces
    )


class _LearnedVariableNames:
    """Names that the variables of learned ranges have in common, one for a site and its copies."""

    def __init__(self, model: Model) -> None:
        ops = (op for graph in model.graphs.values() for op in graph.ops() if op.kind == "variable")
        self._used_names = {str(op.attrs.get("shared_name") or op.name).rpartition("/")[0] for op in ops}
        self._names: dict[Use, str] = {}

    def get_name(self, site: Site, name: str) -> str:
        """The name of its twin's variables, or a new one made of the name of the site's ops."""
        original_name = None if site.clone_of is None else self._names.get(site.clone_of)
        label, suffix = name, 0
        while original_name is None and label in self._used_names:
            suffix += 1
            label = f"{name}_{suffix}"
        self._used_names.add(original_name or label)
        self._names.update(dict.fromkeys(site.uses, original_name or label))
        return original_name or label


class _InsertedOpNames:
    """Names of new ops: `<op>/quant`, `_<port>` where it is not 0, `/<rule>` where a tensor has several sites.

    A name that is taken gets the smallest free `_k`, in the order of the plan.
    """

    def __init__(self, plan: Plan, params: Mapping[int, QParams | DynamicQParams]) -> None:
        quantized_sites = (site for index, site in enumerate(plan.sites) if index in params)
        self._count = Counter((site.tensor, site.graph) for site in quantized_sites)
        self._next: dict[tuple[int, str], int] = {}

    def make_name(self, graph: Graph, site: Site) -> str:
        """A name for the ops of `site` in `graph`; graphs of one name space share what is taken."""
        name = f"{site.tensor.op}/quant" + (f"_{site.tensor.port}" if site.tensor.port else "")
        if self._count[site.tensor, site.graph] > 1:
            name = f"{name}/{site.rule}"
        space = id(graph.reserved_names)
        suffix = self._next.get((space, name), 0)
        label = f"{name}_{suffix}" if suffix else name
        while (space, label) in self._next or label in graph.reserved_names or label in graph:
            suffix += 1
            label = f"{name}_{suffix}"
        self._next[space, name] = suffix + 1
        self._next.setdefault((space, label), 1)
        return label
