"""The HTML representation that notebooks show of models, plans, results and comparisons."""

from __future__ import annotations

from importlib import import_module


class HtmlRepresentation:
    """Base of the classes that a notebook shows as HTML when they are the last expression of a cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the HTML of this object; the drawing code is imported when a notebook asks for it.

        It is imported by name because the classes that inherit from this one lie below the drawing code.
        """
        html: str = import_module("graphquant.visualize.notebook").notebook_html(self)
        return html
