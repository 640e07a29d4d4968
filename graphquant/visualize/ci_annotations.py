"""Findings as SARIF 2.1.0 and as GitHub workflow commands."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from graphquant import __version__
from graphquant.errors import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphquant.backends.findings import FindingLevel
    from graphquant.backends.lint import LintCode


SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_LONE_SURROGATES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that represent no byte of a file name."""

_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


class Notice(NamedTuple):
    """A finding in a report.

    Attributes:
        code: Kind of finding, a key of the code table.
        level: Severity.
        path: Path of the model.
        site: Name of the op with its graph; "" for the whole model.
        op: Name of the op.
        message: The problem and its remedy.
    """

    code: str
    level: FindingLevel
    path: str
    site: str
    op: str
    message: str

    @property
    def text(self) -> str:
        """Message with the site before it."""
        return f"{self.site}: {self.message}" if self.site else self.message


def sarif_log(notices: Iterable[Notice], codes: Mapping[str, LintCode]) -> dict[str, Any]:
    """Return notices as one SARIF 2.1.0 log for code scanning."""
    rules = [
        {
            "id": code,
            "shortDescription": {"text": code_info.description},
            "defaultConfiguration": {"level": code_info.level},
        }
        for code, code_info in codes.items()
    ]
    indexes = {code: index for index, code in enumerate(codes)}
    results = [
        {
            "ruleId": notice.code,
            "ruleIndex": indexes[notice.code],
            "level": notice.level,
            "message": {"text": "\n".join(map(escape_unprintable, notice.text.split("\n")))},
            "locations": [_sarif_location(notice)],
        }
        for notice in notices
    ]
    driver = {"name": "graphquant", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _sarif_location(notice: Notice) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _artifact_uri(notice.path)}}}
    if notice.site:
        logical = {"name": notice.op, "fullyQualifiedName": notice.site, "kind": "element"}
        location["logicalLocations"] = [logical]
    return location


def _artifact_uri(path: str) -> str:
    """Return a path as a URI, an address unchanged; names may contain bytes that are not text."""
    from urllib.parse import quote

    scheme, separator, remainder = path.partition("://")
    path_ = remainder if separator else path
    encodable = _LONE_SURROGATES.sub("\N{REPLACEMENT CHARACTER}", path_.replace("\\", "/"))
    return scheme * bool(separator) + separator + quote(encodable.encode("utf-8", "surrogateescape"))


def github_annotations(notices: Iterable[Notice]) -> str:
    """Return notices as GitHub workflow commands."""
    lines = []
    for notice in notices:
        path, text = escape_annotation(notice.path, property_=True), escape_annotation(notice.text)
        lines.append(f"::{_GITHUB_LEVELS[notice.level]} file={path},title={notice.code}::{text}\n")
    return "".join(lines)


def escape_annotation(text: str, *, property_: bool = False) -> str:
    """Escape text for a workflow command, and remove terminal control characters."""
    text = "".join(char if char in "\r\n" else escape_unprintable(char) for char in text)
    for char, replacement in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(char, replacement)
    return text.replace(":", "%3A").replace(",", "%2C") if property_ else text
