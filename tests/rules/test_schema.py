"""The JSON Schema of rule files."""

import tomllib

import pytest
from jsonschema import Draft202012Validator

from graphquant.ir.kinds import KINDS
from graphquant.observers import OBSERVERS
from graphquant.qdq import FAMILIES
from graphquant.rules import rule_file_schema, shipped_rule_files

HEAD = """\
[scheme.w]
dtype = "int8"

[pattern.silu]
ops = ["s = sigmoid(x)", "y = mul(x, s)"]

"""
RULE = HEAD + "[[rule]]\nname = 'a'\nquantize = 'w'\n"


@pytest.fixture(scope="module")
def validator():
    """The schema, itself checked."""
    Draft202012Validator.check_schema(rule_file_schema())
    return Draft202012Validator(rule_file_schema())


@pytest.mark.parametrize("name", sorted(shipped_rule_files()))
def test_shipped_rules_are_valid(validator, name):
    """Every shipped rule file follows the schema."""
    data = tomllib.loads(shipped_rule_files()[name].read_text(encoding="utf-8"))
    assert [error.message for error in validator.iter_errors(data)] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        RULE + "producer = {kind = 'parameter'}",
        RULE + "consumer = {kind = 'conv > batchnorm? > relu|relu6?', input = 'weight|bias'}",
        RULE + "consumer = {kind = '*', attr = {a = 1, b = [1, [2, 3]], c = true}}",
        "[scheme.a]\nobserve = 'absmax'\nbits = 4\nsigned = false\nfamily = 'fake-quant'",
        "[scheme.a]\nobserve = {name = 'fixed', low = 0, high = 1.5}",
        "[scheme.a]\nobserve = {name = 'fixed-point', exponent = -4}",
        "[scheme.a]\ndtype = 'int4'\nper = 'block'\nblock_size = 32\naxis = 1",
        "[scheme.a]\ndtype = 'float8_e4m3fn'\nper = 'channel'",
    ],
)
def test_valid(validator, text):
    """The schema accepts everything that the loader accepts."""
    assert [error.message for error in validator.iter_errors(tomllib.loads(text))] == []


@pytest.mark.parametrize(
    "text",
    [
        "rules = 1",
        "[scheme.a]\nper = 'block'",
        "[scheme.a]\nblock_size = 32",
        "[scheme.a]\nper = 'channel'\nblock_size = 32",
        "[scheme.a]\nper = 'block'\nblock_size = 1",
        "[scheme.a]\ndtype = 'float8_e4m3'",
        "[scheme.a]\nper = 'channel'\naxis = -1",
        "rule = {}",
        "scheme = []",
        "prepare = ['fold']",
        "[scheme.a]\nname = 'a'",
        "[scheme.a]\nper = 'chanel'",
        "[scheme.a]\nbits = 33",
        "[scheme.a]\nbits = '8'",
        "[scheme.a]\ndtype = 'int33'",
        "[scheme.a]\ndtype = 'int8'\nbits = 8",
        "[scheme.a]\nfamily = 'fake'",
        "[scheme.a]\nobserve = 'minmx'",
        "[scheme.a]\nobserve = 'fixed'",
        "[scheme.a]\nobserve = {name = 'fixed', low = 1}",
        "[scheme.a]\nobserve = {name = 'minmax', low = 1}",
        "[pattern.a]",
        "[pattern.a]\nops = []",
        RULE,
        HEAD + "[[rule]]\nproducer = {kind = 'conv'}\nquantize = 'w'",
        HEAD + "[[rule]]\nproducer = {kind = 'conv'}\nname = 'a'",
        HEAD + "[[rule]]\nproducer = {kind = 'conv'}\nname = 'a b'\nquantize = 'w'",
        RULE + "producer = {}",
        RULE + "producer = {kind = 'cnov'}",
        RULE + "producer = {kind = 'conv > '}",
        RULE + "producer = {kind = 3}",
        RULE + "producer = {input = 'weight'}",
        RULE + "consumer = {readers = 1}",
        RULE + "consumer = {input = 'wieght'}",
        RULE + "consumer = {min_rank = -1}",
        RULE + "consumer = {name = ''}",
        RULE + "consumer = {attr = {a = 2020-01-01}}",
        RULE + "consumer = {attr = {a = {b = 1}}}",
    ],
)
def test_invalid(validator, text):
    """The schema rejects every mistake of the loader that a schema can express."""
    assert not validator.is_valid(tomllib.loads(text))


def test_everything_is_described():
    """Every key of every table carries a sentence, and choices are listed for editors."""
    generated = rule_file_schema()
    tables = [generated, *generated["$defs"].values()]
    missing = [name for table in tables for name, key in table["properties"].items() if not key.get("description")]
    assert missing == []
    scheme, selector = generated["$defs"]["Scheme"]["properties"], generated["$defs"]["Selector"]["properties"]
    assert selector["kind"]["anyOf"][0]["enum"] == list(KINDS)
    assert scheme["family"]["enum"] == sorted(FAMILIES)
    assert generated["$defs"]["Observe"]["properties"]["name"]["enum"] == list(OBSERVERS)
    assert generated["title"] == "graphquant rule file, version 2"
    assert "$id" not in generated
