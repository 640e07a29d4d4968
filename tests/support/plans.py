"""Plans of a few sites."""

from typing import Any

from graphquant.quantize import Plan, Site


def make_plan(*sites: Site, **changes: Any) -> Plan:
    """Return a plan of these sites for an ONNX model without digests; `changes` are other fields of the plan."""
    return Plan(**{"format": "onnx", "model": "", "prepared": "", "rules": (), "sites": sites, **changes})
