"""Transfer scales of a TFLite file to the model that it was made from, or to a similar one.

Weights are excluded unless they are mapped by name: the model's own values give better ranges than another file.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import (
    FORWARDING_KINDS,
    RESHAPING_KINDS,
    WEIGHTED_KINDS,
    Call,
    Graph,
    Model,
    Output,
    Parameters,
    Shape,
    StoredQuantization,
    TensorRef,
    Use,
    connected_groups,
    follow,
    follow_to_end,
    fully_known_shape,
)
from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE, IntType

if TYPE_CHECKING:
    from graphquant.quantize.plan import Plan, Site

# Match names in a TFLite file to tensors of a model.
#
# The converter names a tensor after all ops that it fused into one, in no fixed order, and after some that only shared
# a constant: `relu;batch_norm;other/conv;conv` names the output of the last of the connected ops. An op that occurs in
# the names of several tensors belongs to none of them. Constants have such names too and never match: a kernel named
# `conv` is not the output of the op `conv`.

CONVERTER_PREFIXES = re.compile(r"^((Stateful)?PartitionedCall(_\d+)?/|serving_default_)+")
"""Prefixes that the converter adds to names inside a SavedModel's functions and to its inputs."""

INLINED_PREFIX = re.compile(r"^.*/(?:body|cond|then|else)/_\d+/")
"""The prefix that freezing puts before the names of ops in loops and branches."""

PREFIX_NUMBERS = re.compile(r"(?:^|(?<=/))_(?:functionalize_\w+_)?\d+/")
"""Parts of prefixes that are numbered anew whenever a model is frozen or converted."""

INSERTED_SUFFIXES = re.compile(r"/(?:quant|bias_add|bias_folded)\d*$")
"""Suffixes of ops that graphquant inserts: a Q/DQ pair, or the bias of a folded BatchNorm."""

MAX_PASSTHROUGH_OPS = 64  # pass-through ops that a tensor is followed through


def match_tensor_names(model: Model, activations: Mapping[str, Output], names: Collection[str]) -> dict[TensorRef, str]:
    """Return the tensors of `model` that a TFLite file knows, with their names there.

    Tensors with conflicting names are omitted. `activations` are the file's tensors to match, `names` all of its names.
    """
    refs_by_spelling: dict[str, list[TensorRef]] = {}
    refs_by_path: dict[str, list[TensorRef]] = {}
    ranks: dict[TensorRef, int] = {}
    prefixes = _frozen_prefixes(model)
    for name in model.reachable_graphs():
        graph = model.graphs[name]
        for op_rank, op in enumerate(graph.topological_order(with_loops=True)):
            for port, output in enumerate(graph.op(op).outputs):
                ref = TensorRef(name, op, port)
                ranks[ref] = op_rank
                spellings = (f"{op}:{port}", output.name, f"{name}/{output.name}", *([] if port else [op]))
                for spelling in dict.fromkeys(spellings):
                    refs_by_spelling.setdefault(spelling, []).append(ref)
                if name in prefixes and not port:
                    refs_by_path.setdefault(PREFIX_NUMBERS.sub("", prefixes[name] + op), []).append(ref)
    refs_by_spelling.update(refs_by_path)  # an op in a branch or function may have the name of one outside
    parameters = Parameters(model)
    claims: dict[TensorRef, list[str]] = {}
    direct_claims: dict[TensorRef, list[str]] = {}  # of tensors that are passed on from another one
    known_names = {*names, *refs_by_spelling}  # a file may lack the tensor whose name another one has with a number
    plain_names = {
        name: name if name in refs_by_spelling else _strip_name_counter(name, known_names) for name in activations
    }
    part_counts = Counter(name_part for name in set(plain_names.values()) for name_part in set(name.split(";")))
    for name, plain_name in plain_names.items():
        unique_parts = {name_part: part_counts[name_part] == 1 for name_part in plain_name.split(";")}
        for candidate in refs_by_spelling.get(plain_name) or _find_fused_tensors(
            model, parameters, refs_by_spelling, ranks, unique_parts
        ):
            last_tensor = _last_folded_tensor(model, parameters, candidate, part_counts)
            ref = _innermost_producer(model, last_tensor)
            if may_have_same_size(model.output(ref).shape, activations[name].shape):
                claims.setdefault(ref, []).append(name)
                direct_claims.setdefault(last_tensor, []).append(name)
    return {
        ref: claimants[0]
        for ref, claimants in (*claims.items(), *direct_claims.items())
        if all(
            activations[name].dtype == activations[claimants[0]].dtype
            and all(
                np.array_equal(*(getattr(stored_quantization(activations[each]), key) for each in (name, claimants[0])))
                for key in ("scale", "zero_point", "low")
            )
            for name in claimants[1:]
        )
    }


def _frozen_prefixes(model: Model) -> dict[str, str]:
    """Return the prefix that freezing puts before the names of ops in each graph, without numbers, if it is known."""
    names = model.reachable_graphs()  # callers first
    callers = model.callers(frozenset(names))
    prefixes = dict.fromkeys(model.entry_graphs, "")
    for name in names:
        for use, call in callers[name] if len(callers.get(name, ())) == 1 else ():
            part = "" if call.attr in {"", "f"} else f"{call.attr.removesuffix('_branch')}/"
            prefixes[name] = CONVERTER_PREFIXES.sub("", f"{prefixes.get(use.graph, '')}{use.op}/{part}")
    return prefixes


def _last_folded_tensor(
    model: Model, parameters: Parameters, tensor: TensorRef, file_names: Collection[str]
) -> TensorRef:
    """Return the output of the BatchNorms behind a tensor, which the converter folded into its layer.

    A model with variables still has them. A BatchNorm that is not folded has a name in the file.
    """

    def next_tensor(current: TensorRef) -> TensorRef | None:
        graph = model.graphs[current.graph]
        uses = graph.consumers(current)
        if len(uses) != 1 or uses[0].graph != graph.name or uses[0].op in file_names:
            return None
        return TensorRef(graph.name, uses[0].op) if _is_batchnorm_part(parameters, graph, uses[0].op) else None

    if model.op(tensor).kind not in WEIGHTED_KINDS | {"bias_add", "add"}:
        return tensor
    return follow_to_end(tensor, next_tensor, MAX_PASSTHROUGH_OPS)


def _is_batchnorm_part(parameters: Parameters, graph: Graph, name: str) -> bool:
    """Return True for a BatchNorm, and for a product or sum with a parameter, into which Keras 3 divides it."""
    op = graph.op(name)
    if op.kind == "batchnorm":
        return True
    return op.kind in {"mul", "add"} and any(
        slot is not None and parameters.is_parameter(slot) for slot in graph.slots(name)
    )


def _strip_name_counter(name: str, names: Collection[str]) -> str:
    """Return `name` without the number that the converter appends to a duplicate name."""
    digits = len(name) - len(name.rstrip("0123456789"))
    return next((name[:-cut] for cut in range(1, digits + 1) if name[:-cut] in names), name)


def may_have_same_size(*shapes: Shape | None, first_axis: int = 1) -> bool:
    """Return True if tensors may have the same number of elements per sample. Data formats may differ."""
    sizes = [fully_known_shape(shape[first_axis:]) for shape in shapes if shape is not None]
    return len({math.prod(known) for known in sizes if known is not None}) <= 1


def _find_fused_tensors(
    model: Model,
    parameters: Parameters,
    refs_by_spelling: Mapping[str, list[TensorRef]],
    ranks: Mapping[TensorRef, int],
    unique_parts: Mapping[str, bool],
) -> list[TensorRef]:
    """Return for each graph the tensor that the ops of a fused name produce; `unique_parts` occur in no other name."""
    refs_by_graph: dict[str, tuple[list[TensorRef], list[TensorRef]]] = {}
    for name_part, is_unique in unique_parts.items():
        plain_name = CONVERTER_PREFIXES.sub("", name_part)
        base_name = INSERTED_SUFFIXES.sub("", plain_name)  # if graphquant inserted the op
        path = CONVERTER_PREFIXES.sub("", PREFIX_NUMBERS.sub("", base_name))
        spellings = (plain_name, base_name, path, INLINED_PREFIX.sub("", base_name))
        for ref in next((refs_by_spelling[spelling] for spelling in spellings if spelling in refs_by_spelling), ()):
            refs_by_graph.setdefault(ref.graph, ([], []))[not is_unique].append(ref)
    candidates = (
        _last_of_largest_group(
            model.graphs[graph], parameters, unique_refs or shared, shared if unique_refs else [], ranks
        )
        for graph, (unique_refs, shared) in refs_by_graph.items()
    )
    return [ref for ref in candidates if ref is not None]


def _last_of_largest_group(
    graph: Graph, parameters: Parameters, refs: list[TensorRef], shared: list[TensorRef], ranks: Mapping[TensorRef, int]
) -> TensorRef | None:
    """Return the last tensor of the largest connected group among `refs`.

    Return None if two groups are equally large, or if one of `shared`, refs of other names too, may follow the group.
    """
    ops = dict.fromkeys(ref.op for ref in refs)
    edges = [(name, source) for name in ops for source in _iterate_sources(graph, parameters, name) if source in ops]
    largest, *others = sorted((set(group) for group in connected_groups(ops, edges)), key=len, reverse=True)
    if others and len(others[0]) == len(largest):
        return None
    for name in (ref.op for ref in shared):
        # A weighted op begins a layer of its own, so it cannot be fused behind the group.
        if graph.op(name).kind not in WEIGHTED_KINDS and not largest.isdisjoint(
            _iterate_sources(graph, parameters, name)
        ):
            return None
    return max((ref for ref in refs if ref.op in largest), key=ranks.__getitem__)


def _iterate_sources(graph: Graph, parameters: Parameters, name: str) -> Iterator[str]:
    """Yield the ops that an op reads, looking through those that the file cannot know.

    These are ops that graphquant inserted, and BatchNorms that the converter folded.
    """

    def source_of_inserted_op(op: str) -> str | None:
        if not graph.slots(op) or not (graph.op(op).rule or _is_batchnorm_part(parameters, graph, op)):
            return None
        sources = [slot for slot in graph.slots(op) if slot is not None and not parameters.is_parameter(slot)]
        return sources[0].op if len(sources) == 1 and sources[0].graph == graph.name else None

    for source in graph.predecessors(name):
        yield from follow(source, source_of_inserted_op, MAX_PASSTHROUGH_OPS)


def stored_quantization(output: Output) -> StoredQuantization:
    """Return the quantization that the file has for a tensor, empty if it has none."""
    return output.quantization or StoredQuantization(index=0, sizes=())


def _innermost_producer(model: Model, ref: TensorRef) -> TensorRef:
    """Return the op that computes the tensor, inside a called function and before pass-through ops."""

    def inner_source(current: TensorRef) -> TensorRef | None:
        op = model.op(current)
        if op.kind == "call" and op.calls and current.port < len(model.graphs[op.calls[0].graph].outputs):
            body = model.graphs[op.calls[0].graph]
            return body.source_of(Use(body.name, body.outputs[current.port], 0))
        return _source_of_kinds(model, current)

    return follow_to_end(ref, inner_source, MAX_PASSTHROUGH_OPS)


def _source_of_kinds(
    model: Model, tensor: TensorRef, kinds: Collection[str] = FORWARDING_KINDS | {"qdq"}
) -> TensorRef | None:
    """Return the tensor that an op of some kinds reads, by default a forwarding op or a Q/DQ pair; otherwise None."""
    if model.op(tensor).kind not in kinds:
        return None
    return model.graphs[tensor.graph].source_of(Use(tensor.graph, tensor.op, 0))


def iterate_equivalent_tensors(
    model: Model, callers: Mapping[str, list[tuple[Use, Call]]], tensor: TensorRef
) -> Iterator[TensorRef]:
    """Yield the tensor, and the tensors that are forwarded to it, through Q/DQ pairs and out of its function."""

    def outer_source(current: TensorRef) -> TensorRef | None:
        if model.op(current).kind != "input" or len(callers.get(current.graph, ())) != 1:
            return _source_of_kinds(model, current)
        use, call = callers[current.graph][0]
        if call.offset is None or call.loop:
            return None
        slot = model.graphs[current.graph].inputs.index(current.op) + call.offset
        return model.graphs[use.graph].source_of(Use(use.graph, use.op, slot))

    yield from follow(tensor, outer_source, MAX_PASSTHROUGH_OPS - 1)


MAX_NAME_MAP_BYTES = 1 << 24  # largest file of mapped names, in bytes


class TransferredRange(NamedTuple):
    """A planned tensor that takes its scale from the TFLite tensor `name`, or if not `exact`, that scale's range."""

    tensor: TensorRef
    name: str
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTransfer:
    """Result of a transfer from a TFLite file."""

    path: Path | None  # the file, None if the model has none
    transferred: tuple[TransferredRange, ...]  # the planned tensors that got their scale or range from it
    unused: tuple[str, ...]  # names of quantized activations in the file that no planned tensor has
    missing: tuple[TensorRef, ...]  # planned activations that the file has no scale for


def read_name_map(path: Path) -> dict[str, str]:
    """Read a TOML file of names: a tensor of the model on the left, one of the TFLite file on the right."""
    hint = 'Write lines like "block1/Relu:0" = "model/block1/Relu".'
    try:
        if path.stat().st_size > MAX_NAME_MAP_BYTES:
            raise UsageError(f"{path} is over {MAX_NAME_MAP_BYTES >> 20} MB, too large for a file of names. {hint}")
        name_map = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give a TOML file of names.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML ({str(error)[:200]}). {hint}") from error
    invalid_name = next((name for name, value in name_map.items() if not isinstance(value, str)), None)
    if invalid_name is not None:
        raise UsageError(f"{path}: the value of {invalid_name!r} is not a name. {hint}")
    return name_map


def transfer_ranges(
    model: Model, plan: Plan, source: Model, name_map: Mapping[str, str], *, weights: bool = False
) -> tuple[Plan, RangeTransfer]:
    """Return `plan` with the scales of a TFLite file for tensors of the same name, and a report.

    Scales and ranges in the plan itself are kept. A scale is taken as it is if the site's scheme has the same type and
    allows the zero point. Otherwise the range that it represents is taken. `name_map` has the names of planned tensors,
    each with the name of the tensor in the file that provides its scale. With `weights`, weights of the same name and
    channel axis take their scales too, because they have the values that the scales were learned for.
    """
    entries = _quantized_entries(source)
    mapped = _map_names(plan, entries, name_map)
    activations = {name: output for name, (output, is_constant) in entries.items() if not is_constant}
    all_names = {output.name for graph in source.graphs.values() for op in graph.ops() for output in op.outputs}
    file_names = match_tensor_names(model, activations, all_names)
    callers = model.callers()
    sites, transferred, missing, used_names = [], [], [], set()
    for site in plan.sites:
        name = mapped.get(site.tensor)
        if name is None and not site.parameter and site.clone_of is None:
            unmoved = follow(
                site.tensor, lambda ref: _source_of_kinds(model, ref, RESHAPING_KINDS), MAX_PASSTHROUGH_OPS - 1
            )
            equivalent = (ref for tensor in unmoved for ref in iterate_equivalent_tensors(model, callers, tensor))
            name = next((file_names[ref] for ref in equivalent if ref in file_names), None)
        if name is None and site.parameter and weights and site.view is None:
            name = _matching_constant(model, site, entries)
        updated = None if name is None else _with_file_scale(site, entries[name][0])
        sites.append(updated or site)
        if name is not None and updated is not None:
            used_names.add(name)
            transferred.append(TransferredRange(tensor=site.tensor, name=name, exact=updated.scale is not None))
        elif not (site.parameter or site.tie or site.clone_of or site.has_given_range):
            missing.append(site.tensor)
    if not transferred:
        planned_names = list(dict.fromkeys(str(site.tensor) for site in plan.sites if not site.parameter))
        file_names_text = ", ".join(map(repr, list(activations)[:3])) or "none quantized"
        suggestion = did_you_mean(planned_names[0].rpartition(":")[0], list(activations)) if planned_names else ""
        raise UsageError(
            f"{source.path or 'The TFLite model'} has none of the tensors that the plan quantizes. It has"
            f" {file_names_text}; the plan has {', '.join(planned_names[:3]) or 'none'}.{suggestion}"
            " Map the names in a file for --ranges-map."
        )
    scaled_names = (name for name, output in activations.items() if stored_quantization(output).scale.size)
    report = RangeTransfer(
        path=source.path,
        transferred=tuple(transferred),
        unused=tuple(name for name in scaled_names if name not in used_names),
        missing=tuple(dict.fromkeys(missing)),
    )
    return replace(plan, sites=tuple(sites)), report


def _matching_constant(model: Model, site: Site, entries: Mapping[str, tuple[Output, bool]]) -> str | None:
    """Return the name of the constant of a weight in the file, if the file's scales have the axis of the site."""
    for name in (model.output(site.tensor).name, site.tensor.op):
        output, is_constant = entries.get(name, (None, False))
        if output is not None and is_constant:
            stored = stored_quantization(output)
            return name if stored.scale.size == 1 or stored.axis == site.axis else None
    return None


def _quantized_entries(source: Model) -> dict[str, tuple[Output, bool]]:
    """Return the tensors of a TFLite model that have a scale or range, by name, each with True if it is a constant."""
    entries: dict[str, tuple[Output, bool]] = {}
    for graph in source.graphs.values():
        for op in graph.ops():
            for output in op.outputs:
                if output.name and (stored_quantization(output).scale.size or stored_quantization(output).low.size):
                    entries.setdefault(output.name, (output, op.kind in {"constant", "variable"}))
    return entries


def _map_names(plan: Plan, entries: Mapping[str, object], name_map: Mapping[str, str]) -> dict[TensorRef, str]:
    refs_by_name: dict[str, list[TensorRef]] = {}
    for site in plan.sites:
        for name in {str(site.tensor): 0, site.tensor.op: 0} if not site.tensor.port else (str(site.tensor),):
            refs_by_name.setdefault(name, []).append(site.tensor)
    mapped: dict[TensorRef, str] = {}
    for model_name, file_name in name_map.items():
        if model_name not in refs_by_name:
            raise UsageError(f"The plan quantizes no tensor {model_name!r}.{did_you_mean(model_name, refs_by_name)}")
        if file_name not in entries:
            raise UsageError(f"The file of ranges has no scale for {file_name!r}.{did_you_mean(file_name, entries)}")
        mapped.update(dict.fromkeys(refs_by_name[model_name], file_name))
    return mapped


def _with_file_scale(site: Site, output: Output) -> Site | None:
    """Return the site with the file's scale, or with the range that it represents; None if there is none."""
    quantization, dtype = stored_quantization(output), output.dtype or ""
    scale, zero_points = quantization.scale.astype(float).tolist(), quantization.zero_point.tolist()
    if site.has_given_range or quantization.details or len(zero_points) != len(scale):
        return None
    if not scale:  # the file may have a range without a scale
        low, high = quantization.low.astype(float).tolist(), quantization.high.astype(float).tolist()
        is_range = len(low) == len(high) == 1 and -math.inf < low[0] <= high[0] < math.inf
        return replace(site, range=(low[0], high[0])) if is_range and not site.parameter else None
    if not all(SMALLEST_SCALE <= value <= LARGEST_VALUE / 2**32 for value in scale):  # integers of any type are finite
        return None
    if _scheme_allows(site, dtype, scale, zero_points):
        return replace(site, scale=tuple(scale), zero_point=tuple(zero_points))
    if len(scale) != 1 or dtype not in {"int8", "uint8", "int16"}:
        return None
    qmin, qmax = IntType.parse(dtype).limits()
    return replace(site, range=((qmin - zero_points[0]) * scale[0], (qmax - zero_points[0]) * scale[0]))


def _scheme_allows(site: Site, dtype: str, scale: list[float], zero_points: list[int]) -> bool:
    """Return True if the site's scheme allows exactly this scale and zero point."""
    scheme = site.scheme
    low, high = scheme.type.limits(narrow=scheme.narrow)
    return (
        dtype == scheme.type.name
        and all(low <= value <= high for value in zero_points)
        and (scheme.zero != "symmetric" or all(value == scheme.type.symmetric_zero_point for value in zero_points))
        and (scheme.scale != "power-of-two" or all(math.frexp(value)[0] == 0.5 for value in scale))  # noqa: PLR2004
        and (len(scale) == 1) == (site.axis is None)
    )
