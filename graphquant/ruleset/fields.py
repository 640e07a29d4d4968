"""What the fields of rule files have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, StrictInt

from graphquant.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

FROZEN = ConfigDict(extra="forbid")

_MAX_TEXT = 500
"""Longest text of a selector or of a pattern's line, which also bounds what a regex can cost."""

Text = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)]
Count = Annotated[StrictInt, Field(ge=0)]


def known_words(what: str, words: Iterable[str], known: Iterable[str]) -> None:
    """Raises a ValueError that names the first of `words` that is not `known`."""
    for word in words:
        if word not in known:
            raise ValueError(f"there is no {what} {word!r}.{did_you_mean(word, known) or _listed(known)}")


def _listed(known: Iterable[str]) -> str:
    return f" Known are {', '.join(sorted(known))}."
