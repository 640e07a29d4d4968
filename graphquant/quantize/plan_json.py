"""The plan as JSON: versioned, made to be read, edited and diffed, and read back with all its mistakes named."""

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


PLAN_SCHEMA_VERSION = 1
MAX_PLAN_BYTES = 1 << 30

MAX_MISTAKES = 100
"""How many mistakes of one file are told at once."""

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
    "corrections",
}
_PLAIN_KEYS = ("format", "model", "prepared", "rules", "unused", "digest", "corrections")
_PLAN_FILE_HINT = "Plans are what `graphquant plan --format json` writes."

_cached_type_adapter = lru_cache(maxsize=None)(TypeAdapter)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """`plan` as JSON data; `plan_from_json` gives it back."""
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
        "corrections": list(plan.algorithms),
    }


def read_plan(path: Path) -> Plan:
    """The plan in the JSON file at `path`.

    Raises:
        UsageError: The file cannot be read or has mistakes; all of them are listed.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PLAN_BYTES + 1)  # a device has no size, and no end
        if len(text) > MAX_PLAN_BYTES:
            raise UsageError(f"{path} is larger than any plan. {_PLAN_FILE_HINT}")
        data = json.loads(text.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"The plan {path} cannot be read: {error.strerror}. {_PLAN_FILE_HINT}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: this is no JSON: {error.msg}. {_PLAN_FILE_HINT}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of 5,000 digits, nesting without end
        raise UsageError(f"{str(path)!r} is no JSON text that can be read. {_PLAN_FILE_HINT}") from error
    return plan_from_json(data, str(path))


def plan_from_json(data: Any, source_name: str = "plan") -> Plan:
    """The plan that `plan_to_json` made `data` of.

    Raises:
        UsageError: `data` has mistakes; all of them are listed, each with its place.
    """
    schema_version = data.get("schema") if isinstance(data, dict) else None
    if type(schema_version) is not int or schema_version != PLAN_SCHEMA_VERSION:
        shown_version = repr(schema_version)[:80]
        raise UsageError(
            f"{source_name}: schema is {shown_version}, and this version reads {PLAN_SCHEMA_VERSION}. Make the plan anew. {_PLAN_FILE_HINT}"
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
    """Checks the parts of a plan's JSON and collects the mistakes."""

    def __init__(self, source_name: str) -> None:
        self._source_name = source_name
        self.mistakes: list[str] = []

    def add_mistake(self, path: str, problem: str) -> None:
        self.mistakes.append(f"{self._source_name}: {path}{': ' if path else ''}{problem}")

    def format_mistakes(self) -> str:
        """All mistakes, a line each, and what to do."""
        lines = self.mistakes[:MAX_MISTAKES]
        if len(self.mistakes) > MAX_MISTAKES:
            lines.append(f"{self._source_name}: and {len(self.mistakes) - MAX_MISTAKES} more.")
        return "\n".join((*lines, f"Mend the plan, or make it anew. {_PLAN_FILE_HINT}"))

    def validate(self, target_type: Any, raw: Any, path: str) -> Any:
        """`raw` as a value of `target_type`, None if it has mistakes."""
        try:
            return _cached_type_adapter(target_type).validate_json(json.dumps(raw), strict=True)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                inner_path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in detail["loc"])
                message = detail["msg"].removeprefix("Value error, ")
                self.add_mistake(f"{path}{inner_path}".removeprefix("."), message)
        except (ValueError, TypeError, RecursionError):
            self.add_mistake(path, "this is no JSON value that can be read")
        return None

    def read_list(self, name: str, raw: Any, read_entry: Any) -> list[Any]:
        """The items of the list `raw` that have no mistakes."""
        if not isinstance(raw, list):
            self.add_mistake("", f"{name!r} must be a list")
            return []
        entries = [read_entry(entry, f"{name}[{index}]") for index, entry in enumerate(raw)]
        return [entry for entry in entries if entry is not None]

    def read_schemes(self, raw: Any) -> dict[str, Scheme | None]:
        """The schemes by name, None where one has mistakes."""
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
                self.add_mistake(path, "'family' is missing; it says which ops stand for the quantization")
            schemes[name] = scheme
        return schemes

    def read_site(self, raw: Any, path: str, schemes: dict[str, Scheme | None]) -> Site | None:
        """A site whose scheme is one of `read_schemes`."""
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
        # A scheme with mistakes was told already; the rest of the site is checked with one that goes with it.
        scheme_data = (
            _scheme_to_json(scheme, "") if scheme is not None else {"per": "channel" if "axis" in raw else "tensor"}
        )
        return self.validate(Site, {"graph": graph_name, **_with_full_references(raw), "scheme": scheme_data}, path)  # type: ignore[no-any-return]  # pydantic's own


def _with_full_references(raw: Any) -> Any:
    """`raw` with its tensors and uses spelled with all of their fields."""
    if not isinstance(raw, dict):
        return raw
    filled = dict(raw)
    if isinstance(raw.get("tensor"), dict):
        filled["tensor"] = {"graph": "", **raw["tensor"]}
    if isinstance(raw.get("twin"), dict):
        filled["twin"] = {"graph": "", **raw["twin"]}
    for key in ("uses", "tie"):
        if isinstance(raw.get(key), list):
            filled[key] = [{"graph": "", **use} if isinstance(use, dict) else use for use in raw[key]]
    return filled


def _label_schemes(plan: Plan) -> dict[Scheme, str]:
    """A name for each scheme of the plan: its own, or with the smallest free `_k` if two have one name."""
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
        data["twin"] = _use_to_json(site.clone_of)
    explicit_values = {"range": site.range, "scale": site.scale, "zero_point": site.zero_point}
    return data | {key: list(value) for key, value in explicit_values.items() if value is not None}


def _skip_to_json(skip: Skip) -> dict[str, Any]:
    uses = [_use_to_json(use) for use in skip.uses]
    data = {"tensor": _tensor_to_json(skip.tensor), "uses": uses, "rule": skip.rule, "reason": skip.reason}
    return {**data, "absorbed": True} if skip.fused else data


def _scheme_to_json(scheme: Scheme, label: str) -> dict[str, Any]:
    """What differs from the default scheme; the name only where it is not `label`."""
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


# A plan against the model it is applied to: an edited plan is checked before anything is done with it.

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
    claimed_uses: set[Use] = set()
    own_uses = {use for site in plan.sites if site.clone_of is None for use in site.uses}
    mistakes: list[str] = []
    for site in plan.sites:
        problem = next(_find_missing_references(model, site), "") or next(
            _find_scheme_conflicts(model, parameters, site), ""
        )
        if not problem and site.clone_of is not None and site.clone_of not in own_uses:
            problem = f"its scale is that of {site.clone_of}, which has no site of its own"
        repeated_use = next((use for use in site.uses if use in claimed_uses), None)
        if not problem and repeated_use is not None:
            problem = f"{repeated_use} has a site before it already"
        claimed_uses.update(site.uses)
        if problem:
            mistakes.append(f"The plan's site of {site.tensor} cannot be: {problem}.")
    if mistakes:
        overflow_line = (
            [f"There are {len(mistakes) - MAX_MISTAKES} more of these."] if len(mistakes) > MAX_MISTAKES else []
        )
        raise UsageError(
            "\n".join([*mistakes[:MAX_MISTAKES], *overflow_line, "Mend the plan, or make it anew for this model."])
        )


def _find_missing_references(model: Model, site: Site) -> Iterator[str]:
    """What the site names and the model does not have."""
    tensor_graph = model.graphs.get(site.tensor.graph)
    if (
        tensor_graph is None
        or site.tensor.op not in tensor_graph
        or not 0 <= site.tensor.port < len(tensor_graph.op(site.tensor.op).outputs)
    ):
        yield "the model has no such tensor"
        return
    if site.graph not in model.graphs or not model.graphs[site.graph].can_read(site.tensor.graph):
        yield f"there is no graph {site.graph!r} that sees it"
        return
    if not site.uses or len(set(site.uses)) < len(site.uses):
        yield "it has no uses, or one of them twice"
    for use in site.uses:
        if _tensor_read_at(model, use) != site.tensor:
            yield f"{use} does not read it"
        elif not model.graphs[use.graph].can_read(site.graph):
            yield f"{use} does not see graph {site.graph!r}"
    for use in site.tie:
        if _tensor_read_at(model, use) is None:
            yield f"it is tied to {use}, which reads nothing"


def _tensor_read_at(model: Model, use: Use) -> TensorRef | None:
    graph = model.graphs.get(use.graph)
    return graph.source_of(use) if graph is not None and use.op in graph else None


def _find_scheme_conflicts(model: Model, parameters: Parameters, site: Site) -> Iterator[str]:  # noqa: C901  # a flat list of checks
    """What the site wants and its tensor cannot have."""
    family = FAMILIES.get(site.scheme.family or "")
    output = model.output(site.tensor)
    is_parameter = parameters.is_parameter(site.tensor)
    shape = output.shape
    if shape is None and is_parameter:
        shape = model.output(parameters.root_tensor(site.tensor)).shape
    if family is None or family.format != model.format:
        yield f"{model.format} models have no family {site.scheme.family!r}"
        return
    if site.parameter and not is_parameter:
        yield "it is no parameter, whose value is known; say 'parameter': false"
    if (site.axis is not None) != (site.scheme.per != "tensor"):
        yield f"its scheme is per {site.scheme.per}, and its axis {site.axis}"
        return
    if site.view is not None:
        readers = [model.graphs[use.graph].op(use.op) for use in site.uses]
        if shape is None or any(merged_channel_shape(reader, shape) != site.view for reader in readers):
            yield f"its consumers do not see channels in the view {list(site.view)}"
            return
        shape = site.view
    if site.axis is not None and (shape is None or not 0 <= site.axis < len(shape)):
        yield f"it has no axis {site.axis}, or it is not known how many there are"
        return
    channel_count = None if site.axis is None or shape is None else shape[site.axis]
    if site.scale is not None and channel_count is not None and len(site.scale) != channel_count:
        yield f"it has {channel_count} channels and the plan gives {len(site.scale)} scales"
    if output.dtype is None:
        yield "its data type is not known without running the model"
        return
    if not family.has_zero_points and any(site.zero_point or ()):
        yield f"{family.name} has no zero point, and the plan gives one; give 0"
    in_function = model.graphs[site.tensor.graph].is_function
    request = site.scheme.family_request(
        axis=site.axis, dtype=output.dtype, shape=shape, is_parameter=is_parameter, in_function=in_function
    )
    reason = family.unsupported_reason(request)
    if reason is not None:
        yield reason
    elif 0 < model.opset < family.minimum_opset(request):
        yield f"its ops need opset {family.minimum_opset(request)}, and the model is prepared for {model.opset}"
