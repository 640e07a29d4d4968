"""How models, plans and what is made of them show themselves in a notebook.

The rooms that own them know nothing of drawing: the package tells here who draws, and `view` is imported when something
is to be drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_drawers: list[Callable[[object], str]] = []


def draw_with(drawer: Callable[[object], str]) -> None:
    """Has `drawer` make the HTML of everything that is `Drawn`."""
    _drawers[:] = [drawer]


class Drawn:
    """What shows itself in a notebook, where it is the last thing of a cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """HTML, which notebooks ask for by this name."""
        return _drawers[0](self)


__all__ = ["Drawn", "draw_with"]
