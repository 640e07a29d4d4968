"""The plan as JSON: versioned, made to be read, edited and diffed, and read back with all its mistakes named."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from graphquant.errors import UsageError
from graphquant.ir import TensorRef, Use
from graphquant.plans.types import Plan, Site, Skip
from graphquant.prepare import Step
from graphquant.ruleset import Scheme

SCHEMA = 1
MAX_BYTES = 1 << 30

_KEYS = {"schema", "format", "model", "prepared", "rules", "steps", "schemes", "sites", "skips", "unused"}


def to_json(plan: Plan) -> dict[str, Any]:
    """`plan` as JSON data; `from_json` gives it back."""
    schemes: dict[Scheme, str] = {}
    for site in plan.sites:
        if site.scheme not in schemes:
            schemes[site.scheme] = _free(site.scheme.name or "scheme", set(schemes.values()))
    return {
        "schema": SCHEMA,
        "format": plan.format,
        "model": plan.model,
        "prepared": plan.prepared,
        "rules": list(plan.rules),
        "steps": [asdict(step) for step in plan.steps],
        "schemes": {name: _scheme(scheme) for scheme, name in schemes.items()},
        "sites": [_site(site, schemes[site.scheme]) for site in plan.sites],
        "skips": [
            {"tensor": _ref(skip.tensor), "uses": [_use(u) for u in skip.uses], "rule": skip.rule, "reason": skip.reason}
            for skip in plan.skips
        ],
        "unused": list(plan.unused),
    }


def read_plan(path: Path) -> Plan:
    """The plan in the JSON file at `path`.

    Raises:
        UsageError: The file cannot be read or has mistakes; all of them are listed.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is larger than any plan. Give a file that `graphquant plan --format json` wrote.")
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"The plan {path} cannot be read: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: this is no JSON: {error.msg}. Plans are what `graphquant plan --format json` writes.") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON text. Plans are what `graphquant plan --format json` writes.") from error
    return from_json(data, str(path))


def from_json(data: Any, where: str = "plan") -> Plan:
    """The plan that `to_json` made `data` of.

    Raises:
        UsageError: `data` has mistakes; all of them are listed, each with its place.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        given = data.get("schema") if isinstance(data, dict) else None
        raise UsageError(f"{where}: schema is {given!r}, and this version reads {SCHEMA}. Make the plan anew with `graphquant plan --format json`.")
    mistakes = [f"{where}: unknown key {key!r}" for key in data if key not in _KEYS]
    schemes: dict[str, Scheme] = {}
    for name, scheme in _table(data.get("schemes"), "schemes", where, mistakes).items():
        found = _validate(Scheme, {**scheme, "name": name} if isinstance(scheme, dict) else scheme, f"{where}: schemes.{name}", mistakes)
        if found is not None:
            schemes[name] = found
    sites = []
    for index, raw in enumerate(_list(data.get("sites"), "sites", where, mistakes)):
        place = f"{where}: sites[{index}]"
        if not isinstance(raw, dict):
            mistakes.append(f"{place}: must be a table")
        elif raw.get("scheme") not in schemes:
            mistakes.append(f"{place}.scheme: {raw.get('scheme')!r} is not in 'schemes'")
        else:
            tensor = raw.get("tensor")
            home = tensor.get("graph", "") if isinstance(tensor, dict) else ""
            site = _validate(Site, {"graph": home, **_named(raw), "scheme": schemes[raw["scheme"]]}, place, mistakes)
            if site is not None:
                sites.append(site)
    rest = {
        kind: [_validate(made, _named(raw), f"{where}: {kind}[{i}]", mistakes) for i, raw in enumerate(_list(data.get(kind, []), kind, where, mistakes))]
        for kind, made in (("skips", Skip), ("steps", Step))
    }
    plain = {key: data.get(key) for key in ("format", "model", "prepared", "rules", "unused") if key in data}
    plan = _validate(Plan, {"rules": [], **plain}, where, mistakes)
    if mistakes or plan is None:
        raise UsageError("\n".join(mistakes))
    return Plan(
        format=plan.format,
        model=plan.model,
        prepared=plan.prepared,
        rules=plan.rules,
        steps=tuple(step for step in rest["steps"] if step is not None),
        sites=tuple(sites),
        skips=tuple(skip for skip in rest["skips"] if skip is not None),
        unused=plan.unused,
    )


def _validate(kind: Any, data: Any, place: str, mistakes: list[str]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
            mistakes.append(f"{place}{inner}: {item['msg'].removeprefix('Value error, ')}")
        return None


def _list(value: Any, name: str, where: str, mistakes: list[str]) -> list[Any]:
    if isinstance(value, list):
        return value
    mistakes.append(f"{where}: {name!r} must be a list")
    return []


def _table(value: Any, name: str, where: str, mistakes: list[str]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    mistakes.append(f"{where}: {name!r} must be a table")
    return {}


def _named(raw: Any) -> Any:
    """`raw` with its tensors and uses spelled with all of their fields."""
    if not isinstance(raw, dict):
        return raw
    filled = dict(raw)
    if isinstance(raw.get("tensor"), dict):
        filled["tensor"] = {"graph": "", **raw["tensor"]}
    for key in ("uses", "tie"):
        if isinstance(raw.get(key), list):
            filled[key] = [{"graph": "", **use} if isinstance(use, dict) else use for use in raw[key]]
    return filled


def _site(site: Site, scheme: str) -> dict[str, Any]:
    data: dict[str, Any] = {"tensor": _ref(site.tensor), "uses": [_use(use) for use in site.uses]}
    if site.graph != site.tensor.graph:
        data["graph"] = site.graph
    data |= {"scheme": scheme, "rule": site.rule, "why": site.why, "parameter": site.parameter}
    if site.axis is not None:
        data["axis"] = site.axis
    if site.tie:
        data["tie"] = [_use(use) for use in site.tie]
    for key in ("range", "scale", "zero_point"):
        if getattr(site, key) is not None:
            data[key] = list(getattr(site, key))
    return data


def _scheme(scheme: Scheme) -> dict[str, Any]:
    default = asdict(Scheme())
    changed = {key: value for key, value in asdict(scheme).items() if key != "name" and value != default[key]}
    observe = {key: value for key, value in asdict(scheme.observe).items() if value is not None}
    return {**changed, "observe": observe["name"] if len(observe) == 1 else observe}


def _ref(tensor: TensorRef) -> dict[str, Any]:
    return {**({"graph": tensor.graph} if tensor.graph else {}), "op": tensor.op, "port": tensor.port}


def _use(use: Use) -> dict[str, Any]:
    return {**({"graph": use.graph} if use.graph else {}), "op": use.op, "slot": use.slot}


def _free(name: str, taken: set[str]) -> str:
    label, k = name, 1
    while label in taken:
        k += 1
        label = f"{name}_{k}"
    return label
