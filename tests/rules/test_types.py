"""The dataclasses of rule files."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from graphquant.rules import ObserverConfig, Rule, Scheme, Selector


def test_schemes_are_keys():
    """Equal schemes have equal hashes, so that they can be keys."""
    with_floats = Scheme(name="a", observe=ObserverConfig(name="fixed", low=0.0, high=1.0))
    with_integers = Scheme(name="a", observe=ObserverConfig(name="fixed", low=0, high=1))
    assert {with_floats: 1}[with_integers] == 1
    assert Scheme(bits=4) != with_floats


def test_selectors_are_keys():
    """Selectors are hashable and still differ by their attributes."""
    first, second = Selector(kind="conv", attr={"group": [1, 2]}), Selector(kind="conv", attr={"group": [1]})
    assert hash(first) == hash(Selector(kind="conv", attr={"group": [1, 2]}))
    assert {first: 1, second: 2} == {first: 1, second: 2}
    assert first != second


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rule(name="a", quantize="float"),
        lambda: Rule(name="a", quantize="float", producer=Selector(input="weight")),
        lambda: Rule(name="a", quantize="float", producer=Selector(max_channels=3)),
        lambda: Rule(name="a", quantize="float", consumer=Selector(readers=1)),
        lambda: Selector(min_rank=3, max_rank=2),
        lambda: Selector(min_size=3, max_size=2),
        lambda: Selector(min_channels=3, max_channels=2),
        lambda: Selector(name="/a{2000}/"),
        lambda: Selector(name="x" * 501),
        lambda: Selector(name="/(?=a)/"),
        lambda: Selector(type="Conv|"),
        lambda: Scheme(observe="fixed-point"),
        lambda: Scheme(observe={"name": "minmax", "low": 3}),
        lambda: Scheme(observe={"name": "fixed", "low": 3, "high": 2}),
        lambda: Scheme(observe={"name": "fixed", "low": 0, "high": float("inf")}),
        lambda: Scheme(zero="asymmetric", observe={"name": "fixed-point", "exponent": 3}),
        lambda: Scheme(dtype="int8", signed=True),
        lambda: Scheme(dtype="int33"),
        lambda: Scheme(dtype="int17", family="onnx-qdq"),
        lambda: Scheme(dtype="float16"),
        lambda: Scheme(dtype="float8_e4m3fn", zero="asymmetric"),
        lambda: Scheme(dtype="float8_e4m3fn", narrow=True),
        lambda: Scheme(dtype="float8_e4m3fn", family="fake-quant"),
        lambda: Scheme(per="block"),
        lambda: Scheme(block_size=32),
        lambda: Scheme(per="block", block_size=1),
        lambda: Scheme(per="block", block_size=32, observe="auto"),
        lambda: Scheme(per="block", block_size=32, observe="mse", smallest_range=0.1),
        lambda: Scheme(per="block", block_size=32, observe="mse", dtype="float8_e4m3fn"),
        lambda: Scheme(per="block", block_size=32, observe="mean-minmax"),
        lambda: Scheme(per="block", block_size=32, observe="bias"),
        lambda: Scheme(per="block", block_size=32, family="quantize-and-dequantize-v3"),
        lambda: Scheme(axis=1),
        lambda: Scheme(per="channel", axis=-1),
    ],
)
def test_contradictions_are_refused(make):
    """Contradictory fields are an error at creation."""
    with pytest.raises(ValidationError):
        make()


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (Scheme(dtype="uint4"), "uint4"),
        (Scheme(), "int8"),
        (Scheme(bits=6), "int6"),
        (Scheme(signed=False), "uint8"),
        (Scheme(dtype="float8_e5m2"), "float8_e5m2"),
    ],
)
def test_type_of_a_scheme(scheme, name):
    """The type follows from dtype, or from bits and signed."""
    assert scheme.type.name == name


@pytest.mark.slow
def test_import_is_light():
    """Importing the package loads neither networkx nor a framework."""
    code = "import sys, graphquant.rules; print([m for m in ('networkx', 'onnx', 'tensorflow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
