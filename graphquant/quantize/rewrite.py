"""Apply a plan and its scales to a graph: add Q/DQ ops and reroute exactly the planned uses to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import InternalError, UsageError
from graphquant.ir import (
    DATA_MOVEMENT_KINDS,
    QUANTIZATION_KINDS,
    TRANSPARENT_KINDS,
    Graph,
    Model,
    Op,
    Parameters,
    Shape,
    TensorRef,
    Use,
    check_invariants,
    follow,
    follow_to_end,
    fully_known_shape,
    paused_gc,
    unique_name,
)
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
from graphquant.qdq import QDQSite
from graphquant.qdq.family import add_constant, new_op
from graphquant.quantize.preparation_undo import remove_unread_ops

if TYPE_CHECKING:
    from graphquant.quantize.plan import Plan, Site
    from graphquant.quantize.solver_state import Solution

FRAME_KINDS = frozenset({"enter", "switch"})
"""Kinds that occur only in TF1 loop and cond frames. A constant without inputs would be outside of the frame."""

MAX_RUN_TIME_BITS = 16  # Widest type that ops can quantize to at run time. Wider types are for constants.


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertedPair:
    """The Q/DQ pair of one site."""

    site: Site  # the site
    params: QParams | DynamicQParams  # its scale and zero point, or `Dynamic` for a range per run
    outputs: tuple[TensorRef, ...]  # the dequantized tensors that its uses read now, one for each graph that reads it
    folded: bool  # True if the weight was stored as integers

    @property
    def output(self) -> TensorRef:
        """The dequantized tensor that the first use reads."""
        return self.outputs[0]


class IntegerCache:
    """Cache of quantized weights, shared by several models with the same weights."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._integers: dict[tuple[Callable[[], Array], QParams | DynamicQParams], Array] = {}
        # The model and solution of the last rewrite, and its result.
        self.last_rewrite: tuple[Model, Solution, tuple[Model, list[InsertedPair]]] | None = None

    def get_or_compute(
        self, value: Callable[[], Array], params: QParams | DynamicQParams, compute: Callable[[], Array]
    ) -> Array:
        """Return the cached integers for `value` and `params`; call `compute` on the first access."""
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
    """Return a copy of `model` in which every site of `plan` with params is quantized and dequantized.

    `params` are by site position. `float_weights` keeps weights in float with a whole Q/DQ pair instead of storing
    integers. Without an `integer_cache`, a weight is quantized again on each access. The plan is that of a solution,
    which was checked. Raises a UsageError if an op cannot have its params.
    """
    changed = model.copy()
    parameters = Parameters(model)
    names = _InsertedOpNames(plan, params)
    framed = {name for name, graph in changed.graphs.items() if any(op.kind in FRAME_KINDS for op in graph.ops())}
    variables = (op for graph in changed.graphs.values() for op in graph.ops() if op.kind == "variable")
    variable_names = {str(op.attrs.get("shared_name") or op.name).rpartition("/")[0] for op in variables}
    prefixes: dict[Use, str] = {}  # of the variables of learned ranges, one for a site and its clones
    inserted = []
    for index, site in enumerate(plan.sites):
        if index not in params:
            continue
        graph = changed.graphs[site.graph]
        name = names.make_name(graph, site)
        lowering = _make_lowering(
            model, parameters, site, params[index], name, float_weights=float_weights, integer_cache=integer_cache
        )
        prefix = ""
        if site.scheme.range == "learned":
            original_prefix = None if site.clone_of is None else prefixes.get(site.clone_of)
            prefix = original_prefix or unique_name(name, variable_names)
            variable_names.add(prefix)
            prefixes.update(dict.fromkeys(site.uses, prefix))
        lowering = replace(lowering, in_frame=site.graph in framed, variable_prefix=prefix, targets=plan.targets)
        anchored_graphs = [changed.graphs[graph_name] for graph_name in {site.graph, *(use.graph for use in site.uses)}]
        for anchored_graph in anchored_graphs:
            anchored_graph.anchor = str(site.tensor)  # recorded in the ops that are added
        outputs = _insert_site(changed, site, lowering)
        for anchored_graph in anchored_graphs:
            anchored_graph.anchor = ""
        inserted.append(
            InsertedPair(site=site, params=params[index], outputs=outputs, folded=lowering.read_value is not None)
        )
    remove_unread_ops(changed, (pair.site.tensor for pair in inserted if pair.folded))
    if needs_barriers(plan):
        add_barriers(changed)
    check_invariants(changed, "rewrite")
    return changed, inserted


def _insert_site(model: Model, site: Site, lowering: QDQSite) -> tuple[TensorRef, ...]:
    """Add the ops of one site and reroute its uses; return the dequantized tensor of each graph.

    A tensor that is quantized in one graph is dequantized in each subgraph that reads it, and a weight is quantized
    there. A backend runs an op on integers only if the DequantizeLinear, with its constants, is in the op's own graph,
    and if the quantized tensor has no float consumers. onnxruntime rejects a product with float values whose integer
    weight is in another graph.
    """
    lower = site.family.add_ops
    home = model.graphs[site.graph]
    readers: dict[str, list[Use]] = {}
    for use in site.uses:
        readers.setdefault(use.graph, []).append(use)
    dequantized = None
    outputs = []
    for name, uses in readers.items():
        graph = model.graphs[name]
        if name != site.graph and site.parameter:
            output = lower(graph, replace(lowering, name=graph.unique_name(lowering.name)))
        else:
            dequantized = dequantized or lower(home, lowering)
            output = dequantized if name == site.graph else _copy_dequantize(home, dequantized, graph)
        model.graphs[site.tensor.graph].reroute(site.tensor, uses, output)
        outputs.append(output)
    if dequantized is not None and site.graph not in readers:
        home.remove_op(dequantized.op)
    return tuple(outputs)


def _copy_dequantize(home: Graph, dequantized: TensorRef, graph: Graph) -> TensorRef:
    """Copy the op that produces `dequantized` from `home` to `graph`, with the constants that it reads."""

    def copy_op(name: str, sources: Sequence[TensorRef | None]) -> TensorRef:
        op, label = home.op(name), graph.unique_name(name)
        return graph.add_op(replace(op, name=label, outputs=(replace(op.outputs[0], name=label),)), sources)

    sources = [
        copy_op(tensor.op, ()) if tensor is not None and home.op(tensor.op).kind == "constant" else tensor
        for tensor in home.slots(dequantized.op)
    ]
    return copy_op(dequantized.op, sources)


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
    """Return the ops that the site's family makes. The weight is read here, once, and only if it is needed."""
    shape: Shape | None = model.output(site.tensor).shape
    folding = site.parameter and not float_weights and site.family.stores_integer_weights
    stored = _find_stored_constant(model, parameters, site.tensor) if folding else None
    needs_shape = site.axis is not None and fully_known_shape(shape) is None
    value = None
    if stored is not None:
        shape = stored[1]
    elif site.parameter and (folding or float_weights or needs_shape):
        value = parameters.value(site.tensor)
        shape = shape if value is None else value.shape
    viewed_shape = site.view or shape
    static_params = params if isinstance(params, QParams) else None
    if static_params is not None and not _scales_cover(static_params, viewed_shape):
        cells = "channels" if static_params.block is None else f"blocks of {static_params.block}"
        raise UsageError(
            f"The plan gives {site.tensor} {static_params.scale.size} {cells} on axis {static_params.axis}, but its"
            f" shape is {viewed_shape}. Correct the site, or create the plan again."
        )
    folded = partial(_reread_weight, parameters, site.tensor) if folding and (stored or value is not None) else None
    if folded is None and site.family.stores_integer_weights and params.type.bits > MAX_RUN_TIME_BITS:
        raise UsageError(
            f"No op quantizes to {params.type.name} at run time, as {site.tensor} would need. Remove its site from the"
            " plan."
        )
    fits = (
        value is not None
        and folded is None
        and static_params is not None
        and not _exceeds_type(value, static_params, site.view)
    )
    reuse_integers = None
    if integer_cache is not None and stored is not None:
        reuse_integers = partial(integer_cache.get_or_compute, stored[0], params)
    return QDQSite(
        tensor=site.tensor,
        name=name,
        params=params,
        rule=site.rule,
        read_value=folded,
        read_rows=getattr(stored[0], "read_rows", None) if stored is not None and site.view is None else None,
        reuse_integers=reuse_integers,
        is_parameter=site.parameter,
        needs_clip=not fits,
        shape=shape,
        merged_shape=site.view,
        rounding_mode=site.scheme.round,
        args=site.scheme.args,
        opset=model.opset,
    )


def _find_stored_constant(
    model: Model, parameters: Parameters, tensor: TensorRef
) -> tuple[Callable[[], Array], Shape] | None:
    """Return the reader of the constant behind a weight, and its shape; None if the weight is computed."""
    op = model.op(parameters.root_tensor(tensor))
    shape = fully_known_shape(op.outputs[0].shape)
    is_reliable = op.kind == "constant" and (op.source is None or op.type == "Initializer")  # else a file may differ
    return (op.read_value, shape) if is_reliable and op.read_value is not None and shape is not None else None


def _reread_weight(parameters: Parameters, tensor: TensorRef) -> Array:
    """Read a weight again that was found before."""
    if (value := parameters.value(tensor)) is None:
        raise InternalError(f"the weight {tensor} is missing.")
    return value


def _scales_cover(params: QParams, shape: Shape | None) -> bool:
    """Return True if there is a scale for each channel or block of `shape`, or if nothing contradicts that."""
    axis, sizes = params.axis, fully_known_shape(shape)
    if axis is None or shape is None:
        return True
    if params.block is None:
        return shape[axis : axis + 1] == params.scale.shape
    return sizes is not None and block_scale_shape(sizes, axis, params.block) == params.scale.shape


def _exceeds_type(value: Array, params: QParams, view: tuple[int, ...] | None) -> bool:
    """Return True if a value exceeds the range of the type."""
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


# ONNX Runtime from 1.22 on quantizes the float weight, per tensor, of a Conv, ConvTranspose or Gemm between a
# DequantizeLinear and a QuantizeLinear, also if the plan keeps it in float. It moves pairs past ops that move values,
# and joins a MatMul and an Add to a Gemm. It neither removes a Clip nor moves pairs past it, even one without limits.

JOINED_KINDS = {"Conv": {"add", "mul", "batchnorm"}, "ConvTranspose": set[str](), "Gemm": {"add"}, "MatMul": {"add"}}
"""Op types whose weight may be quantized, with the kinds that are joined with them if they read a constant."""

MOVED_KINDS = DATA_MOVEMENT_KINDS | TRANSPARENT_KINDS
ACTIVATION_KINDS = frozenset({"relu", "relu6", "clip"})


def needs_barriers(plan: Plan) -> bool:
    """Return True if models of a plan run in ONNX Runtime, which needs barriers."""
    return plan.format == "onnx" and plan.for_onnxruntime


def add_barriers(model: Model) -> None:
    """Add ops that change no value wherever ONNX Runtime would quantize a float weight, or move another op."""
    _add_weight_barriers(model)
    _add_pool_barriers(model)
    _add_layout_barriers(model)


def _add_weight_barriers(model: Model) -> None:
    """Add a Clip without limits before each float op whose weight ONNX Runtime would quantize."""
    parameters = Parameters(model)

    def source(tensor: TensorRef) -> TensorRef | None:
        return model.graphs[tensor.graph].source_of(Use(tensor.graph, tensor.op, 0))

    for graph in model.graphs.values():
        barriers: dict[TensorRef, TensorRef] = {}
        for op in [op for op in graph.ops() if op.type in JOINED_KINDS and not op.domain]:
            data, weight = [*graph.slots(op.name), None, None][:2]
            if data is None or weight is None or not parameters.is_parameter(weight):
                continue
            origin = follow_to_end(
                data, lambda ref: source(ref) if model.op(ref).kind in MOVED_KINDS | {"pad"} else None
            )
            is_float = all(model.op(tensor).kind not in QUANTIZATION_KINDS for tensor in follow(weight, source))
            quantize_op = _find_quantize_op(graph, op.name, parameters) if is_float else None
            rule = model.op(origin).rule or (quantize_op.rule if quantize_op is not None else "")
            if model.op(origin).kind != "dequantize" or quantize_op is None or not rule:
                continue  # the source model has both quantizations
            if data not in barriers:
                barriers[data] = _add_barrier(graph, op, data, rule, model.op(origin).anchor or str(data))
            model.graphs[data.graph].reroute(data, [Use(graph.name, op.name, 0)], barriers[data])


def _add_pool_barriers(model: Model) -> None:
    """Add a Clip without limits between a float MaxPool and a QuantizeLinear, also behind ops that move values.

    ONNX Runtime moves the QuantizeLinear before the MaxPool. Its int8 MaxPool takes ten times as long as the float one
    unless it is between int8 convolutions.
    """
    for graph in model.graphs.values():
        for op in [op for op in graph.ops() if op.kind == "max_pool"]:
            data = graph.source_of(Use(graph.name, op.name, 0))
            uses = graph.consumers_by_port(op.name).get(0, [])
            readers = [model.graphs[use.graph].op(use.op) for use in uses]
            while len(readers) == 1 and readers[0].kind in MOVED_KINDS:
                moved_uses = graph.consumers_by_port(readers[0].name).get(0, [])
                readers = [model.graphs[use.graph].op(use.op) for use in moved_uses]
            if data is None or model.op(data).kind in QUANTIZATION_KINDS or not readers:
                continue
            if all(reader.kind == "quantize" and reader.rule for reader in readers):
                tensor = TensorRef(graph.name, op.name)
                graph.reroute(tensor, uses, _add_barrier(graph, op, tensor, readers[0].rule, str(tensor)))


def _add_layout_barriers(model: Model) -> None:
    """Add a Reshape to the same shape between a pair and the ops that subtract a mean over positions from its values.

    ONNX Runtime's int8 convolutions have the channels last. It moves the Transpose behind them past such ops, which
    take up to four times as long in this layout.
    """
    for graph in model.graphs.values():
        for op in [op for op in graph.ops() if op.kind in {"reduce_mean", "global_avg_pool"}]:
            data, shape = graph.source_of(Use(graph.name, op.name, 0)), op.outputs[0].shape or ()
            if data is None or model.op(data).kind != "dequantize" or not model.op(data).rule:
                continue
            rank = len(graph.output(data).shape or ())  # that of the mean is smaller without axes of size 1
            readers = {use.op for use in graph.consumers(TensorRef(graph.name, op.name))}
            subtractions = {name for name in readers if graph.op(name).kind == "sub" and data in graph.slots(name)}
            if subtractions and rank == len(shape) > 1 and shape[1] not in {None, 1} and {*shape[2:]} <= {1}:
                uses = [use for use in graph.consumers(data) if use.op in {op.name, *subtractions}]
                rule, name, zeros = model.op(data).rule, f"{op.name}/barrier/shape", np.zeros(len(shape), np.int64)
                sizes = add_constant(graph, name, zeros, op_type="Constant", rule=rule)
                graph.reroute(data, uses, _add_barrier(graph, op, data, rule, model.op(data).anchor, sizes))


def _add_barrier(graph: Graph, op: Op, tensor: TensorRef, rule: str, anchor: str, *sizes: TensorRef) -> TensorRef:
    """Add an op named after `op` that copies `tensor`: a Clip without limits, or a Reshape to `sizes`."""
    output, kind = graph.output(tensor), "Reshape" if sizes else "Clip"
    fields = {"kind": kind.lower(), "type": kind, "rule": rule, "anchor": anchor}
    return graph.add_op(new_op(graph, f"{op.name}/barrier", output.dtype, output.shape, **fields), [tensor, *sizes])


def _find_quantize_op(graph: Graph, name: str, parameters: Parameters) -> Op | None:
    """Return the QuantizeLinear that ONNX Runtime finds after a float op; otherwise None."""
    op_type = graph.op(name).type
    is_gemm, joined_kinds = op_type != "MatMul", JOINED_KINDS[op_type]
    for _ in range(len(graph)):
        uses = [use for uses in graph.consumers_by_port(name).values() for use in uses]
        readers = [graph.graphs[use.graph].op(use.op) for use in uses]
        if readers and all(reader.kind == "quantize" for reader in readers):
            return readers[0] if is_gemm else None
        if len(readers) != 1 or uses[0].graph != graph.name:
            break
        reader = readers[0]
        others = [tensor for tensor in graph.slots(reader.name) if tensor is not None and tensor.op != name]
        if reader.kind in joined_kinds and all(map(parameters.is_parameter, others)):
            is_gemm = True
        elif reader.kind in MOVED_KINDS | ACTIVATION_KINDS:
            joined_kinds = set()
        else:
            break
        name = reader.name
    return None


class _InsertedOpNames:
    """Names of new ops: `<op>/quant`, plus `_<port>` if it is not 0, plus `/<rule>` if a tensor has several sites.

    A name that is in use gets the smallest free suffix `_k`, in the order of the plan.
    """

    def __init__(self, plan: Plan, params: Mapping[int, QParams | DynamicQParams]) -> None:
        quantized_sites = (site for index, site in enumerate(plan.sites) if index in params)
        self._count = Counter((site.tensor, site.graph) for site in quantized_sites)
        self._next: dict[tuple[int, str], int] = {}

    def make_name(self, graph: Graph, site: Site) -> str:
        """Return a new name for the ops of `site` in `graph`. Graphs in one name space share their reserved names."""
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
