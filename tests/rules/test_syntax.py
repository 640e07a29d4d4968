"""Chains and patterns."""

import pytest

from graphquant.rules.pattern_syntax import ChainLink, PatternOp, parse_chain, parse_pattern


def test_chain():
    """A chain reads left to right, with alternatives and optional links."""
    assert parse_chain("conv > batchnorm? > relu|relu6?") == (
        ChainLink(frozenset({"conv"}), optional=False),
        ChainLink(frozenset({"batchnorm"}), optional=True),
        ChainLink(frozenset({"relu", "relu6"}), optional=True),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' .*kind"),
        ("conv >", "'' .*'conv >' .*kind"),
        ("conv relu", r"'conv relu' .*kind; .*'conv\|matmul'"),
        ("conv | relu", r"'conv \| relu' .*kind"),
        ("conv? > relu?", r".*'conv\? > relu\?' .*optional"),
        (" > ".join(["conv"] * 17), ".* 17 links .* 16$"),
    ],
)
def test_broken_chain(text, message):
    """Each way to break a chain says so."""
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_chain(text)


def test_pattern():
    """A pattern is its ops in order; undefined names are its inputs."""
    assert parse_pattern(["s = sigmoid(x)", "y = mul|div(x, s)"]) == (
        PatternOp("s", frozenset({"sigmoid"}), ("x",)),
        PatternOp("y", frozenset({"mul", "div"}), ("x", "s")),
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], ".*at least one op"),
        (["y : mul(x)"], r"'y : mul\(x\)' .*'name = kind\(operand, \.\.\.\)'"),
        (["y = mul(x, )"], r"operand '' .*'y = mul\(x, \)' .*name"),
        (["y = mul(x)", "y = mul(x)"], "'y' .*twice"),
        (["_ = mul(x)"], r"'_' .*'_ = mul\(x\)' .*another name"),
        (["y = mul(y)"], "'y' .*before .*defines it"),
        (["y = mul(z)", "z = relu(x)"], "'z' .*before .*defines it"),
        (
            ["b = relu(x)", "a = relu(x)", "y = relu(x)"],
            "'b', 'a' .*connected .*'y'; .*",
        ),
    ],
)
def test_broken_pattern(lines, message):
    """Each way to break a pattern says so."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse_pattern(lines)
