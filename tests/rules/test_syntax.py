"""Chains and patterns."""

import re

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
        ("", "'' is no kind"),
        ("conv >", "'' in 'conv >' is no kind"),
        ("conv relu", "'conv relu' is no kind; write 'conv', 'conv|matmul' or 'conv > relu?'"),
        ("conv | relu", "'conv | relu' is no kind"),
        ("conv? > relu?", "every link of 'conv? > relu?' is optional; at least one must be required"),
        (" > ".join(["conv"] * 17), "a chain of 17 links is too long; the limit is 16"),
    ],
)
def test_broken_chain(text, message):
    """Each way to break a chain says so."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
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
        ([], "a pattern has at least one op"),
        (["y : mul(x)"], "'y : mul(x)' does not have the form 'name = kind(operand, ...)'"),
        (["y = mul(x, )"], "operand '' of 'y = mul(x, )' is not a valid name"),
        (["y = mul(x)", "y = mul(x)"], "'y' is defined twice"),
        (["_ = mul(x)"], "'_' in '_ = mul(x)' stands for any operand; give the op another name"),
        (["y = mul(y)"], "'y' is used before the line that defines it"),
        (["y = mul(z)", "z = relu(x)"], "'z' is used before the line that defines it"),
        (
            ["b = relu(x)", "a = relu(x)", "y = relu(x)"],
            "'b', 'a' is not connected to the last op 'y'; remove it or use it",
        ),
    ],
)
def test_broken_pattern(lines, message):
    """Each way to break a pattern says so."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_pattern(lines)
