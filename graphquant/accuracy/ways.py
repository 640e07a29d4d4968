"""The ways in which the tensors of a plan may be quantized, each as a plan of its own, beside that which rules want."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.calibration import needs_data
from graphquant.ir import Parameters, channel_axis, channel_view
from graphquant.multiply_adds import CONVOLUTIONS
from graphquant.numerics import IntType
from graphquant.qdq import FAMILIES
from graphquant.ruleset import Observe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.ir import Model
    from graphquant.plans import Plan, Site

OWN, FLOAT = "as the rules say", "float"
"""The ways that each tensor has."""

RANGES = ("minmax", "mse")
"""Observers that are tried: the one clips nothing, the other as much as it pays where each value is by itself."""

MANY, FEW, WIDE = 8, 4, 16
"""Bits of weights that have fewer, of weights that are to be small, and of activations that 8 are too few for."""

HIGH = frozenset({f"{WIDE} bits", FLOAT})
"""Ways in which the ops that multiply on a tensor run in high precision: kernels for 16 bits are rare."""

NEVER_INTEGERS = "quantize-and-dequantize"
"""Families whose ops stand for hardware that is not known; others are run in float where activations have 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way in which a group of tensors may be quantized.

    Attributes:
        name: What it is called: "minmax range", "8-bit weights", "float".
        error: What the group then adds to the outputs, as a share of these.
        high: Whether the ops that multiply on the group then run in high precision.
        size: Bytes that its weights then take.
    """

    name: str
    error: float
    high: bool = False
    size: float = 0.0


def ways(model: Model, plan: Plan, *, small: bool = False) -> dict[str, Plan]:
    """For each way its name and the plan in which all sites have it that can; the others are as they were.

    Args:
        model: The prepared model.
        plan: What the rules make.
        small: Whether weights of few bits are wanted.
    """
    if small:
        few = {index: _weights(model, site, FEW) for index, site in enumerate(plan.sites)}
        return _changed(plan, {f"{FEW}-bit weights": few})
    wanting = set(map(id, needs_data(plan)))
    parameters = Parameters(model)
    sites = list(enumerate(plan.sites))
    found = {f"{name} range": {i: _ranged(site, name) for i, site in sites if id(site) in wanting} for name in RANGES}
    found[f"{MANY}-bit weights"] = {i: _weights(model, site, MANY) for i, site in sites}
    found["weights per channel"] = {i: _per_channel(model, parameters, site) for i, site in sites}
    found[f"{WIDE} bits"] = {i: _wide(model, site) for i, site in sites if id(site) in wanting}
    return _changed(plan, found)


def _changed(plan: Plan, found: Mapping[str, Mapping[int, Site | None]]) -> dict[str, Plan]:
    """The plans that differ from `plan`."""
    owner = {use: index for index, site in enumerate(plan.sites) if site.twin is None for use in site.uses}
    made = {}
    for name, sites in found.items():
        new = [sites.get(index) or site for index, site in enumerate(plan.sites)]
        for index, site in enumerate(plan.sites):
            if site.twin in owner and plan.sites[owner[site.twin]].scheme == site.scheme:
                like = new[owner[site.twin]]
                new[index] = replace(site, scheme=like.scheme, axis=like.axis, view=like.view)
        if tuple(new) != plan.sites:
            made[name] = replace(plan, sites=tuple(new))
    return made


def _ranged(site: Site, observer: str) -> Site | None:
    """The site with another observer."""
    return replace(site, scheme=replace(site.scheme, observe=Observe(name=observer)))


def _weights(model: Model, site: Site, bits: int) -> Site | None:
    """A weight with so many bits: with few, if it has more, or with many, if it has fewer."""
    dtype = site.scheme.type
    if (
        not _is_weight(site)
        or not isinstance(dtype, IntType)
        or not (dtype.bits > bits if bits < MANY else dtype.bits < bits)
    ):
        return None
    clips = bits < MANY and site.scheme.block_size is None
    made = _with_bits(site, dtype, bits)
    return _possible(model, replace(made, scheme=replace(made.scheme, observe=Observe(name="mse"))) if clips else made)


def _with_bits(site: Site, dtype: IntType, bits: int) -> Site:
    name = IntType(bits, signed=dtype.signed).name
    return replace(site, scheme=replace(site.scheme, dtype=name, bits=None, signed=None))


def _is_weight(site: Site) -> bool:
    """Whether the site is of a weight with values and scales of its own: no bias, whose scale is that of its op."""
    return site.parameter and site.twin is None and site.scale is None and site.scheme.observe.name != "bias"


def _per_channel(model: Model, parameters: Parameters, site: Site) -> Site | None:
    """A convolution's weight with a scale for each channel, which each backend takes that takes zero point 0."""
    readers = [model.graphs[use.graph].op(use.op) for use in site.uses]
    free = site.scheme.per == "tensor" and site.scheme.zero == "symmetric" and site.scheme.scale == "any"
    shape = model.output(site.tensor).shape or model.output(parameters.origin(site.tensor)).shape
    if not (_is_weight(site) and free and not site.tie and shape) or {op.kind for op in readers} - CONVOLUTIONS:
        return None
    axes = {(channel_axis(op, shape), channel_view(op, shape)) for op in readers}
    axis, view = next(iter(axes))
    if len(axes) > 1 or axis is None or None in (view or shape):
        return None
    known = None if view is None else tuple(size or 0 for size in view)
    return _possible(model, replace(site, axis=axis, view=known, scheme=replace(site.scheme, per="channel")))


def _wide(model: Model, site: Site) -> Site | None:
    """An activation with more bits, where something but onnxruntime, which then runs the op in float, may run it."""
    dtype, family = site.scheme.type, site.scheme.family or ""
    if not isinstance(dtype, IntType) or dtype.bits >= WIDE or not family.startswith(NEVER_INTEGERS):
        return None
    return _possible(model, _with_bits(site, dtype, WIDE))


def _possible(model: Model, site: Site) -> Site | None:
    """The site, if its family has such ops at the model's opset."""
    family, known = FAMILIES[site.scheme.family or ""], model.output(site.tensor)
    asked = site.scheme.request(
        axis=site.axis,
        dtype=known.dtype or "",
        shape=site.view or known.shape,
        parameter=site.parameter,
        function=model.graphs[site.tensor.graph].is_function,
    )
    return site if family.why_not(asked) is None and not 0 < model.opset < family.opset(asked) else None


__all__ = ["FLOAT", "HIGH", "OWN", "Way", "ways"]
