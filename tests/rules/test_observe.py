"""A scheme's observer takes the arguments that the observer declares."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest
from pydantic import ValidationError

from graphquant.observers import OBSERVERS
from graphquant.rules import ObserverConfig, rule_file_schema


def test_explicit_and_default_arguments() -> None:
    """Given values win, values with a default may be missing, and numbers become floats."""
    assert ObserverConfig(name="percentile").arguments == {"percentile": 99.999}
    assert ObserverConfig(name="percentile", percentile=99).arguments == {"percentile": 99.0}
    assert ObserverConfig(name="fixed", low=0, high=1).arguments == {"low": 0.0, "high": 1.0}
    assert ObserverConfig(name="auto").arguments == {}


def test_equal_observers_are_equal() -> None:
    """Observers compare and hash by what they say."""
    with_integers, with_floats = (
        ObserverConfig(name="fixed", low=0, high=1),
        ObserverConfig(name="fixed", low=0.0, high=1.0),
    )
    assert (with_integers, hash(with_integers)) == (with_floats, hash(with_floats))
    assert {key: value for key, value in asdict(with_integers).items() if value is not None} == {
        "name": "fixed",
        "low": 0.0,
        "high": 1.0,
    }


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"name": "percentile", "percentile": 101}, "less_than_equal", "100$"),
        ({"name": "percentile", "percentile": 49.9}, "greater_than_equal", "50$"),
        ({"name": "percentile", "percentile": float("nan")}, "less_than_equal", "100$"),
        ({"name": "fixed-point", "exponent": 127}, "less_than_equal", "126$"),
        ({"name": "fixed-point", "exponent": 0.5}, "int_type", ""),
        ({"name": "mse", "percentile": 99.0}, "value_error", "'mse' .*'percentile'"),
        ({"name": "fixed", "low": 1.0}, "value_error", "'fixed' .*'high'"),
        ({"name": "mse", "percent": 99.0}, "unexpected_keyword_argument", ""),
    ],
)
def test_mistakes(arguments: dict[str, float], kind: str, message: str) -> None:
    """Numbers out of bounds, of the wrong kind, unknown or missing are refused."""
    with pytest.raises(ValidationError) as caught:
        ObserverConfig(**arguments)
    (mistake,) = caught.value.errors()
    assert mistake["type"] == kind
    assert re.search(message, mistake["msg"])


def test_schema_knows_every_argument() -> None:
    """Editors see each argument with its bounds, and which observers may stand alone."""
    definitions = rule_file_schema()["$defs"]
    arguments = {name for definition in OBSERVERS.values() for name in definition.arguments}
    properties = definitions["Observe"]["properties"]
    assert set(properties) == {"name", *arguments}
    assert (properties["percentile"]["minimum"], properties["percentile"]["maximum"]) == (50, 100)
    bare_names = definitions["Scheme"]["properties"]["observe"]["anyOf"][0]["enum"]
    assert "percentile" in bare_names
    assert "fixed" not in bare_names
