"""What is to be observed: the tensors of a plan whose range only data can tell, or every float tensor of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.calibration.cones import cones
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import FLOAT_TYPES, Parameters, TensorRef
from graphquant.ruleset import Observe
from graphquant.sketch import OBSERVERS, histogram_bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.ir import Model, Op
    from graphquant.plans import Plan, Site

COARSE, FINE = 7, 10
"""Mantissa bits of a histogram: for schemes of up to 8 bits, and for those above; see `histogram_bits`."""

METHODS = tuple(name for name, one in OBSERVERS.items() if one.needs_values and not one.required)
"""Observers that any activation may have: they look at values, and need no argument."""

PLUMBING = frozenset({"constant", "variable", "output", "next_iteration", "loop_cond"})
"""Kinds whose outputs are no activations, or which no other op may come between."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is kept of a tensor.

    Attributes:
        cone: Digest of all that the tensor is computed from; two tensors with the same one hold the same values.
        axis: The channel axis that its smallest and largest values are kept for, None for one of each.
        bits: Mantissa bits of the histogram, 0 for none.
    """

    cone: str
    axis: int | None = None
    bits: int = 0

    def serves(self, wanted: Target) -> str:
        """Why what is kept here is too little for `wanted`; "" if it is enough."""
        if self.axis != wanted.axis and (wanted.axis is not None or wanted.bits):
            kept = "all channels together" if self.axis is None else f"the channels of axis {self.axis}"
            asked = "all channels together" if wanted.axis is None else f"those of axis {wanted.axis}"
            return f"it was kept for {kept}, and {asked} are wanted"
        if self.bits < wanted.bits and wanted.axis is None:
            kept = f"a histogram of {self.bits} mantissa bits" if self.bits else "no histogram"
            return f"{kept} was kept, and one of {wanted.bits} is wanted"
        return ""


def needs_data(plan: Plan) -> tuple[Site, ...]:
    """The sites whose range only data can tell: no weights, nothing given by the plan or by the scheme."""
    return tuple(
        site
        for site in plan.sites
        if not site.parameter
        and site.twin is None
        and site.range is None
        and site.scale is None
        and site.scheme.range != "dynamic"
        and OBSERVERS[site.scheme.observe.name].needs_values
    )


def planned(model: Model, plan: Plan, *, full: bool, same: Mapping[TensorRef, str] | None = None) -> Targets:
    """The tensors of the prepared `model` that `plan` needs data for, per channel if all their sites have that axis.

    Args:
        model: The prepared model.
        plan: The plan.
        full: Keep a histogram even where no observer of the plan reads it.
        same: Cones that are known otherwise; see `graphquant.calibration.cones.kept`.
    """
    axes: dict[TensorRef, int | None] = {}
    bits: dict[TensorRef, int] = {}
    for site in needs_data(plan):
        axes[site.tensor] = site.axis if axes.get(site.tensor, site.axis) == site.axis else None
        bits[site.tensor] = max(bits.get(site.tensor, 0), _bits(site, full=full))
    known = cones(model, tuple(axes), same)
    return {tensor: Target(known[tensor], axis, bits[tensor]) for tensor, axis in axes.items()}


def everything(model: Model, bits: int = COARSE) -> Targets:
    """Every float tensor of `model` that something reads and that is no parameter."""
    parameters = Parameters(model)
    found = []
    for name in model.live():
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind in PLUMBING:
                continue
            read = graph.readers(op.name)
            tensors = [TensorRef(name, op.name, port) for port in _floats(op) if port in read]
            found += [tensor for tensor in tensors if not parameters.is_parameter(tensor)]
    known = cones(model, found)
    return {tensor: Target(known[tensor], None, bits) for tensor in found}


def with_method(plan: Plan, method: str | None) -> Plan:
    """`plan` with the observer `method` for all sites that data gives a range; the plan itself for None.

    Raises:
        UsageError: There is no such observer, or it takes arguments that only a rule can give.
    """
    if method is None:
        return plan
    if method not in METHODS:
        raise UsageError(
            f"There is no method {method[:60]!r}.{did_you_mean(method, METHODS)} Use {', '.join(METHODS)}."
        )
    wanting = set(map(id, needs_data(plan)))
    observe = Observe(name=method)
    sites = (replace(s, scheme=replace(s.scheme, observe=observe)) if id(s) in wanting else s for s in plan.sites)
    return replace(plan, sites=tuple(sites))


def finest(plan: Plan) -> int:
    """The mantissa bits of the finest histogram that a site of `plan` wants."""
    return max((_bits(site, full=True) for site in needs_data(plan)), default=COARSE)


def _bits(site: Site, *, full: bool) -> int:
    dtype = site.scheme.type
    return histogram_bits(dtype) if full else OBSERVERS[site.scheme.observe.name].bits(dtype)


def _floats(op: Op) -> list[int]:
    return [port for port, output in enumerate(op.outputs) if output.dtype in FLOAT_TYPES]


Targets = dict[TensorRef, Target]
