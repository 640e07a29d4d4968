"""Where biases are held, and how they get another value without any other reader seeing it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.corrections.means import RULE
from graphquant.corrections.places import own_constant
from graphquant.ir import Parameters, TensorRef, Use
from graphquant.numerics import SMALLEST_SCALE, QParams, along, from_scale
from graphquant.plans import Site
from graphquant.qdq.base import constant
from graphquant.rewrite import FRAMES

if TYPE_CHECKING:
    from graphquant.corrections.places import Place
    from graphquant.corrections.types import Draft
    from graphquant.ir import Model
    from graphquant.numerics import Array
    from graphquant.solve import Solution

BIAS_BITS: Final = 32
"""Bits of a bias that integers are added to; one of fewer has steps as large as what corrections are about."""

LIVES_ON: Final = "its bias is a variable, with which training goes on; freeze the model to correct it"


class Biases:
    """A model whose biases move, with its solution.

    Attributes:
        model: A copy of the draft's model, which is changed.
        solution: The draft's, with sites for biases that were added.
    """

    def __init__(self, draft: Draft) -> None:
        """The draft stays as it is."""
        self.model: Model = draft.model.copy()
        self.solution: Solution = draft.solution
        self._before = draft.model
        self._parameters = Parameters(draft.model)
        self._values: dict[Use, Array] = {}
        self._moved: dict[Use, Array] = {}
        self._homes: dict[Use, TensorRef] = {}
        self._sites = {use: index for index, site in enumerate(draft.solution.plan.sites) for use in site.uses}

    def lives_on(self, place: Place) -> bool:
        """Whether a bias is a variable, with which training goes on."""
        held = None if place.bias is None else self._before.graphs[place.bias.graph].producer(place.bias)
        return held is not None and self._parameters.is_variable(held)

    def move(self, place: Place, shift: Array) -> str:
        """Moves a bias by what is missing in what the op makes; why that cannot be, "" if it was done.

        Args:
            place: The op.
            shift: float64 (C,). Where another op adds the bias, it is not part of what the op makes, nor then is what
                the bias was moved by before.
        """
        use = place.bias
        if use is None:
            return place.why_not
        known = self._values[use] if use in self._values else self._read(place, use, len(shift))
        if isinstance(known, str):
            return known
        inside = use.op == place.op.name
        moved = self._moved.get(use, np.zeros(len(shift))) + shift if inside else shift
        value = (known + moved).astype(np.float32)
        if not np.isfinite(value).all() or not self._fits(use, value):
            return "the corrected bias would be more than integers of 32 bits hold"
        self._values[use], self._moved[use] = known, moved
        self._put(place, use, value)
        return ""

    def said(self, place: Place) -> str:
        """What was done to a bias, for people."""
        moved = np.abs(self._moved[place.bias]).max(initial=0) if place.bias is not None else 0.0
        return f"its bias moved by up to {moved:.3g}"

    def _read(self, place: Place, use: Use, channels: int) -> Array | str:
        """The value of a bias, float64, with its own shape, or why it cannot be moved."""
        params = self._params(use)
        if params is not None and params.type.bits < BIAS_BITS:
            return f"its bias has {params.type.bits} bits, whose steps are as large as the correction"
        held = self._before.graphs[use.graph].producer(use)
        if held is None:
            return np.zeros(channels)
        value = self._parameters.value(held)
        last = place.axes is not None and place.axes.channel == place.axes.count - 1
        added = self._before.graphs[use.graph].op(use.op).kind == "add"
        if value is None or value.dtype != np.float32 or (added and not last):
            return "its bias is not one number per channel"
        if value.shape[-1:] == (channels,):
            return value.astype(np.float64)
        return np.broadcast_to(value.astype(np.float64), channels) if value.size == 1 else "its bias has another size"

    def _fits(self, use: Use, value: Array) -> bool:
        params = self._params(use)
        if params is None:
            return True
        wide = along(params.scale.astype(np.float64), params.axis, value.ndim)
        return bool(np.max(np.abs(value) / wide, initial=0.0) <= params.type.limits()[1])

    def _params(self, use: Use) -> QParams | None:
        index = self._sites.get(use)
        params = None if index is None else self.solution.params.get(index)
        return params if isinstance(params, QParams) else None

    def _put(self, place: Place, use: Use, value: Array) -> None:
        """Gives the bias a constant of its own, and that its value."""
        if use not in self._homes:
            alone = own_constant(self._before, use, value.shape)
            self._homes[use] = alone or self._added(place, use, value)
            if alone is None:
                return
        home = self._homes[use]
        graph = self.model.graphs[home.graph]
        graph.replace(replace(graph.op(home.op), value=lambda: value))

    def _added(self, place: Place, use: Use, value: Array) -> TensorRef:
        """A new constant that the use reads from now on, quantized as the one before it was."""
        graph = self.model.graphs[use.graph]
        framed = any(op.kind in FRAMES for op in graph.ops())
        after = (place.op.name,) if framed else ()
        was = graph.producer(use)
        made = constant(graph, f"{place.op.name}/bias_corrected", value, type_="Const", rule=RULE, after=after)
        graph.connect(use, made)
        self._quantize(place, use, made, value, fresh=was is None)
        return made

    def _quantize(self, place: Place, use: Use, made: TensorRef, value: Array, *, fresh: bool) -> None:
        """Moves the use's site to the new constant; a bias that was none gets one as other biases have."""
        sites, params = list(self.solution.plan.sites), dict(self.solution.params)
        index = self._sites.get(use)
        if index is not None:
            site = sites[index]
            left = tuple(other for other in site.uses if other != use)
            alone = replace(site, tensor=made, uses=(use,), graph=use.graph, tie=(), twin=None)
            if not left:
                sites[index] = alone
            else:
                sites[index] = replace(site, uses=left)
                sites.append(alone)
                self._sites[use] = len(sites) - 1
                if index in params:
                    params[len(sites) - 1] = params[index]
        elif fresh:
            site_and_params = self._like_others(place, use, made, value)
            if site_and_params is None:
                return
            sites.append(site_and_params[0])
            params[len(sites) - 1] = site_and_params[1]
            self._sites[use] = len(sites) - 1
        self.solution = replace(self.solution, plan=replace(self.solution.plan, sites=tuple(sites)), params=params)

    def _like_others(self, place: Place, use: Use, made: TensorRef, value: Array) -> tuple[Site, QParams] | None:
        """A site for a bias that was none, where other biases are integers; its scale is input times weight."""
        biases = (one for one in self.solution.plan.sites if one.parameter and one.scheme.type.bits == BIAS_BITS)
        like = next(biases, None)
        data = Use(place.graph, place.op.name, place.op.roles.index("input"))
        scales = [
            params.scale.astype(np.float64) for params in (self._params(data), self._params(place.weight)) if params
        ]
        if like is None or len(scales) != len(("input", "weight")):
            return None
        scale = np.asarray(scales[0] * scales[1]).astype(np.float32)
        largest = np.max(np.abs(value) / np.maximum(scale.astype(np.float64), SMALLEST_SCALE), initial=0.0)
        if (
            scale.shape not in {(), value.shape}
            or (scale < SMALLEST_SCALE).any()
            or largest > like.scheme.type.limits()[1]
        ):
            return None
        axis = 0 if scale.ndim else None
        if (like.axis is None) != (axis is None):
            return None
        site = Site(
            tensor=made,
            uses=(use,),
            graph=use.graph,
            scheme=like.scheme,
            axis=axis,
            rule=like.rule,
            why=like.why,
            parameter=True,
        )
        return site, from_scale(scale, np.zeros(scale.shape, np.int32), like.scheme.type, axis=axis)


__all__ = ["LIVES_ON", "Biases"]
