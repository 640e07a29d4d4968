"""The plan as JSON: versioned, made to be read, edited and diffed, and read back with all its mistakes named."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from graphquant.errors import UsageError
from graphquant.plans.types import Plan, Site, Skip
from graphquant.prepare import Step
from graphquant.ruleset import Scheme

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.ir import TensorRef, Use

SCHEMA = 1
MAX_BYTES = 1 << 30

MAX_MISTAKES = 100
"""How many mistakes of one file are told at once."""

_KEYS = {
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
_PLAIN = ("format", "model", "prepared", "rules", "unused", "digest", "corrections")
_HINT = "Plans are what `graphquant plan --format json` writes."

_adapter = lru_cache(maxsize=None)(TypeAdapter)


def to_json(plan: Plan) -> dict[str, Any]:
    """`plan` as JSON data; `from_json` gives it back."""
    labels = _labels(plan)
    return {
        "schema": SCHEMA,
        "format": plan.format,
        "model": plan.model,
        "prepared": plan.prepared,
        "rules": list(plan.rules),
        "digest": plan.digest,
        "steps": [asdict(step) for step in plan.steps],
        "schemes": {label: _scheme(scheme, label) for scheme, label in labels.items()},
        "sites": [_site(site, labels[site.scheme]) for site in plan.sites],
        "skips": [_skip(skip) for skip in plan.skips],
        "unused": list(plan.unused),
        "corrections": list(plan.corrections),
    }


def read_plan(path: Path) -> Plan:
    """The plan in the JSON file at `path`.

    Raises:
        UsageError: The file cannot be read or has mistakes; all of them are listed.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)  # a device has no size, and no end
        if len(text) > MAX_BYTES:
            raise UsageError(f"{path} is larger than any plan. {_HINT}")
        data = json.loads(text.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"The plan {path} cannot be read: {error.strerror}. {_HINT}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: this is no JSON: {error.msg}. {_HINT}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of 5,000 digits, nesting without end
        raise UsageError(f"{str(path)!r} is no JSON text that can be read. {_HINT}") from error
    return from_json(data, str(path))


def from_json(data: Any, where: str = "plan") -> Plan:
    """The plan that `to_json` made `data` of.

    Raises:
        UsageError: `data` has mistakes; all of them are listed, each with its place.
    """
    given = data.get("schema") if isinstance(data, dict) else None
    if type(given) is not int or given != SCHEMA:
        said = repr(given)[:80]
        raise UsageError(f"{where}: schema is {said}, and this version reads {SCHEMA}. Make the plan anew. {_HINT}")
    reader = _Reader(where)
    for key in data:
        if key not in _KEYS:
            reader.mistake("", f"unknown key {key!r}")
    schemes = reader.schemes(data.get("schemes"))
    sites = reader.each("sites", data.get("sites"), lambda raw, place: reader.site(raw, place, schemes))
    skips = reader.each("skips", data.get("skips", []), lambda raw, place: reader.valid(Skip, _named(raw), place))
    steps = reader.each("steps", data.get("steps", []), lambda raw, place: reader.valid(Step, raw, place))
    plan = reader.valid(Plan, {"rules": [], **{key: data[key] for key in _PLAIN if key in data}}, "")
    if reader.mistakes or plan is None:
        raise UsageError(reader.report())
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
        corrections=plan.corrections,
    )


class _Reader:
    """Checks the parts of a plan's JSON and collects the mistakes."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.mistakes: list[str] = []

    def mistake(self, place: str, what: str) -> None:
        self.mistakes.append(f"{self._where}: {place}{': ' if place else ''}{what}")

    def report(self) -> str:
        """All mistakes, a line each, and what to do."""
        told = self.mistakes[:MAX_MISTAKES]
        if len(self.mistakes) > MAX_MISTAKES:
            told.append(f"{self._where}: and {len(self.mistakes) - MAX_MISTAKES} more.")
        return "\n".join((*told, f"Mend the plan, or make it anew. {_HINT}"))

    def valid(self, kind: Any, raw: Any, place: str) -> Any:
        """`raw` as a value of `kind`, None if it has mistakes."""
        try:
            return _adapter(kind).validate_json(json.dumps(raw), strict=True)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
                said = item["msg"].removeprefix("Value error, ")
                self.mistake(f"{place}{inner}".removeprefix("."), said)
        except (ValueError, TypeError, RecursionError):
            self.mistake(place, "this is no JSON value that can be read")
        return None

    def each(self, name: str, raw: Any, read: Any) -> list[Any]:
        """The items of the list `raw` that have no mistakes."""
        if not isinstance(raw, list):
            self.mistake("", f"{name!r} must be a list")
            return []
        found = [read(item, f"{name}[{index}]") for index, item in enumerate(raw)]
        return [item for item in found if item is not None]

    def schemes(self, raw: Any) -> dict[str, Scheme | None]:
        """The schemes by name, None where one has mistakes."""
        if not isinstance(raw, dict):
            self.mistake("", "'schemes' must be a table")
            return {}
        found: dict[str, Scheme | None] = {}
        for name, scheme in raw.items():
            place = f"schemes.{name}"
            made: Scheme | None = self.valid(
                Scheme, {"name": name, **scheme} if isinstance(scheme, dict) else scheme, place
            )
            if made is not None and made.family is None:
                self.mistake(place, "'family' is missing; it says which ops stand for the quantization")
            found[name] = made
        return found

    def site(self, raw: Any, place: str, schemes: dict[str, Scheme | None]) -> Site | None:
        """A site whose scheme is one of `schemes`."""
        if not isinstance(raw, dict):
            self.mistake(place, "must be a table")
            return None
        name = raw.get("scheme")
        if not isinstance(name, str) or name not in schemes:
            self.mistake(f"{place}.scheme", f"{name!r} is not in 'schemes'")
            return None
        scheme = schemes[name]
        tensor = raw.get("tensor")
        home = tensor.get("graph", "") if isinstance(tensor, dict) else ""
        # A scheme with mistakes was told already; the rest of the site is checked with one that goes with it.
        spelled = _scheme(scheme, "") if scheme is not None else {"per": "channel" if "axis" in raw else "tensor"}
        return self.valid(Site, {"graph": home, **_named(raw), "scheme": spelled}, place)  # type: ignore[no-any-return]  # pydantic's own


def _named(raw: Any) -> Any:
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


def _labels(plan: Plan) -> dict[Scheme, str]:
    """A name for each scheme of the plan: its own, or with the smallest free `_k` if two have one name."""
    labels: dict[Scheme, str] = {}
    taken: set[str] = set()
    for site in plan.sites:
        if site.scheme not in labels:
            name = label = site.scheme.name or "scheme"
            k = 1
            while label in taken:
                k += 1
                label = f"{name}_{k}"
            taken.add(label)
            labels[site.scheme] = label
    return labels


def _site(site: Site, scheme: str) -> dict[str, Any]:
    data: dict[str, Any] = {"tensor": _ref(site.tensor), "uses": [_use(use) for use in site.uses]}
    if site.graph != site.tensor.graph:
        data["graph"] = site.graph
    data |= {"scheme": scheme, "rule": site.rule, "why": site.why, "parameter": site.parameter}
    if site.axis is not None:
        data["axis"] = site.axis
    if site.view is not None:
        data["view"] = list(site.view)
    if site.tie:
        data["tie"] = [_use(use) for use in site.tie]
    if site.twin is not None:
        data["twin"] = _use(site.twin)
    given = {"range": site.range, "scale": site.scale, "zero_point": site.zero_point}
    return data | {key: list(value) for key, value in given.items() if value is not None}


def _skip(skip: Skip) -> dict[str, Any]:
    uses = [_use(use) for use in skip.uses]
    data = {"tensor": _ref(skip.tensor), "uses": uses, "rule": skip.rule, "reason": skip.reason}
    return {**data, "absorbed": True} if skip.absorbed else data


def _scheme(scheme: Scheme, label: str) -> dict[str, Any]:
    """What differs from the default scheme; the name only where it is not `label`."""
    default = {**asdict(Scheme()), "name": label}
    changed = {key: value for key, value in asdict(scheme).items() if value != default[key]}
    observe = {key: value for key, value in asdict(scheme.observe).items() if value is not None}
    if "args" in changed:
        changed["args"] = {key: value for key, value in changed["args"].items() if value is not None}
    return {**changed, "observe": observe["name"] if len(observe) == 1 else observe}


def _ref(tensor: TensorRef) -> dict[str, Any]:
    return {**({"graph": tensor.graph} if tensor.graph else {}), "op": tensor.op, "port": tensor.port}


def _use(use: Use) -> dict[str, Any]:
    return {**({"graph": use.graph} if use.graph else {}), "op": use.op, "slot": use.slot}
