"""int32 biases: their scale is input scale times weight scale of the op that adds them, so each op has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import DataError
from graphquant.ir import Use, readable
from graphquant.numerics import SMALLEST_SCALE, along, from_scale
from graphquant.solve.draft import follows

if TYPE_CHECKING:
    from graphquant.ir import Graph, Op
    from graphquant.numerics import QParams
    from graphquant.solve.draft import Draft


def solve_biases(draft: Draft) -> None:
    """Gives what is left its consumers' scales; a bias whose consumers need different ones is copied.

    Raises:
        ModelError: A bias holds NaN or infinity.
    """
    for index, site in enumerate(draft.plan.sites):
        if index in draft.params or index in draft.skips or follows(site) or site.scheme.range == "dynamic":
            continue
        found: dict[object, tuple[QParams, list[Use]]] = {}
        refused: dict[str, list[Use]] = {}
        for use in site.uses:
            try:
                params = _bias(draft, index, use)
            except DataError as error:
                refused.setdefault(str(error), []).append(use)
            else:
                found.setdefault(params.scale.tobytes(), (params, []))[1].append(use)
        _settle(draft, index, list(found.values()), refused)


def _settle(draft: Draft, index: int, found: list[tuple[QParams, list[Use]]], refused: dict[str, list[Use]]) -> None:
    """Keeps a site for the first of its scales; each other one, and each refusal, gets a copy of it."""
    parts = [uses for _, uses in found] + list(refused.values())
    places = draft.divide(index, parts)
    if len(found) > 1:
        draft.change(index, f"it has {len(found)} copies, as its consumers need different scales")
    for place, (params, uses) in zip(places, found, strict=False):
        draft.params[place] = params
        if len(found) > 1:
            said = ", ".join(map(str, uses))
            draft.note(place, f"is one of {len(found)} copies, as its consumers need different scales: that for {said}")
    for place, reason in zip(places[len(found) :], refused, strict=True):
        draft.skip(place, reason)


def _weighted(graph: Graph, use: Use) -> Op:
    """The op whose bias is read at `use`: the reader, or the one whose product it adds the bias to."""
    reader = graph.op(use.op)
    if reader.kind not in {"add", "bias_add"} or len(graph.slots(use.op)) != 2:  # noqa: PLR2004  # product and bias
        return reader
    product = graph.slots(use.op)[1 - use.slot]
    return graph.op(product.op) if product is not None and product.graph == graph.name else reader


def _bias(draft: Draft, index: int, use: Use) -> QParams:
    """int32 with input scale times weight scale, per channel where the weight is.

    Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html .
    """
    site = draft.sites[index]
    graph = draft.model.graphs[use.graph]
    reader = _weighted(graph, use)
    scales = []
    for slot in range(len(graph.slots(reader.name))):
        params = draft.of(Use(use.graph, reader.name, slot))
        if reader.role(slot) in {"input", "weight"} and params is not None:
            scales.append(params.scale.astype(np.float64))
    value = draft.bias(site.tensor)
    if len(scales) != 2 or value is None:  # noqa: PLR2004  # one input and one weight
        raise DataError("a bias has the scales of its consumer's input and weight, and those are not both quantized")
    readable(value, site.tensor)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.asarray(scales[0] * scales[1]).astype(np.float32)
    axis = site.axis if scale.ndim else None
    if scale.ndim and (axis is None or axis >= value.ndim or value.shape[axis] != scale.size):
        raise DataError(f"a bias of shape {value.shape} does not go with {scale.size} weight scales")
    if not (np.isfinite(scale).all() and (scale >= SMALLEST_SCALE).all()):
        raise DataError("its scale, input scale times weight scale, is no normal float32")
    wide = along(scale.astype(np.float64), axis, value.ndim)
    largest = float(np.max(np.abs(value) / wide, initial=0.0))
    if largest > site.scheme.type.limits()[1]:
        raise DataError(
            f"its values are up to {largest:.3g} steps of input scale times weight scale, more than"
            f" {site.scheme.type.name} holds"
        )
    return from_scale(scale, np.zeros(scale.shape, np.int32), site.scheme.type, axis=axis)
