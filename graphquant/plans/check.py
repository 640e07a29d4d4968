"""A plan against the model it is applied to: an edited plan is checked before anything is done with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.errors import UsageError
from graphquant.ir import Parameters, TensorRef, Use, channel_view
from graphquant.qdq import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.ir import Model
    from graphquant.plans.types import Plan, Site

MAX_MISTAKES = 100
"""How many mistakes of one plan are told at once."""


def check_plan(model: Model, plan: Plan) -> None:
    """Checks that every site of `plan` can be carried out on `model`.

    Args:
        model: The prepared model that the plan names.
        plan: The plan.

    Raises:
        UsageError: Sites name what the model does not have, or want what their tensors cannot have; all are listed.
    """
    parameters = Parameters(model)
    claimed: set[Use] = set()
    own = {use for site in plan.sites if site.twin is None for use in site.uses}
    mistakes: list[str] = []
    for site in plan.sites:
        found = next(_missing(model, site), "") or next(_misfits(model, parameters, site), "")
        if not found and site.twin is not None and site.twin not in own:
            found = f"its scale is that of {site.twin}, which has no site of its own"
        again = next((use for use in site.uses if use in claimed), None)
        if not found and again is not None:
            found = f"{again} has a site before it already"
        claimed.update(site.uses)
        if found:
            mistakes.append(f"The plan's site of {site.tensor} cannot be: {found}.")
    if mistakes:
        more = [f"There are {len(mistakes) - MAX_MISTAKES} more of these."] if len(mistakes) > MAX_MISTAKES else []
        raise UsageError("\n".join([*mistakes[:MAX_MISTAKES], *more, "Mend the plan, or make it anew for this model."]))


def _missing(model: Model, site: Site) -> Iterator[str]:
    """What the site names and the model does not have."""
    home = model.graphs.get(site.tensor.graph)
    if home is None or site.tensor.op not in home or not 0 <= site.tensor.port < len(home.op(site.tensor.op).outputs):
        yield "the model has no such tensor"
        return
    if site.graph not in model.graphs or not model.graphs[site.graph].sees(site.tensor.graph):
        yield f"there is no graph {site.graph!r} that sees it"
        return
    if not site.uses or len(set(site.uses)) < len(site.uses):
        yield "it has no uses, or one of them twice"
    for use in site.uses:
        if _read(model, use) != site.tensor:
            yield f"{use} does not read it"
        elif not model.graphs[use.graph].sees(site.graph):
            yield f"{use} does not see graph {site.graph!r}"
    for use in site.tie:
        if _read(model, use) is None:
            yield f"it is tied to {use}, which reads nothing"


def _read(model: Model, use: Use) -> TensorRef | None:
    graph = model.graphs.get(use.graph)
    return graph.producer(use) if graph is not None and use.op in graph else None


def _misfits(model: Model, parameters: Parameters, site: Site) -> Iterator[str]:  # noqa: C901  # a flat list of checks
    """What the site wants and its tensor cannot have."""
    family = FAMILIES.get(site.scheme.family or "")
    known = model.output(site.tensor)
    parameter = parameters.is_parameter(site.tensor)
    shape = known.shape
    if shape is None and parameter:
        shape = model.output(parameters.origin(site.tensor)).shape
    if family is None or family.format != model.format:
        yield f"{model.format} models have no family {site.scheme.family!r}"
        return
    if site.parameter and not parameter:
        yield "it is no parameter, whose value is known; say 'parameter': false"
    if (site.axis is not None) != (site.scheme.per != "tensor"):
        yield f"its scheme is per {site.scheme.per}, and its axis {site.axis}"
        return
    if site.view is not None:
        readers = [model.graphs[use.graph].op(use.op) for use in site.uses]
        if shape is None or any(channel_view(reader, shape) != site.view for reader in readers):
            yield f"its consumers do not see channels in the view {list(site.view)}"
            return
        shape = site.view
    if site.axis is not None and (shape is None or not 0 <= site.axis < len(shape)):
        yield f"it has no axis {site.axis}, or it is not known how many there are"
        return
    channels = None if site.axis is None or shape is None else shape[site.axis]
    if site.scale is not None and channels is not None and len(site.scale) != channels:
        yield f"it has {channels} channels and the plan gives {len(site.scale)} scales"
    if known.dtype is None:
        yield "its data type is not known without running the model"
        return
    if not family.zero_points and any(site.zero_point or ()):
        yield f"{family.name} has no zero point, and the plan gives one; give 0"
    function = model.graphs[site.tensor.graph].is_function
    asked = site.scheme.request(axis=site.axis, dtype=known.dtype, shape=shape, parameter=parameter, function=function)
    reason = family.why_not(asked)
    if reason is not None:
        yield reason
    elif 0 < model.opset < family.opset(asked):
        yield f"its ops need opset {family.opset(asked)}, and the model is prepared for {model.opset}"
