"""Types of the arguments of public functions, read from their annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_CLASS_MODULES = {
    "Callable": "collections.abc",
    "Dataset": "graphquant.calibration.data",
    "FixedPoint": "graphquant.api.graph_editor",
    "Model": "graphquant.ir",
    "Path": "pathlib",
    "Plan": "graphquant.quantize",
    "Progress": "graphquant.utils",
    "Result": "graphquant.api.result",
    "Sequence": "collections.abc",
    "Stats": "graphquant.calibration.stats",
    "Tensor": "graphquant.api.graph_editor",
}
"""Modules of the types that parameters are annotated with.

They are loaded at the first call, because most modules import them for annotations only.
"""

_FILE_CLASSES = ("Model", "Plan", "Stats")  # classes whose objects files contain


@cache
def _load_class(name: str) -> type[Any]:
    loaded: type[Any] = getattr(import_module(_CLASS_MODULES[name]), name)
    return loaded


@cache
def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the annotated parameters of `function`, with their classes."""
    annotations = {name: text for name, text in function.__annotations__.items() if name != "return"}
    names = {
        name
        for text in annotations.values()
        for name in (compile(text, "annotation", "eval").co_names if isinstance(text, str) else ())
    }
    classes = {name: _load_class(name) for name in names & _CLASS_MODULES.keys()}
    holder = SimpleNamespace(__annotations__=annotations)  # without the result, whose class is not needed
    return get_type_hints(holder, globalns={**inspect.unwrap(function).__globals__, **classes})


def is_accepted(value: object, expected: Any) -> bool:
    """Return True if `value` has the type `expected`: a class, a union, or a generic type, whose items may be anything.

    Where a model or a path is expected, any object is accepted, because `load` also reads objects of TensorFlow.
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in {Union, UnionType}:
        is_model_source = {_load_class("Model"), Path}.issubset(arguments)
        return is_model_source or any(is_accepted(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    accepted = origin or expected
    if accepted is Callable:
        return callable(value)
    if accepted is Sequence:  # a text is none, although it consists of texts
        return isinstance(value, list | tuple)
    if accepted is float:
        return isinstance(value, int | float)
    return accepted is Any or isinstance(value, NoneType if accepted is None else accepted)


def require_file_or_object(value: object) -> object:
    """Return `value` if it is a path, or an object that a file may contain; raise ValueError if it is not."""
    if not isinstance(value, str | Path | None) and not isinstance(value, tuple(map(_load_class, _FILE_CLASSES))):
        message = f"it is of the type {type(value).__name__}, not {' | '.join(('str', 'Path', *_FILE_CLASSES))}"
        raise ValueError(message)  # noqa: TRY004  # pydantic reports ValueErrors
    return value
