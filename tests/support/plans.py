"""Plans of a few sites."""

from typing import Any

import pytest

from graphquant.quantize import Plan, Site


def make_plan(*sites: Site, **changes: Any) -> Plan:
    """Return a plan of these sites for an ONNX model without digests; `changes` are other fields of the plan."""
    return Plan(**{"format": "onnx", "model": "", "prepared": "", "rules": (), "sites": sites, **changes})


def disable_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rules decide what is quantized, also in small models, where int8 does not pay."""
    monkeypatch.setattr("graphquant.backends.integer_placement.place_by_cost", lambda _model, plan, _table: plan)
