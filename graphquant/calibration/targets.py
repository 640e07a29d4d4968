"""Calibration targets: the tensors of a plan whose range depends on data, or all float tensors of a model."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.calibration.fingerprints import fingerprints, preserved_fingerprints
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import FLOAT_TYPES, Model, Parameters, TensorRef
from graphquant.observers import OBSERVERS, histogram_bits
from graphquant.rules import ObserverConfig

if TYPE_CHECKING:
    from graphquant.quantize import Plan, Site

COARSE_BITS, FINE_BITS = 7, 10
"""Mantissa bits of a histogram: for schemes of up to 8 bits, and for wider ones. See `histogram_bits`."""

CALIBRATION_METHODS = tuple(
    name for name, observer in OBSERVERS.items() if observer.needs_values and not observer.required_arguments
)
"""Observers that any activation may have: they read values and need no argument."""


@dataclass(frozen=True, slots=True)
class ObservationTarget:
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
        if not site.parameter
        and site.clone_of is None
        and site.range is None
        and site.scale is None
        and site.scheme.range != "dynamic"
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
