"""Calibration targets, and their fingerprints.

The targets are the tensors of a plan whose range depends on data, or all float tensors of a model. The fingerprint of
a tensor is a content hash of its fan-in: op types, attributes, constants and inputs. Two tensors with the same
fingerprint hold the same values, whatever the rest of their models does. ONNX ops that pass their input through
unchanged are skipped, because preparation removes them. Statistics are stored by fingerprint. They therefore serve
every rule file whose preparation keeps the fan-in of the tensor, and no other model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphquant.errors import ModelError, UsageError, did_you_mean
from graphquant.ir import FLOAT_TYPES, LOOP_KINDS, Graph, Model, Op, Parameters, TensorRef, paused_gc
from graphquant.ir.types import dependency_components
from graphquant.observers import OBSERVERS, histogram_bits
from graphquant.quantize import look_through_dropped_ops
from graphquant.rules import ObserverConfig

if TYPE_CHECKING:
    from graphquant.quantize import Plan, Site


_FingerprintNode = tuple[str, str, str]
"""("op", graph, name), or ("entry", graph, "") for the conditions and inputs with which a graph is called."""

FINGERPRINT_LENGTH = 16  # length of a fingerprint in bytes, each of which is two hexadecimal characters


@paused_gc()
def fingerprints(
    model: Model, tensors: Iterable[TensorRef], overrides: Mapping[TensorRef, str] | None = None
) -> dict[TensorRef, str]:
    """Return the fingerprint of each of `tensors`, which must belong to live graphs.

    Tensors in `overrides` get the fingerprint given there.
    """
    requested, known_fingerprints = list(tensors), overrides or {}
    if not requested:
        return {}
    hasher = _FingerprintHasher(model, known_fingerprints)
    return {tensor: known_fingerprints.get(tensor) or hasher.hash_tensor(tensor).hex() for tensor in requested}


@paused_gc()
def preserved_fingerprints(source: Model, prepared: Model) -> dict[TensorRef, str]:
    """Map tensors of `prepared` to the fingerprint of the equal tensor of `source` that another op computes.

    These are the tensors that the readers of a folded BatchNorm read now and, after an opset upgrade, the tensors that
    kept op type and name. Both are equal to their originals except for rounding.
    """
    originals: dict[TensorRef, TensorRef] = {}
    for name in source.reachable_graphs():
        if name in prepared.graphs:
            if source.opset != prepared.opset:
                originals.update(_upgraded_tensors(source.graphs[name], prepared.graphs[name]))
            originals.update(_folded_batchnorm_tensors(source.graphs[name], prepared))
    source_fingerprints = fingerprints(source, dict.fromkeys(originals.values()))
    return {tensor: source_fingerprints[original] for tensor, original in originals.items()}


def _folded_batchnorm_tensors(source: Graph, prepared: Model) -> dict[TensorRef, TensorRef]:
    originals = {}
    graph = prepared.graphs[source.name]
    for op in source.ops():
        if op.kind not in {"batchnorm", "add"} or (op.name in graph and graph.op(op.name).kind == op.kind):
            continue
        tensor = TensorRef(source.name, op.name)
        for use in source.consumers(tensor):
            reader_graph = prepared.graphs.get(use.graph)
            replacement = reader_graph.source_of(use) if reader_graph is not None and use.op in reader_graph else None
            if replacement is not None:
                originals[replacement] = tensor
    return originals


def _upgraded_tensors(source: Graph, upgraded: Graph) -> dict[TensorRef, TensorRef]:
    originals = {}
    for op in upgraded.ops():
        source_op = source.op(op.name) if op.name in source else None
        if source_op is None or source_op.type != op.type or op.kind in {"input", "constant", "output"}:
            continue
        input_tensors = (tensor for tensor in upgraded.slots(op.name) if tensor is not None)
        if any(upgraded.graphs[tensor.graph].op(tensor.op).rule for tensor in input_tensors):
            continue  # preparation replaced its weights
        for port, (old_output, new_output) in enumerate(zip(source_op.outputs, op.outputs, strict=False)):
            if old_output.name and old_output.name == new_output.name:
                originals[TensorRef(source.name, op.name, port)] = TensorRef(source.name, op.name, port)
    return originals


class _FingerprintHasher:
    """Hashes of all ops of the live graphs of a model."""

    def __init__(self, model: Model, overrides: Mapping[TensorRef, str]) -> None:
        self._model = model
        self._overrides = overrides
        self._parameters = Parameters(model)
        self._live = set(model.reachable_graphs())
        self._callers = model.callers(self._live)
        self._digests: dict[_FingerprintNode, bytes] = {}
        dependencies: dict[_FingerprintNode, list[_FingerprintNode]] = {}
        for name in model.reachable_graphs():
            nodes: list[_FingerprintNode] = [("op", name, op.name) for op in model.graphs[name].ops()]
            for node in [*nodes, ("entry", name, "")] if name else nodes:
                dependencies[node] = self._dependencies(node)
        for component in dependency_components(dependencies):
            self._hash_component(sorted(component), dependencies)

    def hash_tensor(self, tensor: TensorRef | None) -> bytes:
        """Return the hash of a tensor, whose fingerprint is its hexadecimal form; none for a missing input."""
        if tensor is None:
            return b""
        upstream = look_through_dropped_ops(self._model, tensor, self._parameters)
        for candidate in (tensor, upstream):
            if candidate in self._overrides:
                return bytes.fromhex(self._overrides[candidate])
        return _hash_chunks(self._digests["op", upstream.graph, upstream.op], str(upstream.port).encode())

    def _hash_component(
        self, nodes: Sequence[_FingerprintNode], dependencies: Mapping[_FingerprintNode, list[_FingerprintNode]]
    ) -> None:
        """Hash a strongly connected component: one node, or the nodes of a cycle through a loop.

        The components that it depends on must be hashed already.
        """
        if len(nodes) == 1 and nodes[0] not in dependencies[nodes[0]]:
            self._digests[nodes[0]] = self._hash_node(nodes[0])
            return
        # Within a cycle, nodes are identified by their names.
        self._digests |= {node: _hash_chunks(*map(str.encode, node)) for node in nodes}
        component_digest = _hash_chunks(*map(self._hash_node, nodes))
        self._digests |= {node: _hash_chunks(component_digest, *map(str.encode, node)) for node in nodes}

    def _dependencies(self, node: _FingerprintNode) -> list[_FingerprintNode]:
        """Return the nodes whose hashes enter the hash of `node`."""
        kind, name, label = node
        graph = self._model.graphs[name]
        if kind == "entry":
            return self._entry_dependencies(name)
        return [*self._computed_inputs(graph, label), *self._context_dependencies(graph, graph.op(label))]

    def _computed_inputs(self, graph: Graph, label: str) -> list[_FingerprintNode]:
        """Return the ops that compute the inputs of an op."""
        return [
            ("op", tensor.graph, tensor.op)
            for tensor in graph.slots(label)
            if tensor is not None and tensor not in self._overrides
        ]

    def _context_dependencies(self, graph: Graph, op: Op) -> list[_FingerprintNode]:
        """Return the control inputs of an op, the outputs of the graphs that it calls, and the entry of its graph."""
        dependencies = [("op", graph.name, control_input) for control_input in graph.control_inputs(op.name)]
        for call in op.calls:
            if call.graph in self._live:
                dependencies += [("op", call.graph, output) for output in self._model.graphs[call.graph].outputs]
        return [*dependencies, ("entry", graph.name, "")] if graph.name and not _is_stored_value(op) else dependencies

    def _entry_dependencies(self, name: str) -> list[_FingerprintNode]:
        dependencies: list[_FingerprintNode] = []
        for use, call in self._callers.get(name, ()):
            caller = self._model.graphs[use.graph]
            dependencies += self._computed_inputs(caller, use.op)
            if use.graph:
                dependencies.append(("entry", use.graph, ""))
            if call.loop or caller.op(use.op).kind in LOOP_KINDS:
                dependencies += [("op", name, output) for output in self._model.graphs[name].outputs]
        return dependencies

    def _hash_node(self, node: _FingerprintNode) -> bytes:
        kind, name, label = node
        graph = self._model.graphs[name]
        if kind == "entry":
            chunks = [b"entry"]
            for use, _ in self._callers.get(name, ()):
                caller = self._model.graphs[use.graph]
                chunks += [_hash_op_content(caller.op(use.op)), *map(self.hash_tensor, caller.slots(use.op))]
            dependencies = self._entry_dependencies(name)
        else:
            op = graph.op(label)
            if _is_stored_value(op):
                return _hash_stored_value(op)
            chunks = [_hash_op_content(op), *map(self.hash_tensor, graph.slots(label))]
            if op.kind == "input":
                chunks.append(label.encode())
            dependencies = self._context_dependencies(graph, op)
        return _hash_chunks(*chunks, *(self._digests[dependency] for dependency in dependencies))


def _is_stored_value(op: Op) -> bool:
    """Return whether the op holds a value that is stored in the model."""
    return op.read_value is not None and op.kind in {"constant", "variable", "input"}


def _hash_stored_value(op: Op) -> bytes:
    try:
        value = op.read_value() if op.read_value is not None else None
    except ModelError:  # the error is reported when the value is needed
        value = None
    if value is None:
        return _hash_chunks(b"unread", op.name.encode())
    return _hash_chunks(b"value", _canonical_bytes(value))


def _hash_op_content(op: Op) -> bytes:
    """Hash the computation of the op without its inputs."""
    attrs = (
        f"{name}={_canonical_bytes(op.attrs[name])!r}".encode() for name in sorted(op.attrs) if not name.startswith("_")
    )
    return _hash_chunks(op.type.encode(), op.domain.encode(), *attrs)


def _canonical_bytes(value: Any) -> bytes:
    """Return bytes that are equal for equal attribute or constant values."""
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value).reshape(-1)
        payload = repr(value.tolist()).encode() if value.dtype.hasobject else flat.view(np.uint8).data
        return _hash_chunks(b"array", value.dtype.name.encode(), repr(value.shape).encode(), payload)
    if isinstance(value, list | tuple):
        return _hash_chunks(b"list", *map(_canonical_bytes, value))
    if hasattr(value, "SerializeToString"):
        return _hash_chunks(b"message", value.SerializeToString(deterministic=True))
    return repr(value).encode()


def _hash_chunks(*chunks: bytes | memoryview) -> bytes:
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(len(chunk).to_bytes(8, "little"))
        hasher.update(chunk)
    return hasher.digest()[:FINGERPRINT_LENGTH]


COARSE_BITS, FINE_BITS = 7, 10
"""Mantissa bits of a histogram: for schemes of up to 8 bits, and for wider ones. See `histogram_bits`."""

CALIBRATION_METHODS = tuple(
    name for name, observer in OBSERVERS.items() if observer.needs_values and not observer.required_arguments
)
"""Observers that any activation may have: they read values and need no argument."""


class ObservationTarget(NamedTuple):
    """Details that calibration collects for a tensor."""

    fingerprint: str  # Hash of the fan-in of the tensor. Tensors with the same fingerprint hold the same values.
    axis: int | None  # Channel axis for the minimum and maximum; None for one minimum and maximum of the tensor.
    bits: int  # mantissa bits of the histogram; 0 for none

    def shortfall(self, needed: ObservationTarget) -> str:
        """Return the reason why the collected details do not suffice for `needed`, or "" if they do."""
        if self.axis != needed.axis and (needed.axis is not None or needed.bits):
            available, required = (
                "all channels together" if axis is None else f"the channels of axis {axis}"
                for axis in (self.axis, needed.axis)
            )
            return f"it was observed for {available}, but the plan needs {required}"
        if self.bits < needed.bits and needed.axis is None:
            available = f"a histogram of {self.bits} mantissa bits" if self.bits else "no histogram"
            return f"{available} was collected, but the plan needs one of {needed.bits}"
        return ""


def sites_needing_data(plan: Plan) -> tuple[Site, ...]:
    """Return the sites whose range depends on data: no weights, and no range given by the plan or the scheme."""
    return tuple(
        site
        for site in plan.sites
        if not (site.parameter or site.clone_of or site.has_given_range or site.scheme.range == "dynamic")
        and OBSERVERS[site.scheme.observe.name].needs_values
    )


def plan_targets(
    source: Model, prepared: Model, plan: Plan, *, full_histograms: bool, rescaled: Container[TensorRef] = ()
) -> ObservationTargets:
    """Return the tensors of the prepared model that `plan` needs data for.

    A tensor is observed per channel if all its sites have the same axis. `full_histograms` collects a histogram even if
    no observer of the plan reads it. Except for `rescaled` tensors, those of the source model keep their fingerprints;
    see `preserved_fingerprints`.
    """
    axes: dict[TensorRef, int | None] = {}
    bits: dict[TensorRef, int] = {}
    for site in sites_needing_data(plan):
        axes[site.tensor] = site.axis if axes.get(site.tensor, site.axis) == site.axis else None
        bits[site.tensor] = max(bits.get(site.tensor, 0), _site_histogram_bits(site, full_histograms=full_histograms))
    preserved = preserved_fingerprints(source, prepared)
    overrides = {tensor: value for tensor, value in preserved.items() if tensor not in rescaled}
    tensor_fingerprints = fingerprints(prepared, tuple(axes), overrides)
    return {tensor: ObservationTarget(tensor_fingerprints[tensor], axis, bits[tensor]) for tensor, axis in axes.items()}


def all_float_targets(model: Model, bits: int = COARSE_BITS) -> ObservationTargets:
    """Return every float tensor of `model` that is read and is not a parameter."""
    parameters = Parameters(model)
    float_tensors = []
    for graph, op in model.reachable_ops():
        if op.kind == "next_iteration":
            continue  # TensorFlow requires that only a Merge reads its output
        read_ports = graph.consumers_by_port(op.name)
        for port, output in enumerate(op.outputs):
            tensor = TensorRef(graph.name, op.name, port)
            if output.dtype in FLOAT_TYPES and port in read_ports and not parameters.is_parameter(tensor):
                float_tensors.append(tensor)
    tensor_fingerprints = fingerprints(model, float_tensors)
    return {tensor: ObservationTarget(tensor_fingerprints[tensor], None, bits) for tensor in float_tensors}


def with_observer(plan: Plan, method: str | None) -> Plan:
    """Return `plan` with the observer `method` at all sites whose range depends on data. None returns the plan itself.

    Raises a UsageError if the observer does not exist, or it takes arguments that only a rule can give.
    """
    if method is None:
        return plan
    if method not in CALIBRATION_METHODS:
        raise UsageError(
            f"The method {method[:60]!r} is unknown.{did_you_mean(method, CALIBRATION_METHODS)} Use"
            f" {', '.join(CALIBRATION_METHODS)}."
        )
    site_ids = set(map(id, sites_needing_data(plan)))
    observe = ObserverConfig(name=method)
    sites = (
        replace(site, scheme=replace(site.scheme, observe=observe)) if id(site) in site_ids else site
        for site in plan.sites
    )
    return replace(plan, sites=tuple(sites))


def finest_histogram_bits(plan: Plan) -> int:
    """Return the mantissa bits of the finest histogram that a site of `plan` needs."""
    return max(
        (_site_histogram_bits(site, full_histograms=True) for site in sites_needing_data(plan)), default=COARSE_BITS
    )


def _site_histogram_bits(site: Site, *, full_histograms: bool) -> int:
    dtype = site.scheme.type
    return histogram_bits(dtype) if full_histograms else OBSERVERS[site.scheme.observe.name].required_bits(dtype)


ObservationTargets = dict[TensorRef, ObservationTarget]
