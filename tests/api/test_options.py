"""Options are declared once: the command line, the signatures, the manifest and the documentation agree."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import click
import pytest

import graphquant as gq
from graphquant.batch.manifest_schema import OMITTED_OPTIONS, EntrySettings
from graphquant.batch.types import ENTRY_OPTIONS, Gates
from graphquant.cli import main
from graphquant.errors import UsageError
from graphquant.utils.options import (
    CalibrateOptions,
    CompareBounds,
    CompareOptions,
    ExplainOptions,
    InsertOptions,
    PlanOptions,
    option_fields,
    resolve_options,
)

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = {
    "plan": (PlanOptions,),
    "insert": (InsertOptions,),
    "calibrate": (CalibrateOptions,),
    "compare": (CompareOptions, CompareBounds),
    "explain": (ExplainOptions,),
}
FUNCTIONS = {
    "plan": PlanOptions,
    "insert": InsertOptions,
    "calibrate": CalibrateOptions,
    "compare": CompareOptions,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_each_option(command: str) -> None:
    """A command has the flag of each option, with its default."""
    params = {param.name: param for param in main.commands[command].params if isinstance(param, click.Option)}
    for options_class in COMMANDS[command]:
        for option in option_fields(options_class):
            if not option.form.python_only:
                assert option.flag in params[option.name].opts, option.name
                if not params[option.name].multiple:
                    assert option.default in (None, params[option.name].default), option.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_have_each_option(name: str) -> None:
    """The signature and the docstring of a function list each option with its default."""
    function = getattr(gq, name)
    parameters = inspect.signature(function).parameters
    for option in option_fields(FUNCTIONS[name]):
        assert parameters[option.name].default == option.default
        assert option.description in function.__doc__


def test_batch_has_each_option_of_insert_or_a_reason() -> None:
    """The manifest and the batch command have each option of insert, except those with a reason."""
    names = {option.name for option in option_fields(InsertOptions)}
    manifest = set(EntrySettings.__dataclass_fields__)
    command = {param.name for param in main.commands["batch"].params}
    assert names - manifest == set(OMITTED_OPTIONS)
    assert all(OMITTED_OPTIONS.values())
    assert names - set(OMITTED_OPTIONS) <= command
    gates = {gate.name for gate in fields(Gates)}
    assert names - set(OMITTED_OPTIONS) <= gates | set(ENTRY_OPTIONS)


def options_table(options_class: type) -> str:
    """Return a Markdown table of the options, for the documentation."""
    rows = ["| Python | command line | default | meaning |", "| --- | --- | --- | --- |"]
    for entry in option_fields(options_class):
        value = f" {entry.form.metavar}" if entry.form.metavar else ""
        flag = "" if entry.form.python_only else f"`{entry.flag}{value}`".replace("|", "\\|")
        default = "" if entry.default in (None, (), {}) else f"`{entry.default!r}`"
        rows.append(f"| `{entry.name}` | {flag} | {default} | {entry.description} |")
    return "\n".join(rows)


@pytest.mark.parametrize("options_class", [*FUNCTIONS.values(), ExplainOptions, CompareBounds])
def test_the_documentation_has_each_table(options_class: type) -> None:
    """docs/options.md has the table of each options model."""
    assert options_table(options_class) in (DOCS / "options.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("value", "share"), [(0.99, 0.99), ("99%", 0.99), ("0.5", 0.5), (0, 0), (1, 1), ("0.5%", 0.005)]
)
@pytest.mark.parametrize("name", ["min_agreement", "max_accuracy_drop"])
def test_shares(name: str, value: object, share: float) -> None:
    """A share is a number from 0 to 1, or a percentage with its sign."""
    assert getattr(InsertOptions(**{name: value}), name) == pytest.approx(share)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_agreement", 99),
        ("min_agreement", "101%"),
        ("min_agreement", -0.1),
        ("min_agreement", float("nan")),
        ("max_accuracy_drop", 1.5),
        ("max_accuracy_drop", True),
        ("min_sqnr", float("inf")),
        ("rules", 3),
        ("include", None),
        ("samples", 0),
        ("optimize", "speed"),
        ("max_memory", "3XB"),
        ("min_sqnr", "off"),
        ("search_time", "0s"),
        ("search_time", "-1x"),
        ("search_time", "infx"),
        ("search_time", True),
        ("search_time", "10 minutes"),
    ],
)
def test_invalid_values_are_rejected(name: str, value: object) -> None:
    """An invalid value is a usage error that names the option, from Python as well."""
    with pytest.raises(UsageError, match=rf"{name} is invalid: "):
        InsertOptions(**{name: value})


@pytest.mark.parametrize(("value", "limit"), [("10x", "10x"), (90, "90s"), ("2.50 S", "2.5s"), (" .5X", "0.5x")])
def test_search_times(value: object, limit: str) -> None:
    """A time of a search is a number of seconds, or a factor with its sign."""
    assert InsertOptions(search_time=value).search_time == limit


@pytest.mark.parametrize(("value", "target"), [(None, None), ("none", "none"), ("25", 25.0), (25, 25.0)])
def test_targets(value: object, target: object) -> None:
    """The minimum SQNR is a number, "none" to disable the default target, or None for it."""
    assert InsertOptions(min_sqnr=value).min_sqnr == target


def test_unknown_options_are_rejected() -> None:
    """An unknown keyword argument is a TypeError with a suggestion, and an error of graphquant."""
    with pytest.raises(TypeError, match=r"'min_sqrn'.*min_sqnr") as raised:
        resolve_options(InsertOptions, None, {"min_sqrn": 30})
    assert isinstance(raised.value, gq.GraphQuantError)


@pytest.mark.parametrize("arguments", [{}, {"model": "m.onnx", "dta": 1}])
def test_calls_that_do_not_fit_the_signature(arguments: dict[str, object]) -> None:
    """A missing argument and an unknown keyword are errors of graphquant, and of the type that Python uses."""
    for function in (gq.insert, gq.plan, gq.calibrate, gq.strip):
        with pytest.raises(gq.GraphQuantError) as raised:
            function(**arguments)
        assert isinstance(raised.value, TypeError)


def test_keywords_override_an_options_object() -> None:
    """Keyword arguments override the values of an options object."""
    base = InsertOptions(data="random:8", min_sqnr=30)
    assert resolve_options(InsertOptions, base, {"min_sqnr": 40}) == InsertOptions(data="random:8", min_sqnr=40)
