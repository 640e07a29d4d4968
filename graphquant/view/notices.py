"""What a command found, a notice each, as SARIF 2.1.0 and as the commands of a GitHub workflow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from graphquant import __version__
from graphquant.errors import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphquant.backends.lint import Code
    from graphquant.backends.types import Level

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_NO_BYTES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that stand for no byte of a name."""

_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}


class Notice(NamedTuple):
    """Something that was found.

    Attributes:
        code: What kind it is, a key of the codes that it is told with.
        level: How bad it is.
        path: The model's file.
        where: The op, with its graph; "" for the whole model.
        op: The op's name alone.
        says: What is the matter, and what to do.
    """

    code: str
    level: Level
    path: str
    where: str
    op: str
    says: str

    @property
    def text(self) -> str:
        """What is said, with where."""
        return f"{self.where}: {self.says}" if self.where else self.says


def sarif(notices: Iterable[Notice], codes: Mapping[str, Code]) -> dict[str, Any]:
    """All notices as one SARIF 2.1.0 log, for code scanning."""
    rules = [
        {"id": code, "shortDescription": {"text": told.explains}, "defaultConfiguration": {"level": told.level}}
        for code, told in codes.items()
    ]
    places = {code: place for place, code in enumerate(codes)}
    results = [
        {
            "ruleId": one.code,
            "ruleIndex": places[one.code],
            "level": one.level,
            "message": {"text": "\n".join(map(printable, one.text.split("\n")))},
            "locations": [_location(one)],
        }
        for one in notices
    ]
    driver = {"name": "graphquant", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _location(notice: Notice) -> dict[str, Any]:
    located: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(notice.path)}}}
    if notice.where:
        named = {"name": notice.op, "fullyQualifiedName": notice.where, "kind": "element"}
        located["logicalLocations"] = [named]
    return located


def _uri(path: str) -> str:
    """A path, or an address as it is, as a URI; names may be of bytes that are no text."""
    from urllib.parse import quote

    scheme, mark, rest = path.partition("://")
    where = rest if mark else path
    named = _NO_BYTES.sub("\N{REPLACEMENT CHARACTER}", where.replace("\\", "/"))
    return scheme * bool(mark) + mark + quote(named.encode("utf-8", "surrogateescape"))


def github(notices: Iterable[Notice]) -> str:
    """The notices as commands that a GitHub workflow shows beside the file."""
    return "".join(
        f"::{_GITHUB[one.level]} file={escaped(one.path, property_=True)},title={one.code}::{escaped(one.text)}\n"
        for one in notices
    )


def escaped(text: str, *, property_: bool = False) -> str:
    """`text` as a workflow command takes it, and without what a terminal would act on."""
    text = "".join(char if char in "\r\n" else printable(char) for char in text)
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(char, code)
    return text.replace(":", "%3A").replace(",", "%2C") if property_ else text
