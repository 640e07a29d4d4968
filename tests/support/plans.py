"""Plans of a few sites."""

from importlib import import_module
from typing import Any

import pytest

from graphquant.quantize import Plan, Site


def make_plan(*sites: Site, **changes: Any) -> Plan:
    """Return a plan of these sites for an ONNX model without digests; `changes` are other fields of the plan."""
    return Plan(**{"format": "onnx", "model": "", "prepared": "", "rules": (), "sites": sites, **changes})


def disable_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rules decide what is quantized, also in small models, where int8 does not pay."""
    module = import_module("graphquant.api.plan")  # as an attribute, this name is the function `plan`
    monkeypatch.setattr(module, "place_by_cost", lambda _model, plan, _table: plan)
