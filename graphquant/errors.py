"""The errors a user can meet; each kind carries the exit code the command line ends with.

An error's first sentence says what is wrong here (file:line, op, tensor), the second what to do about it.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class GraphQuantError(Exception):
    """Anything graphquant refuses to do; `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 2


class UsageError(GraphQuantError):
    """The call cannot be carried out as asked: an option, a selector, the output path."""


class RuleError(GraphQuantError):
    """A rule file has mistakes; the message lists all of them, a line each, as `file:line: ...`."""


class ManifestError(GraphQuantError):
    """A manifest has mistakes; the message lists all of them, a line each, as `file:line: ...`."""


class DataError(GraphQuantError):
    """Calibration data does not fit the model."""


class NeedsDataError(GraphQuantError):
    """The plan has activations whose range only data can tell."""


class ModelError(GraphQuantError):
    """The model cannot be read, is not supported, or would not be valid after the change."""

    exit_code: ClassVar[int] = 3


class UnobservableTensorError(ModelError):
    """A tensor is where its framework shows nobody its values."""


class MissingDependencyError(GraphQuantError):
    """An optional package is not installed; the message has the line that installs it."""

    exit_code: ClassVar[int] = 4


class FindingsError(GraphQuantError):
    """The command did its work and what it found makes it fail."""

    exit_code: ClassVar[int] = 1


class InternalError(GraphQuantError):
    """An invariant of graphquant's own broke; the message names the room that must act."""

    exit_code: ClassVar[int] = 3


def escape_unprintable(text: str) -> str:
    """`text` with everything that a terminal would act on, line breaks too, spelled as Python does: names are data."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def did_you_mean(word: str, candidates: Iterable[str], *, limit: int = 3) -> str:
    """A sentence naming the known words closest to `word`, with a leading space, or nothing."""
    close = get_close_matches(word, list(candidates), n=limit, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
