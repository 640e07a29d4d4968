"""What differs between two models, as text and as JSON data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from graphquant.errors import printable
from graphquant.view.data import SCHEMA
from graphquant.view.text import counted, plain

if TYPE_CHECKING:
    from graphquant.differences import Change, Differences

SIGNS = {"op-added": "+", "site-added": "+", "op-removed": "-", "site-removed": "-"}
"""What stands before a line; the others are changes."""

STYLES = {"+": "green", "-": "red", "~": "yellow"}

WORDS = {
    "model": ("change of the whole model", "changes of the whole model"),
    "op-added": ("op added", "ops added"),
    "op-removed": ("op removed", "ops removed"),
    "op-renamed": ("op renamed", "ops renamed"),
    "op-changed": ("op of another type", "ops of another type"),
    "attribute": ("attribute changed", "attributes changed"),
    "wiring": ("input read from elsewhere", "inputs read from elsewhere"),
    "weight": ("weight changed", "weights changed"),
    "site-added": ("site added", "sites added"),
    "site-removed": ("site removed", "sites removed"),
    "site-changed": ("site quantized otherwise", "sites quantized otherwise"),
    "plan": ("change of the whole plan", "changes of the whole plan"),
}
"""How each kind is counted."""

NOTABLE = 0.01
"""Relative change of a scale from which it is counted as one."""


def diff_view(found: Differences, *, stat: bool) -> RenderableType:
    """A line for each difference, and one that counts them; with `stat` that one alone."""
    parts = [] if stat else [_line(change) for change in found.changes]
    return Group(*parts, plain(summary(found), "bold"))


def summary(found: Differences) -> str:
    """The differences counted."""
    if not found:
        return "No difference."
    said = [f"{count} {WORDS[kind][count != 1]}" for kind, count in found.counts.items() if kind in WORDS]
    scales = [change.size for change in found.changes if change.kind == "scale"]
    large = sum(size > NOTABLE for size in scales)
    if large:
        said.append(f"{counted(large, 'scale')} changed by more than 1%")
    if len(scales) > large:
        rest = len(scales) - large
        said.append(f"{counted(rest, 'scale')} changed by less")
    if found.rerouted:
        said.append(f"{counted(found.rerouted, 'use')} rerouted")
    return f"{', '.join(said)}."


def diff_json(found: Differences) -> dict[str, Any]:
    """The same as JSON data."""
    return {
        "schema": SCHEMA,
        "counts": found.counts,
        "rerouted": found.rerouted,
        "changes": [
            {
                "kind": change.kind,
                "where": change.where,
                "says": change.says,
                "size": change.size if math.isfinite(change.size) else None,
            }
            for change in found.changes
        ],
    }


def _line(change: Change) -> Text:
    sign = SIGNS.get(change.kind, "~")
    line = Text(f"{sign} {change.kind} ", style=STYLES[sign])
    line.append(printable(f"{change.where}: {change.says}"), style="default")
    return line
