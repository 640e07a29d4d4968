"""A scheme's observer takes the arguments that the observer declares."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from pydantic import ValidationError

from graphquant.ruleset import Observe, schema
from graphquant.sketch import OBSERVERS


def test_arguments_as_given_and_by_default() -> None:
    """What is given wins; what has a default may be left out; numbers come as floats."""
    assert Observe(name="percentile").arguments == {"percentile": 99.999}
    assert Observe(name="percentile", percentile=99).arguments == {"percentile": 99.0}
    assert Observe(name="fixed", low=0, high=1).arguments == {"low": 0.0, "high": 1.0}
    assert Observe(name="auto").arguments == {}


def test_equal_ones_are_equal() -> None:
    """Observers compare and hash by what they say."""
    one, other = Observe(name="fixed", low=0, high=1), Observe(name="fixed", low=0.0, high=1.0)
    assert (one, hash(one)) == (other, hash(other))
    assert {key: value for key, value in asdict(one).items() if value is not None} == {
        "name": "fixed",
        "low": 0.0,
        "high": 1.0,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "percentile", "percentile": 101}, "less than or equal to 100"),
        ({"name": "percentile", "percentile": 49.9}, "greater than or equal to 50"),
        ({"name": "percentile", "percentile": float("nan")}, "less than or equal to 100"),
        ({"name": "fixed-point", "exponent": 127}, "less than or equal to 126"),
        ({"name": "fixed-point", "exponent": 0.5}, "valid integer"),
        ({"name": "mse", "percentile": 99.0}, "the observer 'mse' has no 'percentile'; it takes no argument"),
        ({"name": "fixed", "low": 1.0}, "the observer 'fixed' needs 'high'; give it a number"),
        ({"name": "mse", "percent": 99.0}, "Unexpected keyword argument"),
    ],
)
def test_mistakes(arguments: dict[str, float], message: str) -> None:
    """Numbers out of bounds, of the wrong kind, unknown or missing are refused."""
    with pytest.raises(ValidationError, match=message):
        Observe(**arguments)


def test_schema_knows_every_argument() -> None:
    """Editors see each argument with its bounds, and which observers may stand alone."""
    made = schema()["$defs"]
    known = {name for one in OBSERVERS.values() for name in one.arguments}
    properties = made["Observe"]["properties"]
    assert set(properties) == {"name", *known}
    assert (properties["percentile"]["minimum"], properties["percentile"]["maximum"]) == (50, 100)
    alone = made["Scheme"]["properties"]["observe"]["anyOf"][0]["enum"]
    assert "percentile" in alone
    assert "fixed" not in alone
