"""What is to be observed: the tensors of a plan whose range only data can tell, or every float tensor of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.calibration.fingerprints import fingerprints
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import FLOAT_TYPES, Parameters, TensorRef
from graphquant.observers import OBSERVERS, histogram_bits
from graphquant.rules import ObserverConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.ir import Model, Op
    from graphquant.quantize import Plan, Site


COARSE_BITS, FINE_BITS = 7, 10
"""Mantissa bits of a histogram: for schemes of up to 8 bits, and for those above; see `histogram_bits`."""

CALIBRATION_METHODS = tuple(
    name for name, observer in OBSERVERS.items() if observer.needs_values and not observer.required_arguments
)
"""Observers that any activation may have: they look at values, and need no argument."""

NON_ACTIVATION_KINDS = frozenset({"constant", "variable", "output", "next_iteration", "loop_cond"})
"""Kinds whose outputs are no activations, or which no other op may come between."""


@dataclass(frozen=True, slots=True)
class ObservationTarget:
    """What is kept of a tensor.

    Attributes:
        fingerprint: Digest of all that the tensor is computed from; two tensors with the same one hold the same values.
        axis: The channel axis that its smallest and largest values are kept for, None for one of each.
        bits: Mantissa bits of the histogram, 0 for none.
    """

    fingerprint: str
    axis: int | None = None
    bits: int = 0

    def shortfall(self, needed: ObservationTarget) -> str:
        """Why what is kept here is too little for `needed`; "" if it is enough."""
        if self.axis != needed.axis and (needed.axis is not None or needed.bits):
            available = "all channels together" if self.axis is None else f"the channels of axis {self.axis}"
            required = "all channels together" if needed.axis is None else f"those of axis {needed.axis}"
            return f"it was kept for {available}, and {required} are wanted"
        if self.bits < needed.bits and needed.axis is None:
            available = f"a histogram of {self.bits} mantissa bits" if self.bits else "no histogram"
            return f"{available} was kept, and one of {needed.bits} is wanted"
        return ""


def sites_needing_data(plan: Plan) -> tuple[Site, ...]:
    """The sites whose range only data can tell: no weights, nothing given by the plan or by the scheme."""
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
    model: Model, plan: Plan, *, full_histograms: bool, overrides: Mapping[TensorRef, str] | None = None
) -> ObservationTargets:
    """The tensors of the prepared `model` that `plan` needs data for, per channel if all their sites have that axis.

    Args:
        model: The prepared model.
        plan: The plan.
        full_histograms: Keep a histogram even where no observer of the plan reads it.
        overrides: Cones that are known otherwise; see `graphquant.calibration.cones.kept`.
    """
    axes: dict[TensorRef, int | None] = {}
    bits: dict[TensorRef, int] = {}
    for site in sites_needing_data(plan):
        axes[site.tensor] = site.axis if axes.get(site.tensor, site.axis) == site.axis else None
        bits[site.tensor] = max(bits.get(site.tensor, 0), _site_histogram_bits(site, full_histograms=full_histograms))
    tensor_fingerprints = fingerprints(model, tuple(axes), overrides)
    return {tensor: ObservationTarget(tensor_fingerprints[tensor], axis, bits[tensor]) for tensor, axis in axes.items()}


def all_float_targets(model: Model, bits: int = COARSE_BITS) -> ObservationTargets:
    """Every float tensor of `model` that something reads and that is no parameter."""
    parameters = Parameters(model)
    float_tensors = []
    for name in model.reachable_graphs():
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind in NON_ACTIVATION_KINDS:
                continue
            read_ports = graph.consumers_by_port(op.name)
            tensors = [TensorRef(name, op.name, port) for port in _float_output_ports(op) if port in read_ports]
            float_tensors += [tensor for tensor in tensors if not parameters.is_parameter(tensor)]
    tensor_fingerprints = fingerprints(model, float_tensors)
    return {tensor: ObservationTarget(tensor_fingerprints[tensor], None, bits) for tensor in float_tensors}


def with_observer(plan: Plan, method: str | None) -> Plan:
    """`plan` with the observer `method` for all sites that data gives a range; the plan itself for None.

    Raises:
        UsageError: There is no such observer, or it takes arguments that only a rule can give.
    """
    if method is None:
        return plan
    if method not in CALIBRATION_METHODS:
        raise UsageError(
            f"There is no method {method[:60]!r}.{did_you_mean(method, CALIBRATION_METHODS)} Use {', '.join(CALIBRATION_METHODS)}."
        )
    site_ids = set(map(id, sites_needing_data(plan)))
    observe = ObserverConfig(name=method)
    sites = (
        replace(site, scheme=replace(site.scheme, observe=observe)) if id(site) in site_ids else site
        for site in plan.sites
    )
    return replace(plan, sites=tuple(sites))


def finest_histogram_bits(plan: Plan) -> int:
    """The mantissa bits of the finest histogram that a site of `plan` wants."""
    return max(
        (_site_histogram_bits(site, full_histograms=True) for site in sites_needing_data(plan)), default=COARSE_BITS
    )


def _site_histogram_bits(site: Site, *, full_histograms: bool) -> int:
    dtype = site.scheme.type
    return histogram_bits(dtype) if full_histograms else OBSERVERS[site.scheme.observe.name].required_bits(dtype)


def _float_output_ports(op: Op) -> list[int]:
    return [port for port, output in enumerate(op.outputs) if output.dtype in FLOAT_TYPES]


ObservationTargets = dict[TensorRef, ObservationTarget]
