"""Scales of a TFLite file for the tensors of the model that it was made from, or of one like it.

Weights are left out unless they are mapped: a model's own values tell their ranges better than another file.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.errors import UsageError, did_you_mean
from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE, IntType
from graphquant.ranges.names import places, same, stored

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphquant.ir import Model, Output, TensorRef
    from graphquant.numerics import Array
    from graphquant.plans import Plan, Site

MAX_MAP = 1 << 24
"""Bytes of a file that maps names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A planned tensor whose scale a TFLite file gives.

    Attributes:
        tensor: The tensor.
        name: Its name in the TFLite file.
        exact: Whether scale and zero point are taken as they are; else the range that they stand for.
    """

    tensor: TensorRef
    name: str
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """What a TFLite file was good for.

    Attributes:
        path: The file, None if it has none.
        given: The planned tensors that got their scale or range from it.
        unused: Names of its quantized activations that no planned tensor has.
        missing: Planned activations that it says nothing of.
    """

    path: Path | None
    given: tuple[Given, ...]
    unused: tuple[str, ...]
    missing: tuple[TensorRef, ...]


def read_map(path: Path) -> dict[str, str]:
    """The names in a TOML file: a model's tensor on the left, a TFLite file's on the right.

    Raises:
        UsageError: It cannot be read, or holds something else.
    """
    hint = 'Write lines like "block1/Relu:0" = "model/block1/Relu".'
    try:
        if path.stat().st_size > MAX_MAP:
            raise UsageError(f"{path} is over {MAX_MAP >> 20} MB, too much for names. {hint}")
        found = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give a TOML file of names.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML file ({str(error)[:200]}). {hint}") from error
    wrong = next((name for name, value in found.items() if not isinstance(value, str)), None)
    if wrong is not None:
        raise UsageError(f"{path}: {wrong!r} is mapped to something that is no name. {hint}")
    return found


def give(model: Model, plan: Plan, source: Model, names: Mapping[str, str]) -> tuple[Plan, Ranges]:
    """`plan` with the scales of a TFLite file where it names the same tensors.

    What the plan itself gives stays. A scale is taken as it is where the site's scheme has the same type and allows the
    zero point; else the range that it stands for is.

    Args:
        model: The prepared model that the plan names.
        plan: The plan.
        source: The TFLite model.
        names: Pairs of a planned tensor and a tensor of the file that it gets its scale from, whatever it is called.

    Raises:
        UsageError: A name does not exist, or no planned tensor is in the file.
    """
    entries = _entries(source)
    mapped = _mapped(plan, entries, names)
    activations = {name: one for name, (one, constant) in entries.items() if not constant}
    known = places(model, activations, _names(source))
    callers = model.callers()
    sites, given, missing, taken = [], [], [], set()
    for site in plan.sites:
        name = mapped.get(site.tensor)
        if name is None and not site.parameter and site.twin is None:
            name = next((known[ref] for ref in same(model, callers, site.tensor) if ref in known), None)
        changed = None if name is None else _changed(site, entries[name][0])
        sites.append(changed or site)
        if name is not None and changed is not None:
            taken.add(name)
            given.append(Given(tensor=site.tensor, name=name, exact=changed.scale is not None))
        elif not site.parameter and not site.tie and site.twin is None and site.range is None and site.scale is None:
            missing.append(site.tensor)
    if not given:
        raise UsageError(_nothing(source, plan, list(activations)))
    unused = tuple(name for name, one in activations.items() if name not in taken and stored(one).scale.size)
    found = Ranges(path=source.path, given=tuple(given), unused=unused, missing=tuple(dict.fromkeys(missing)))
    return replace(plan, sites=tuple(sites)), found


def _entries(source: Model) -> dict[str, tuple[Output, bool]]:
    """The tensors of a TFLite model that have a scale or a range, by name, and whether they are constants."""
    found: dict[str, tuple[Output, bool]] = {}
    for graph in source.graphs.values():
        for op in graph.ops():
            for output in op.outputs:
                if output.name and (stored(output).scale.size or stored(output).low.size):
                    found.setdefault(output.name, (output, op.kind in {"constant", "variable"}))
    return found


def _names(source: Model) -> set[str]:
    return {output.name for graph in source.graphs.values() for op in graph.ops() for output in op.outputs}


def _mapped(plan: Plan, entries: Mapping[str, object], names: Mapping[str, str]) -> dict[TensorRef, str]:
    planned: dict[str, list[TensorRef]] = {}
    for site in plan.sites:
        for name in {str(site.tensor): 0, site.tensor.op: 0} if not site.tensor.port else (str(site.tensor),):
            planned.setdefault(name, []).append(site.tensor)
    found: dict[TensorRef, str] = {}
    for ours, theirs in names.items():
        if ours not in planned:
            raise UsageError(f"The plan quantizes no tensor {ours!r}, which is mapped.{did_you_mean(ours, planned)}")
        if theirs not in entries:
            raise UsageError(f"The TFLite file has no scale of {theirs!r}.{did_you_mean(theirs, entries)}")
        found.update(dict.fromkeys(planned[ours], theirs))
    return found


def _changed(site: Site, output: Output) -> Site | None:
    """The site with the scale, or with the range that it stands for; None if the file says nothing that is of use."""
    said, dtype = stored(output), output.dtype or ""
    scale, zero = said.scale.astype(float).tolist(), said.zero_point.tolist()
    if site.range is not None or site.scale is not None or said.details or len(zero) != len(scale):
        return None
    if not scale:
        return None if site.parameter else _seen(site, said.low.astype(float), said.high.astype(float))
    if not all(SMALLEST_SCALE <= one <= LARGEST_VALUE for one in scale):
        return None
    if _allows(site, dtype, scale, zero):
        return replace(site, scale=tuple(scale), zero_point=tuple(zero))
    if len(scale) != 1 or dtype not in {"int8", "uint8", "int16"}:
        return None
    bottom, top = IntType.parse(dtype).limits()
    return replace(site, range=((bottom - zero[0]) * scale[0], (top - zero[0]) * scale[0]))


def _seen(site: Site, low: Array, high: Array) -> Site | None:
    """The site with a range that the file recorded without a scale."""
    if low.size != 1 or high.size != 1 or not -math.inf < low[0] <= high[0] < math.inf:
        return None
    return replace(site, range=(float(low[0]), float(high[0])))


def _allows(site: Site, dtype: str, scale: list[float], zero: list[int]) -> bool:
    """Whether the site's scheme may have this very scale and zero point."""
    scheme = site.scheme
    low, high = scheme.type.limits(narrow=scheme.narrow)
    return (
        dtype == scheme.type.name
        and all(low <= one <= high for one in zero)
        and (scheme.zero != "symmetric" or all(one == scheme.type.middle for one in zero))
        and (scheme.scale != "power-of-two" or all(math.frexp(one)[0] == 0.5 for one in scale))  # noqa: PLR2004
        and (len(scale) == 1) == (site.axis is None)
    )


def _nothing(source: Model, plan: Plan, names: list[str]) -> str:
    ours = list(dict.fromkeys(str(site.tensor) for site in plan.sites if not site.parameter))
    theirs = ", ".join(repr(name) for name in names[:3]) or "none that is quantized"
    near = did_you_mean(ours[0].rpartition(":")[0], names) if ours else ""
    return (
        f"No tensor that the plan quantizes is in {source.path or 'the TFLite model'}: its activations are {theirs},"
        f" and the plan's {', '.join(ours[:3]) or 'none'}.{near} Say which is which in a file for --ranges-map."
    )
