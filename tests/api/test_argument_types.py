"""Arguments of public functions with wrong types."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphquant as gq
from graphquant.errors import GraphQuantError
from graphquant.utils.argument_types import is_accepted, parameter_types
from graphquant.utils.options import python_words

SAMPLES = Path(__file__).parents[2] / "sample_models"
MODEL, DATA = SAMPLES / "digits_cnn.onnx", SAMPLES / "digits_cnn_calib.npz"
ARGUMENTS: dict[str, dict[str, Any]] = {
    "calibrate": {"model": MODEL, "plan": None, "data": DATA, "options": None, "samples": 4},
    "check": {"model": MODEL},
    "check_data": {"model": MODEL, "data": DATA},
    "compare": {"model": MODEL, "quantized_model": MODEL, "data": DATA, "samples": 4, "sites": False},
    "diff": {"first": MODEL, "second": MODEL},
    "insert": {"model": MODEL, "options": None, "data": DATA, "samples": 4, "validate": False},
    "convert_to_tflite": {"result": None, "path": None},
    "freeze": {"model": None},
    "load": {"source": MODEL},
    "load_stats": {"path": "missing.gqs"},
    "merge_stats": {"stats_list": []},
    "plan": {"model": MODEL, "options": None},
    "save": {"model": gq.Model(format="onnx"), "path": "out.onnx"},
    "strip": {"model": MODEL},
    "to_tf": {"model": None},
}
"""Arguments of each function. Those that need a result are None, which is wrong, too."""


class Unknown:
    """A class that no option accepts."""

    def __repr__(self) -> str:
        return "Unknown()"


NUMBERS = st.one_of(st.integers(max_value=-2), st.floats(allow_nan=False, max_value=-1.5))
WRONG_VALUES = st.one_of(
    st.just(b"\xff"),
    st.builds(Unknown),
    st.builds(lambda: np.zeros(2)),
    st.lists(st.builds(Unknown), min_size=1, max_size=2),
    st.dictionaries(st.integers(), st.builds(Unknown), min_size=1, max_size=2),
)
OPTIONS = [
    (name, option)
    for name in ARGUMENTS
    for option in inspect.signature(getattr(gq, name)).parameters
    if name != "convert_to_tflite" or option == "result"
]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_wrong_types_name_the_option(name: str, option: str, data: st.DataObject) -> None:
    """A value of a wrong type is an error of graphquant, which names the option, or the value where it is a model."""
    function, is_decibels = getattr(gq, name), option == "min_sqnr"
    value = data.draw(WRONG_VALUES if is_decibels else st.one_of(NUMBERS, WRONG_VALUES))
    positional_only = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_ONLY
    ]
    arguments = {**ARGUMENTS[name], option: value}
    positional = [arguments.pop(parameter) for parameter in positional_only]
    with pytest.raises(GraphQuantError) as caught:
        function(*positional, **arguments)
    assert option.removesuffix("_list") in str(caught.value) or type(value).__name__ in str(caught.value)
    assert "--" not in str(caught.value)


COMMAND_WORD = re.compile(r"(?<![\w-])(--[a-z][a-z-]*|-o)(?![\w-])")
COMMAND = re.compile(r"`[^`]*`|(graphquant|python) [a-z]+ [^`\n]*")  # a whole command, which a user can run


def message_texts() -> Iterator[tuple[str, str]]:
    """Yield the texts in modules of the public functions that name an option, with values as X."""
    package = Path(gq.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if (
            path.relative_to(package).parts[0] in {"cli", "batch", "visualize", "__main__.py"}
            or path.name == "options.py"
        ):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)}
        nested = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
        for node in ast.walk(tree):
            values = node.values if isinstance(node, ast.JoinedStr) else [node]
            if id(node) not in nested and isinstance(node, ast.JoinedStr | ast.Constant):
                parts = [str(value.value) if isinstance(value, ast.Constant) else "X" for value in values]
                if COMMAND_WORD.search(COMMAND.sub("", "".join(parts))) and "".join(parts) not in docstrings:
                    yield f"{path.name}:{node.lineno}", "".join(parts)


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def test_messages_name_arguments() -> None:
    """Each option that a message names has an argument, which errors of the public functions name instead."""
    texts = dict(message_texts())
    assert len(texts) > 30
    left = {place: python_words(text) for place, text in texts.items()}
    assert {place: text for place, text in left.items() if COMMAND_WORD.search(COMMAND.sub("", text))} == {}


def test_errors_name_arguments_in_python_and_options_in_commands(cli: Callable[..., Any], tmp_path: Path) -> None:
    """The same error names the argument of a public function, and the option of a command."""
    (tmp_path / "out.onnx").touch()
    calls: tuple[tuple[Callable[[], object], tuple[Any, ...], str, str], ...] = (
        (lambda: gq.insert(MODEL), ("insert", MODEL, "--dry-run"), f"gq.insert({str(MODEL)!r}, data='", "--data"),
        (
            lambda: gq.load(MODEL, tags="x"),
            ("inspect", MODEL, "--tags", "x"),
            "tags=",
            "--tags",
        ),
        (
            lambda: gq.insert(MODEL, data="random:4").save(tmp_path / "out.onnx"),
            ("insert", MODEL, "--data", "random:4", "-o", tmp_path / "out.onnx"),
            "force=True",
            "--force",
        ),
        (lambda: gq.strip(MODEL), ("strip", MODEL, "--check", MODEL), "everything=True", "--all"),
    )
    for function, command, argument, option in calls:
        with pytest.raises(GraphQuantError) as caught:
            function()
        assert argument in str(caught.value)
        assert not COMMAND_WORD.search(COMMAND.sub("", str(caught.value)))
        assert option in cli(*command, code=2).stderr


VALID = {
    "path": "missing/out",
    "force": False,
    "ignore_ts": False,
    "ignore_ops": False,
    "positive_filter": None,
    "bits": 8,
    "exponent": -4,
    "family": None,
    "round": None,
    "tensor": gq.TensorRef("", "x"),
    "producer": "x",
    "name": "x",
    "scope": "x",
    "quantizer": gq.FixedPoint(8, -4),
}
METHODS: dict[str, tuple[str, ...]] = {
    "Result.save": ("path", "force"),
    "Model.save": ("path", "force"),
    "Stats.save": ("path",),
    "Stats.missing_reason": ("tensor",),
    "FixedPoint": ("bits", "exponent", "family", "round"),
    "insert_quant_op": ("graph", "producer", "name", "quantizer"),
    "graph_editor.searched_graphs": ("graph",),
    "graph_editor.as_operations": ("selection", "ignore_ts"),
    "graph_editor.as_tensors": ("selection", "ignore_ops"),
    "graph_editor.select_ops": ("graph", "positive_filter"),
    "graph_editor.select_ts": ("graph", "positive_filter"),
    "graph_editor.get_name_scope_ops": ("ops", "scope"),
    "graph_editor.get_generating_ops": ("ts",),
    "graph_editor.get_consuming_ops": ("ts",),
    "graph_editor.get_tensor_by_name": ("graph", "name"),
    "graph_editor.find_tensors": ("graph", "name"),
    "graph_editor.reroute_ts": ("ts0", "ts1"),
    "graph_editor.swap_ts": ("ts0", "ts1"),
    "graph_editor.make_quant_op": ("graph", "tensor", "name", "quantizer"),
}
"""Options of public methods and of functions in modules; those without a valid value below take a model."""


@pytest.fixture(scope="module")
def result() -> gq.Result:
    """Return a result with statistics."""
    return gq.insert(MODEL, data="random:4", validate=False)


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in METHODS for option in METHODS[name]])
@settings(max_examples=12, deadline=None)
@given(value=st.one_of(st.floats(allow_nan=False, max_value=-1.5), WRONG_VALUES))
def test_wrong_types_of_methods(result: gq.Result, name: str, option: str, value: Any) -> None:
    """A wrong type is an error of graphquant that names the option or the type, in methods and modules as well."""
    owner, _, method = name.rpartition(".")
    owners = {"": gq, "Result": result, "Model": result.model, "Stats": result.stats}
    function = getattr(owners.get(owner, gq.graph_editor), method)
    arguments = {key: VALID.get(key, result.model) for key in METHODS[name]}
    if method == "make_quant_op":
        arguments["tensor"] = gq.graph_editor.get_tensor_by_name(result.source, "max_pool:0")
    with pytest.raises(GraphQuantError) as caught:
        function(**{**arguments, option: value})
    element = next(iter(value)) if isinstance(value, list | dict | bytes) or hasattr(value, "shape") else value
    assert any(word in str(caught.value) for word in (option, type(value).__name__, type(element).__name__))


@pytest.mark.parametrize("name", ["calibrate", "check_data", "compare", "insert"])
def test_data_may_be_a_path(name: str) -> None:
    """A path is accepted as data, with the result of its text."""
    function, arguments = getattr(gq, name), {**ARGUMENTS[name]}
    positional = [arguments.pop("model"), *([arguments.pop("options")] if name == "insert" else [])]
    by_path, by_text = (function(*positional, **{**arguments, "data": data}) for data in (DATA, str(DATA)))
    if name == "insert":
        by_path, by_text = by_path.model.digest, by_text.model.digest
    elif name == "calibrate":
        by_path, by_text = by_path.runs, by_text.runs
    assert by_path == by_text


def test_types_of_all_public_functions_are_known() -> None:
    """The annotations of each public function can be resolved, also where a module imports a class for them only."""
    functions = [value for value in map(gq.__getattr__, gq.__all__[1:]) if inspect.isfunction(value)]
    assert len(functions) >= len(ARGUMENTS)
    for function in functions:
        types = parameter_types(function)
        assert "return" not in types
        assert types.keys() == inspect.get_annotations(function).keys() - {"return"}


@pytest.mark.parametrize(
    ("value", "expected", "accepted"),
    [
        (1, int | None, True),
        (None, int | None, True),
        ("a", int | None, False),
        ("a", Sequence[str], False),
        (["a"], Sequence[str], True),
        (print, Callable[[str], None] | None, True),
        (1, Callable[[str], None] | None, False),
        (1, float, True),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False),
        (object(), gq.Model | str | Path, True),  # `load` checks it
        (object(), gq.Stats | str | Path, False),
        (object(), Any, True),
    ],
)
def test_accepted_values(value: Any, expected: Any, accepted: bool) -> None:
    """A value is accepted if it has a type of the union; items of a generic type are not read."""
    assert is_accepted(value, expected) == accepted
