"""Errors that users can see. Each class has the exit code of the command line.

The first sentence of a message states the problem (file:line, op, tensor), the second one the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class GraphQuantError(Exception):
    """Base class of all errors that graphquant raises on purpose; `exit_code` is the exit code of the command line."""

    exit_code: ClassVar[int] = 2


class UsageError(GraphQuantError):
    """An argument is invalid: an option, a selector, an output path."""


class CallError(UsageError, TypeError):
    """A call has an unknown keyword argument, or lacks an argument. Python's own error for it is a TypeError."""


class OutputExistsError(UsageError):
    """The output exists, and it may not be replaced without --force."""


class RuleError(GraphQuantError):
    """A rule file has mistakes. The message lists all of them, one per line, as `file:line: ...`."""


class ManifestError(GraphQuantError):
    """A manifest has mistakes. The message lists all of them, one per line, as `file:line: ...`."""


class DataError(GraphQuantError):
    """Calibration data does not fit the model."""


class NeedsDataError(GraphQuantError):
    """The plan has activations whose ranges require calibration data."""


class ModelError(GraphQuantError):
    """The model cannot be read, is not supported, or would become invalid by the change."""

    exit_code: ClassVar[int] = 3


class InvalidModelError(ModelError):
    """The model's runtime refuses the model as inconsistent, whatever ops and libraries are installed."""


class UnobservableTensorError(ModelError):
    """The framework cannot return the values of a tensor."""


class MissingDependencyError(GraphQuantError):
    """An optional package is not installed. The message has the command that installs it."""

    exit_code: ClassVar[int] = 4


class FindingsError(GraphQuantError):
    """The command succeeded, and its findings make it fail."""

    exit_code: ClassVar[int] = 1


class EmptyResultError(FindingsError):
    """No tensor would be quantized. Nothing is written."""


class InternalError(GraphQuantError):
    """An internal invariant of graphquant is broken. The message names the module that must be fixed."""

    exit_code: ClassVar[int] = 3


def escape_unprintable(text: str) -> str:
    """Escape line breaks and control characters. Names in models are data and must not control a terminal."""
    if text.isprintable():  # nearly always, and much faster
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return a sentence, with a leading space, that names the candidates closest to `word`; "" if none is close."""
    from difflib import get_close_matches  # imported for errors only

    close = get_close_matches(word, list(candidates), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
