"""The plan as data: sites, skips, preparation steps; the plan as JSON; and its validation against a model.

The JSON is versioned and made to be read, edited and diffed. Reading reports all mistakes at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationError

from graphquant.errors import UsageError
from graphquant.ir import Model, Parameters, TensorRef, Use, merged_channel_shape
from graphquant.numerics import LARGEST_VALUE, SMALLEST_SCALE, FloatType
from graphquant.qdq import FAMILIES, QDQFamily
from graphquant.quantize.preparation_undo import Step
from graphquant.rules import ALGORITHM_NAMES, Scheme
from graphquant.utils import HtmlRepresentation
from graphquant.utils.option_types import type_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One tensor that gets a Q/DQ pair for some of its consumers."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tensor: TensorRef  # the tensor to quantize
    uses: tuple[Use, ...]  # the consumers that are rerouted to the dequantized tensor
    graph: str  # the graph that receives the new ops: the tensor's own, or the subgraph that reads it
    scheme: Scheme  # the quantization scheme
    axis: int | None = None  # the channel axis of a per-channel scheme, or the axis of blocks; None per tensor
    # The shape in which `axis` is the channel axis if it is not the tensor's own: a depthwise kernel [3, 3, 4, 2] has 8
    # channels as [3, 3, 8].
    view: tuple[int, ...] | None = None
    rule: str = ""  # name of the rule that claimed the uses
    why: str = ""  # the reason that the rule gives
    parameter: bool = False  # true for a weight, whose range comes from its value
    tie: tuple[Use, ...] = ()  # uses whose sites must have the same scale and zero point as this one ("same-as-input")
    # For a site in a function clone, a use of the original site. The clone is never run on data, so it takes the
    # original's scale.
    clone_of: Use | None = None
    range: tuple[float, float] | None = None  # (low, high) in real units. It overrides statistics.
    # One scale, or one per channel. With `zero_point` it overrides everything else.
    scale: tuple[float, ...] | None = None
    zero_point: tuple[int, ...] | None = None  # one zero point, or one per channel

    def __post_init__(self) -> None:
        """Check the fields of an edited plan by themselves. `check_plan` checks them against the model."""
        if self.range is not None and not (all(map(math.isfinite, self.range)) and self.range[0] <= self.range[1]):
            raise ValueError("'range' must be (low, high), finite and in that order")
        if self.zero_point is not None and (self.scale is None or len(self.scale) != len(self.zero_point)):
            raise ValueError("'zero_point' needs 'scale' with as many numbers")
        qmin, qmax = self.scheme.type.limits(narrow=self.scheme.narrow)
        if self.scale is not None:
            if self.scheme.block_size is not None:
                raise ValueError("'scale' is not supported for blocks; give 'range'")
            if not self.scale or (self.axis is None and len(self.scale) != 1):
                raise ValueError("'scale' must have one number, or one per channel with an 'axis'")
            if not all(SMALLEST_SCALE <= value <= LARGEST_VALUE / (qmax - qmin + 1) for value in self.scale):
                raise ValueError("'scale' must be a positive normal float32 whose range is finite")
        if isinstance(self.scheme.type, FloatType):
            qmin = qmax = 0
        if not all(qmin <= zero <= qmax for zero in self.zero_point or ()):
            raise ValueError(f"'zero_point' is not in [{qmin}, {qmax}]")

    @property
    def has_given_range(self) -> bool:
        """True if the plan gives the range or the scale, so that no data or value determines them."""
        return self.range is not None or self.scale is not None

    @property
    def family(self) -> QDQFamily:
        """The family of the scheme."""
        return FAMILIES[self.scheme.family or ""]


class SkipCode(StrEnum):
    """Machine-readable reason of a skip. The `reason` of the skip has the details."""

    RULE = "rule"  # the rule says float or fused
    QUANTIZED = "quantized"  # quantized already
    WEIGHT = "weight"  # the consumer computes a weight, which is quantized where it is used
    SELECTION = "selection"  # include or exclude
    TIE = "tie"  # the tensor it is tied to has no scale to share
    CAPTURE = "capture"  # the runtime would move the pair into a subgraph
    SCHEME = "scheme"  # the scheme or the family does not support the tensor
    RANGE = "range"  # no usable range or value
    BIAS = "bias"  # no usable bias scale
    PREPARATION = "preparation"  # a preparation step left the op unchanged
    OPTIMIZATION = "optimization"  # a search or an algorithm keeps it in float
    COST = "cost"  # float is estimated to be faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Uses that a rule matched and that stay float, with the reason."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    tensor: TensorRef  # the tensor that is not quantized
    uses: tuple[Use, ...]  # the consumers that keep reading the float tensor
    rule: str  # name of the rule that claimed them, or of the preparation step that was skipped
    reason: str  # the reason
    code: SkipCode = SkipCode.RULE  # the kind of reason
    # True if the skip assumes that the producer can fuse the ops that read the tensor ("fused"). The solver quantizes
    # the tensor if the scales rule that out.
    fused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(HtmlRepresentation):
    """All changes to one model.

    Attributes:
        format: The model's format.
        model: Digest of the source model.
        prepared: Digest of the model after `steps`. The plan names its ops.
        rules: The rule files, as the caller named them.
        targets: The backends that the rule files are for.
        steps: Preparation steps, in the order of their application.
        sites: The tensors to quantize.
        skips: Matched uses that stay float, with the reason.
        unused: Rules of the named files that matched nothing.
        digest: Hex SHA-256 of the rule files' contents, "" if unknown.
        algorithms: Names of the optimization algorithms to run.
        warnings: Doubts about the plan as a whole.
    """

    format: str
    model: str
    prepared: str
    rules: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    sites: tuple[Site, ...] = ()
    skips: tuple[Skip, ...] = ()
    unused: tuple[str, ...] = ()
    digest: str = ""
    algorithms: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def for_onnxruntime(self) -> bool:
        """True unless the rule files are for other backends only."""
        return not self.targets or any(target.startswith("onnxruntime") for target in self.targets)

    def __post_init__(self) -> None:
        """Check the fields of an edited plan by themselves."""
        HtmlRepresentation.__post_init__(self)
        for name in self.algorithms:
            if name not in ALGORITHM_NAMES:
                raise ValueError(f"there is no algorithm {name!r}; use one of {', '.join(ALGORITHM_NAMES)}")


PLAN_SCHEMA_VERSION = 2
MAX_PLAN_BYTES = 1 << 30
MAX_MISTAKES = 100  # mistakes of one plan that are listed in one error
_LISTS = ("steps", "sites", "skips")
_PLAN_FILE_HINT = "`graphquant plan --format json` writes plans."


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return `plan` as JSON data. `plan_from_json` reads it back."""
    schemes: dict[str, Scheme] = {}
    for scheme in dict.fromkeys(site.scheme for site in plan.sites):
        name = scheme.name or "scheme"
        label = next(label for label in chain([name], (f"{name}_{k}" for k in count(2))) if label not in schemes)
        schemes[label] = scheme
    labels = {scheme: label for label, scheme in schemes.items()}
    return {
        "schema": PLAN_SCHEMA_VERSION,
        "format": plan.format,
        "model": plan.model,
        "prepared": plan.prepared,
        "rules": list(plan.rules),
        "targets": list(plan.targets),
        "digest": plan.digest,
        "steps": [asdict(step) for step in plan.steps],
        "schemes": {label: _scheme_to_json(scheme, label) for label, scheme in schemes.items()},
        "sites": [_site_to_json(site, labels[site.scheme]) for site in plan.sites],
        "skips": [
            {
                "tensor": _reference_to_json(skip.tensor),
                "uses": list(map(_reference_to_json, skip.uses)),
                "rule": skip.rule,
                "reason": skip.reason,
                "code": str(skip.code),
                **({"fused": True} if skip.fused else {}),
            }
            for skip in plan.skips
        ],
        "unused": list(plan.unused),
        "algorithms": list(plan.algorithms),
        **({"warnings": list(plan.warnings)} if plan.warnings else {}),
    }


def _site_to_json(site: Site, scheme_label: str) -> dict[str, Any]:
    data: dict[str, Any] = {"tensor": _reference_to_json(site.tensor), "uses": [*map(_reference_to_json, site.uses)]}
    if site.graph != site.tensor.graph:
        data["graph"] = site.graph
    data |= {"scheme": scheme_label, "rule": site.rule, "why": site.why, "parameter": site.parameter}
    optional_values = {
        "axis": site.axis,
        "view": None if site.view is None else list(site.view),
        "tie": list(map(_reference_to_json, site.tie)) or None,
        "clone_of": None if site.clone_of is None else _reference_to_json(site.clone_of),
        **{
            name: None if numbers is None else list(numbers)
            for name, numbers in (("range", site.range), ("scale", site.scale), ("zero_point", site.zero_point))
        },
    }
    return data | {key: value for key, value in optional_values.items() if value is not None}


def _scheme_to_json(scheme: Scheme, label: str) -> dict[str, Any]:
    """Return the fields that differ from the default scheme. The name is omitted if it equals `label`."""
    default = {**asdict(Scheme()), "name": label}
    changed = {key: value for key, value in asdict(scheme).items() if value != default[key]}
    observe = {key: value for key, value in asdict(scheme.observe).items() if value is not None}
    if "args" in changed:
        changed["args"] = {key: value for key, value in changed["args"].items() if value is not None}
    return {**changed, "observe": observe["name"] if len(observe) == 1 else observe}


def _reference_to_json(reference: TensorRef | Use) -> dict[str, Any]:
    """Return the fields of a reference, without the name of the main graph."""
    fields = dict(zip(reference._fields, reference, strict=True))
    return fields if reference.graph else {key: value for key, value in fields.items() if key != "graph"}


def read_plan(path: Path) -> Plan:
    """Read the plan in the JSON file at `path`."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PLAN_BYTES + 1)  # a device has no size, and no end
        if len(text) > MAX_PLAN_BYTES:
            raise UsageError(f"The plan {path} is too large. {_PLAN_FILE_HINT}")
        data = json.loads(text.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"The plan {path} cannot be read: {error.strerror}. {_PLAN_FILE_HINT}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: invalid JSON: {error.msg}. {_PLAN_FILE_HINT}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of 5,000 digits, nesting without end
        raise UsageError(f"{str(path)!r} is not valid JSON. {_PLAN_FILE_HINT}") from error
    return plan_from_json(data, str(path))


def plan_from_json(data: Any, source_name: str = "plan") -> Plan:
    """Return the plan in `data`, as `plan_to_json` writes it."""
    schema_version = data.get("schema") if isinstance(data, dict) else None
    if type(schema_version) is not int or schema_version != PLAN_SCHEMA_VERSION:
        raise UsageError(
            f"{source_name}: unsupported schema {repr(schema_version)[:80]}; this version reads {PLAN_SCHEMA_VERSION}."
            f" Create the plan again. {_PLAN_FILE_HINT}"
        )
    reader = _PlanReader(source_name)
    plan_fields = {field.name for field in fields(Plan)}
    for key in data:
        if key not in plan_fields | {"schema", "schemes"}:
            reader.add_mistake("", f"unknown key {key!r}")
    schemes = reader.read_schemes(data.get("schemes"))
    sites = reader.read_list("sites", data.get("sites"), lambda raw, path: reader.read_site(raw, path, schemes))
    skips = reader.read_list(
        "skips", data.get("skips", []), lambda raw, path: reader.validate(Skip, _with_full_references(raw), path)
    )
    steps = reader.read_list("steps", data.get("steps", []), lambda raw, path: reader.validate(Step, raw, path))
    plain_values = {key: value for key, value in data.items() if key in plan_fields.difference(_LISTS)}
    plan: Plan | None = reader.validate(Plan, {"rules": [], **plain_values}, "")
    if plan is None or reader.mistakes:
        lines = reader.mistakes[:MAX_MISTAKES]
        if len(reader.mistakes) > MAX_MISTAKES:
            lines.append(f"{source_name}: and {len(reader.mistakes) - MAX_MISTAKES} more.")
        raise UsageError("\n".join((*lines, f"Correct the plan, or create it again. {_PLAN_FILE_HINT}")))
    return replace(plan, steps=tuple(steps), sites=tuple(sites), skips=tuple(skips))


class _PlanReader:
    """Validates a plan's JSON and collects the mistakes."""

    def __init__(self, source_name: str) -> None:
        self._source_name = source_name
        self.mistakes: list[str] = []

    def add_mistake(self, path: str, problem: str) -> None:
        self.mistakes.append(f"{self._source_name}: {path}{': ' if path else ''}{problem}")

    def validate(self, target_type: Any, raw: Any, path: str) -> Any:
        """Validate `raw` as a `target_type`. Return None and record the mistakes if it is invalid."""
        try:
            return type_adapter(target_type).validate_json(json.dumps(raw), strict=True)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                inner_path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in detail["loc"])
                message = detail["msg"].removeprefix("Value error, ")
                self.add_mistake(f"{path}{inner_path}".removeprefix("."), message)
        except (ValueError, TypeError, RecursionError):
            self.add_mistake(path, "this is no valid JSON value")
        return None

    def read_list(self, name: str, raw: Any, read_entry: Any) -> list[Any]:
        """Return the valid entries of the list `raw`."""
        if not isinstance(raw, list):
            self.add_mistake("", f"{name!r} must be a list")
            return []
        entries = [read_entry(entry, f"{name}[{index}]") for index, entry in enumerate(raw)]
        return [entry for entry in entries if entry is not None]

    def read_schemes(self, raw: Any) -> dict[str, Scheme | None]:
        """Return the schemes by name, None for an invalid one."""
        if not isinstance(raw, dict):
            self.add_mistake("", "'schemes' must be a table")
            return {}
        schemes: dict[str, Scheme | None] = {}
        for name, raw_scheme in raw.items():
            path = f"schemes.{name}"
            named_scheme = {"name": name, **raw_scheme} if isinstance(raw_scheme, dict) else raw_scheme
            scheme = schemes[name] = self.validate(Scheme, named_scheme, path)
            if scheme is not None and scheme.family is None:
                self.add_mistake(path, "'family' is missing; it names the family of Q/DQ ops")
        return schemes

    def read_site(self, raw: Any, path: str, schemes: dict[str, Scheme | None]) -> Site | None:
        """Return a site whose scheme is one of `schemes`, None if it is invalid."""
        if not isinstance(raw, dict):
            self.add_mistake(path, "must be a table")
            return None
        name = raw.get("scheme")
        if not isinstance(name, str) or name not in schemes:
            self.add_mistake(f"{path}.scheme", f"{name!r} is not in 'schemes'")
            return None
        scheme = schemes[name]
        tensor = raw.get("tensor")
        graph_name = tensor.get("graph", "") if isinstance(tensor, dict) else ""
        # An invalid scheme is reported already. A substitute lets the rest of the site be validated.
        scheme_data = (
            _scheme_to_json(scheme, "") if scheme is not None else {"per": "channel" if "axis" in raw else "tensor"}
        )
        site: Site | None = self.validate(
            Site, {"graph": graph_name, **_with_full_references(raw), "scheme": scheme_data}, path
        )
        return site


def _with_full_references(raw: Any) -> Any:
    """Return `raw` with the name of the main graph filled in where its tensors and uses omit it."""
    if not isinstance(raw, dict):
        return raw

    def with_graph(reference: Any) -> Any:
        return {"graph": "", **reference} if isinstance(reference, dict) else reference

    filled = {key: with_graph(raw[key]) for key in ("tensor", "clone_of") if key in raw}
    filled |= {key: list(map(with_graph, raw[key])) for key in ("uses", "tie") if isinstance(raw.get(key), list)}
    return {**raw, **filled}


def check_plan(model: Model, plan: Plan) -> None:
    """Check that every site of `plan` can be applied to `model`. Edited plans are checked before anything else."""
    parameters = Parameters(model)
    claimed_uses: set[Use] = set()
    own_uses = {use for site in plan.sites if site.clone_of is None for use in site.uses}
    lines: list[str] = []
    for site in plan.sites:
        problem = next(
            chain(
                _find_missing_references(model, site),
                _find_scheme_conflicts(model, parameters, site, plan.targets),
                [f"it takes the scale of {site.clone_of}, which has no site"]
                if site.clone_of is not None and site.clone_of not in own_uses
                else [],
                (f"another site has {use} already" for use in site.uses if use in claimed_uses),
            ),
            None,
        )
        claimed_uses.update(site.uses)
        if problem is not None:
            lines.append(f"The plan's site of {site.tensor} is invalid: {problem}.")
    if lines:
        if len(lines) > MAX_MISTAKES:
            lines[MAX_MISTAKES:] = [f"There are {len(lines) - MAX_MISTAKES} more of these."]
        raise UsageError("\n".join((*lines, "Correct the plan, or create it again for this model.")))


def _find_missing_references(model: Model, site: Site) -> Iterator[str]:
    """Yield the references of the site that the model does not have."""
    if not model.main.has_tensor(site.tensor):
        yield "the model has no such tensor"
        return
    if site.graph not in model.graphs or not model.graphs[site.graph].can_read(site.tensor.graph):
        yield f"there is no graph {site.graph!r} that can read it"
        return
    if not site.uses or len(set(site.uses)) < len(site.uses):
        yield "it has no uses, or a use twice"
    for use in site.uses:
        if _tensor_read_at(model, use) != site.tensor:
            yield f"{use} does not read it"
        elif not model.graphs[use.graph].can_read(site.graph):
            yield f"{use} cannot read graph {site.graph!r}"
    for use in site.tie:
        if _tensor_read_at(model, use) is None:
            yield f"it is tied to {use}, which is not connected"


def _tensor_read_at(model: Model, use: Use) -> TensorRef | None:
    graph = model.graphs.get(use.graph)
    return graph.source_of(use) if graph is not None and use.op in graph else None


def _find_scheme_conflicts(  # noqa: C901  # a flat list of checks
    model: Model, parameters: Parameters, site: Site, targets: tuple[str, ...]
) -> Iterator[str]:
    """Yield the properties of the site that its tensor cannot have."""
    family = FAMILIES.get(site.scheme.family or "")
    output = model.output(site.tensor)
    is_parameter = parameters.is_parameter(site.tensor)
    shape = parameters.shape(site.tensor)
    if family is None or family.format != model.format:
        yield f"family {site.scheme.family!r} is not available for {model.format} models"
        return
    if site.parameter and not is_parameter:
        yield "it is no parameter; set 'parameter' to false"
    if (site.axis is not None) != (site.scheme.per != "tensor"):
        yield f"its scheme is per {site.scheme.per}, but its axis is {site.axis}"
        return
    if site.view is not None:
        readers = [model.graphs[use.graph].op(use.op) for use in site.uses]
        if shape is None or any(merged_channel_shape(reader, shape) != site.view for reader in readers):
            yield f"its consumers do not have their channels in the view {list(site.view)}"
            return
        shape = site.view
    if site.axis is not None and (shape is None or not 0 <= site.axis < len(shape)):
        yield f"it has no axis {site.axis}, or its rank is unknown"
        return
    channel_count = None if site.axis is None or shape is None else shape[site.axis]
    if site.scale is not None and channel_count is not None and len(site.scale) != channel_count:
        yield f"it has {channel_count} channels, but the plan gives {len(site.scale)} scales"
    if output.dtype is None:
        yield "its data type is only known at run time"
        return
    if not family.has_zero_points and any(site.zero_point or ()):
        yield f"{family.name} has no zero point; set it to 0"
    in_function = model.graphs[site.tensor.graph].is_function
    request = site.scheme.family_request(
        axis=site.axis,
        dtype=output.dtype,
        shape=shape,
        is_parameter=is_parameter,
        in_function=in_function,
        opset=model.opset,
        targets=targets,
    )
    reason = family.unsupported_reason(request)
    if reason is not None:
        yield reason
    elif 0 < model.opset < family.minimum_opset(request):
        yield f"its ops need opset {family.minimum_opset(request)}, but the prepared model has {model.opset}"
