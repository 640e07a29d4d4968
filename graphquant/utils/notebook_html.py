"""HTML representations of objects in notebooks."""

from __future__ import annotations

from importlib import import_module


class HtmlRepresentation:
    """Base class of objects that a notebook shows as HTML when they are the last expression of a cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # Imported by name: the classes that inherit from this one are in packages below the drawing code.
        html: str = import_module("graphquant.visualize.notebook").notebook_html(self)
        return html
