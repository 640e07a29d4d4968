"""The viewer page: packed data, one script and one style sheet, without network access.

Names come from models and may contain anything. They occur only in the packed data. The script writes them as text
nodes and onto the canvas, and the Content-Security-Policy allows only this script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from graphquant.errors import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


VIEWER_SCRIPTS = (
    "data",
    "scene",
    "frames",
    "heatmap",
    "drawing",
    "minimap",
    "hit_test",
    "panel",
    "search",
    "input",
    "start",
)
"""Files of the script, in order; they share one scope."""


def viewer_page(data: Mapping[str, Any]) -> str:
    """Return the viewer page; deterministic."""
    return "\n".join(_viewer_lines(data)) + "\n"


def _viewer_lines(data: Mapping[str, Any]) -> Iterator[str]:
    script, style = _viewer_script(), _viewer_file("style.css")
    policy = f"default-src 'none'; script-src {csp_digest(script)}; style-src {csp_digest(style)}"
    yield "<!DOCTYPE html>"
    yield f'<html lang="en"><head><meta charset="utf-8"><title>{escape(escape_unprintable(str(data["title"])))}</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<style>{style}</style></head>"
    yield "<body><noscript>This page draws a model with JavaScript, which is disabled.</noscript>"
    yield f'<script id="data" type="application/octet-stream">{_pack_data(data)}</script>'
    yield f"<script>{script}</script></body></html>"


def _viewer_script() -> str:
    """Return the concatenated script."""
    return '"use strict";\n' + "\n".join(_viewer_file(f"{name}.js") for name in VIEWER_SCRIPTS)


def _viewer_file(name: str) -> str:
    return files("graphquant.visualize").joinpath("viewer", name).read_text("utf-8")


def csp_digest(text: str) -> str:
    """Return the hash by which a Content-Security-Policy allows a script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _pack_data(data: Mapping[str, Any]) -> str:
    """Return the data as deflated JSON in base64, whose letters have no meaning in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
