"""The plan as JSON, and its validation against a model.

The JSON is versioned and made to be read, edited and diffed. Reading reports all mistakes at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from graphquant.errors import UsageError
from graphquant.ir import Parameters, TensorRef, Use, merged_channel_shape
from graphquant.qdq import FAMILIES
from graphquant.quantize.plan import Plan, Site, Skip
from graphquant.quantize.preparation_undo import Step
from graphquant.rules import Scheme

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from graphquant.ir import Model


PLAN_SCHEMA_VERSION = 2
MAX_PLAN_BYTES = 1 << 30

MAX_MISTAKES = 100
"""Mistakes of one file that are listed in one error."""

_PLAN_KEYS = {
    "schema",
    "format",
    "model",
    "prepared",
    "rules",
    "steps",
    "schemes",
    "sites",
    "skips",
    "unused",
    "digest",
    "algorithms",
}
_PLAIN_KEYS = ("format", "model", "prepared", "rules", "unused", "digest", "algorithms")
_PLAN_FILE_HINT = "`graphquant plan --format json` writes plans."

_cached_type_adapter = lru_cache(maxsize=None)(TypeAdapter)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return `plan` as JSON data. `plan_from_json` reads it back."""
    scheme_labels = _label_schemes(plan)
    return {
        "schema": PLAN_SCHEMA_VERSION,
        "format": plan.format,
        "model": plan.model,
        "prepared": plan.prepared,
        "rules": list(plan.rules),
        "digest": plan.digest,
        "steps": [asdict(step) for step in plan.steps],
        "schemes": {label: _scheme_to_json(scheme, label) for scheme, label in scheme_labels.items()},
        "sites": [_site_to_json(site, scheme_labels[site.scheme]) for site in plan.sites],
        "skips": [_skip_to_json(skip) for skip in plan.skips],
        "unused": list(plan.unused),
        "algorithms": list(plan.algorithms),
    }


def read_plan(path: Path) -> Plan:
    """Read the plan in the JSON file at `path`.

    Raises:
        UsageError: The file cannot be read or has mistakes. The error lists all of them.
    """
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
    """Return the plan in `data`, as `plan_to_json` writes it.

    Raises:
        UsageError: `data` has mistakes. The error lists all of them, each with its JSON path.
    """
    schema_version = data.get("schema") if isinstance(data, dict) else None
    if type(schema_version) is not int or schema_version != PLAN_SCHEMA_VERSION:
        shown_version = repr(schema_version)[:80]
        raise UsageError(
            f"{source_name}: unsupported schema {shown_version}; this version reads {PLAN_SCHEMA_VERSION}."
            f" Create the plan again. {_PLAN_FILE_HINT}"
        )
    reader = _PlanReader(source_name)
    for key in data:
        if key not in _PLAN_KEYS:
            reader.add_mistake("", f"unknown key {key!r}")
    schemes = reader.read_schemes(data.get("schemes"))
    sites = reader.read_list("sites", data.get("sites"), lambda raw, path: reader.read_site(raw, path, schemes))
    skips = reader.read_list(
        "skips", data.get("skips", []), lambda raw, path: reader.validate(Skip, _with_full_references(raw), path)
    )
    steps = reader.read_list("steps", data.get("steps", []), lambda raw, path: reader.validate(Step, raw, path))
    plan = reader.validate(Plan, {"rules": [], **{key: data[key] for key in _PLAIN_KEYS if key in data}}, "")
    if reader.mistakes or plan is None:
        raise UsageError(reader.format_mistakes())
    return Plan(
        format=plan.format,
        model=plan.model,
        prepared=plan.prepared,
        rules=plan.rules,
        steps=tuple(steps),
        sites=tuple(sites),
        skips=tuple(skips),
        unused=plan.unused,
        digest=plan.digest,
        algorithms=plan.algorithms,
    )


class _PlanReader:
    """Validates a plan's JSON and collects the mistakes."""

    def __init__(self, source_name: str) -> None:
        self._source_name = source_name
        self.mistakes: list[str] = []

    def add_mistake(self, path: str, problem: str) -> None:
        self.mistakes.append(f"{self._source_name}: {path}{': ' if path else ''}{problem}")

    def format_mistakes(self) -> str:
        """Format all mistakes, one a line, and the remedy."""
        lines = self.mistakes[:MAX_MISTAKES]
        if len(self.mistakes) > MAX_MISTAKES:
            lines.append(f"{self._source_name}: and {len(self.mistakes) - MAX_MISTAKES} more.")
        return "\n".join((*lines, f"Correct the plan, or create it again. {_PLAN_FILE_HINT}"))

    def validate(self, target_type: Any, raw: Any, path: str) -> Any:
        """Validate `raw` as a `target_type`. Return None and record the mistakes if it is invalid."""
        try:
            return _cached_type_adapter(target_type).validate_json(json.dumps(raw), strict=True)
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
            scheme: Scheme | None = self.validate(
                Scheme, {"name": name, **raw_scheme} if isinstance(raw_scheme, dict) else raw_scheme, path
            )
            if scheme is not None and scheme.family is None:
                self.add_mistake(path, "'family' is missing; it names the family of Q/DQ ops")
            schemes[name] = scheme
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
        return self.validate(Site, {"graph": graph_name, **_with_full_references(raw), "scheme": scheme_data}, path)  # type: ignore[no-any-return]  # pydantic's own


def _with_full_references(raw: Any) -> Any:
    """Return `raw` with all fields of its tensors and uses filled in."""
    if not isinstance(raw, dict):
        return raw
    filled = dict(raw)
    if isinstance(raw.get("tensor"), dict):
        filled["tensor"] = {"graph": "", **raw["tensor"]}
    if isinstance(raw.get("clone_of"), dict):
        filled["clone_of"] = {"graph": "", **raw["clone_of"]}
    for key in ("uses", "tie"):
        if isinstance(raw.get(key), list):
            filled[key] = [{"graph": "", **use} if isinstance(use, dict) else use for use in raw[key]]
    return filled


def _label_schemes(plan: Plan) -> dict[Scheme, str]:
    """Return a label for each scheme: its name, with the smallest free suffix `_k` if two schemes share it."""
    labels: dict[Scheme, str] = {}
    used_labels: set[str] = set()
    for site in plan.sites:
        if site.scheme not in labels:
            name = label = site.scheme.name or "scheme"
            suffix = 1
            while label in used_labels:
                suffix += 1
                label = f"{name}_{suffix}"
            used_labels.add(label)
            labels[site.scheme] = label
    return labels


def _site_to_json(site: Site, scheme_label: str) -> dict[str, Any]:
    data: dict[str, Any] = {"tensor": _tensor_to_json(site.tensor), "uses": [_use_to_json(use) for use in site.uses]}
    if site.graph != site.tensor.graph:
        data["graph"] = site.graph
    data |= {"scheme": scheme_label, "rule": site.rule, "why": site.why, "parameter": site.parameter}
    if site.axis is not None:
        data["axis"] = site.axis
    if site.view is not None:
        data["view"] = list(site.view)
    if site.tie:
        data["tie"] = [_use_to_json(use) for use in site.tie]
    if site.clone_of is not None:
        data["clone_of"] = _use_to_json(site.clone_of)
    explicit_values = {"range": site.range, "scale": site.scale, "zero_point": site.zero_point}
    return data | {key: list(value) for key, value in explicit_values.items() if value is not None}


def _skip_to_json(skip: Skip) -> dict[str, Any]:
    uses = [_use_to_json(use) for use in skip.uses]
    data = {
        "tensor": _tensor_to_json(skip.tensor),
        "uses": uses,
        "rule": skip.rule,
        "reason": skip.reason,
        "code": str(skip.code),
    }
    return {**data, "fused": True} if skip.fused else data


def _scheme_to_json(scheme: Scheme, label: str) -> dict[str, Any]:
    """Return the fields that differ from the default scheme. The name is omitted if it equals `label`."""
    default = {**asdict(Scheme()), "name": label}
    changed = {key: value for key, value in asdict(scheme).items() if value != default[key]}
    observe = {key: value for key, value in asdict(scheme.observe).items() if value is not None}
    if "args" in changed:
        changed["args"] = {key: value for key, value in changed["args"].items() if value is not None}
    return {**changed, "observe": observe["name"] if len(observe) == 1 else observe}


def _tensor_to_json(tensor: TensorRef) -> dict[str, Any]:
    return {**({"graph": tensor.graph} if tensor.graph else {}), "op": tensor.op, "port": tensor.port}


def _use_to_json(use: Use) -> dict[str, Any]:
    return {**({"graph": use.graph} if use.graph else {}), "op": use.op, "slot": use.slot}


# Validate a plan against the model that it is applied to. Edited plans are validated before anything else happens.

MAX_MISTAKES = 100
"""Mistakes of one plan that are listed in one error."""


def check_plan(model: Model, plan: Plan) -> None:
    """Check that every site of `plan` can be applied to `model`.

    Args:
        model: The prepared model that the plan names.
        plan: The plan.

    Raises:
        UsageError: Sites refer to tensors, uses or graphs that the model lacks, or ask for schemes that their tensors
            cannot have. The error lists all of them.
    """
    parameters = Parameters(model)
    claimed_uses: set[Use] = set()
    own_uses = {use for site in plan.sites if site.clone_of is None for use in site.uses}
    mistakes: list[str] = []
    for site in plan.sites:
        problem = next(_find_missing_references(model, site), "") or next(
            _find_scheme_conflicts(model, parameters, site), ""
        )
        if not problem and site.clone_of is not None and site.clone_of not in own_uses:
            problem = f"it takes the scale of {site.clone_of}, which has no site"
        repeated_use = next((use for use in site.uses if use in claimed_uses), None)
        if not problem and repeated_use is not None:
            problem = f"another site has {repeated_use} already"
        claimed_uses.update(site.uses)
        if problem:
            mistakes.append(f"The plan's site of {site.tensor} is invalid: {problem}.")
    if mistakes:
        overflow_line = (
            [f"There are {len(mistakes) - MAX_MISTAKES} more of these."] if len(mistakes) > MAX_MISTAKES else []
        )
        raise UsageError(
            "\n".join(
                [*mistakes[:MAX_MISTAKES], *overflow_line, "Correct the plan, or create it again for this model."]
            )
        )


def _find_missing_references(model: Model, site: Site) -> Iterator[str]:
    """Yield the references of the site that the model does not have."""
    tensor_graph = model.graphs.get(site.tensor.graph)
    if (
        tensor_graph is None
        or site.tensor.op not in tensor_graph
        or not 0 <= site.tensor.port < len(tensor_graph.op(site.tensor.op).outputs)
    ):
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


def _find_scheme_conflicts(model: Model, parameters: Parameters, site: Site) -> Iterator[str]:  # noqa: C901  # a flat list of checks
    """Yield the properties of the site that its tensor cannot have."""
    family = FAMILIES.get(site.scheme.family or "")
    output = model.output(site.tensor)
    is_parameter = parameters.is_parameter(site.tensor)
    shape = output.shape
    if shape is None and is_parameter:
        shape = model.output(parameters.root_tensor(site.tensor)).shape
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
        axis=site.axis, dtype=output.dtype, shape=shape, is_parameter=is_parameter, in_function=in_function
    )
    reason = family.unsupported_reason(request)
    if reason is not None:
        yield reason
    elif 0 < model.opset < family.minimum_opset(request):
        yield f"its ops need opset {family.minimum_opset(request)}, but the prepared model has {model.opset}"
