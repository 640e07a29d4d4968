"""Helpers that are independent of models: progress callbacks, text and HTML of objects, deterministic TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import PurePath
from typing import Any

Progress = Callable[[str, int, int], None]
"""Callback with the name of the current stage, the completed units and the total units."""

MEGABYTE = 10**6  # the unit of progress on weights


def stage_progress(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """Return a callback that reports the completed and total units of the stage `name`, or None without `progress`."""
    return None if progress is None else partial(progress, name)


MAX_REPR_LENGTH = 80  # characters of a value in the text of an object
MAX_REPR_ITEMS = 4  # items of a collection in the text of an object
MAX_ITEM_LENGTH = 100  # characters of an item in the text of a long collection


class ShortTuple(tuple[Any, ...]):
    """Tuple whose text has its first items and the number of the others."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _first_items(map(_cut_repr, self), len(self), "()")


class ShortDict(dict[Any, Any]):
    """Dictionary whose text has its first items and the number of the others."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _first_items((f"{_cut_repr(key)}: {_cut_repr(value)}" for key, value in self.items()), len(self), "{}")


def _first_items(items: Iterable[str], count: int, brackets: str) -> str:
    lines = list(islice(items, MAX_REPR_ITEMS))
    lines += [f"... {count - len(lines)} more"] if count > len(lines) else []
    return brackets[0] + ",\n ".join(lines) + brackets[1]


def _cut_repr(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= MAX_ITEM_LENGTH else f"{text[: MAX_ITEM_LENGTH - 3]}..."


class HtmlRepresentation:
    """Base class of dataclasses that a terminal shows as a short text and a notebook as HTML.

    The generated text of a dataclass would contain weights and the whole graph. A subclass disables it: `repr=False`.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Shorten the text of long tuples."""
        for entry in fields(self):  # type: ignore[arg-type]  # subclasses
            value = getattr(self, entry.name)
            if type(value) is tuple and len(value) > MAX_REPR_ITEMS:
                object.__setattr__(self, entry.name, ShortTuple(value))

    def __repr__(self) -> str:
        values = ((entry.name, getattr(self, entry.name)) for entry in fields(self))  # type: ignore[arg-type]  # subclasses
        shown = [
            f"{name}={_short_repr(value)}"
            for name, value in values
            if value is not None and (value or not isinstance(value, Collection))
        ]
        return f"{type(self).__name__}({', '.join([*self._figure_texts(), *shown])})"

    def _figure_texts(self) -> list[str]:
        """Return the figures with which the text begins."""
        return []

    def _repr_html_(self) -> str:
        # Imported by name: the classes that inherit from this one are in packages below the drawing code.
        html: str = import_module("graphquant.visualize.pages").notebook_html(self)
        return html


def _short_repr(value: Any) -> str:
    """Return a scalar, or a short collection of scalars, and otherwise only the size or the type of the value."""
    items = value if isinstance(value, tuple | list | frozenset) else (value,)
    if len(items) <= MAX_REPR_ITEMS and all(isinstance(item, str | int | float | PurePath) for item in items):
        text = repr(value)
        return text if len(text) <= MAX_REPR_LENGTH else f"{text[: MAX_REPR_LENGTH - 3]}..."
    return f"<{len(value)} items>" if isinstance(value, Collection) else f"<{type(value).__name__}>"


ONEDNN_VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
"""Environment variable that enables TensorFlow's oneDNN kernels. Their rounding depends on memory alignment."""

ONEDNN_OFF = "0"


def disable_onednn() -> None:
    """Disable oneDNN in a TensorFlow that is imported later, unless the user has set the variable."""
    os.environ.setdefault(ONEDNN_VARIABLE, ONEDNN_OFF)
