"""Helpers that are independent of models: progress callbacks, notebook HTML, options, atomic files, text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

Progress = Callable[[str, int, int], None]
"""Callback with the name of the current stage, the completed units and the total units."""


def stage_progress(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """Return a callback that reports the completed and total units of the stage `name`, or None without `progress`."""
    return None if progress is None else partial(progress, name)


class HtmlRepresentation:
    """Base class of objects that a notebook shows as HTML when they are the last expression of a cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # Imported by name: the classes that inherit from this one are in packages below the drawing code.
        html: str = import_module("graphquant.visualize.pages").notebook_html(self)
        return html
