"""Options that several commands have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from graphquant.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def selection(command: F) -> F:
    """The options that choose what is quantized."""
    options = [
        click.option(
            "--rules",
            multiple=True,
            metavar="NAME|FILE|RULE",
            help="Rule file, or 'PRODUCER > CONSUMER: BITS, EXPONENT'; repeat it to stack, first match wins.",
        ),
        click.option(
            "--include", multiple=True, metavar="PATTERN", help="Quantize only what this glob or /regex/ names."
        ),
        click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave what this glob or /regex/ names."),
        click.option(
            "--family",
            metavar="NAME",
            help="QDQ ops for schemes that name none: onnx-qdq, fake-quant, quantize-and-dequantize-v2, -v3 or -v4.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


MAX_MEMORY = click.option(
    "--max-memory",
    metavar="SIZE",
    help="Memory for calibration beside the plain runs, 512MB or 2GB; by default half of what is free.",
)


CORRECT = click.option(
    "--correct",
    multiple=True,
    metavar="NAME",
    help="A correction of weights or biases beside those of the rules, or 'not NAME'; see docs/corrections.md.",
)


def finite(_ctx: click.Context, param: click.Parameter, given: float | None) -> float | None:
    """A callback that refuses NaN and infinity, which any comparison would take for met or for missed."""
    if given is not None and not math.isfinite(given):
        raise click.BadParameter(f"{given} is no number that anything can be compared with.", param=param)
    return given


class _Share(click.ParamType[float]):
    """A share of all: 0.99, or 99 for percent."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The share, 0 to 1."""
        given = click.FloatRange(0, 100).convert(value, param, ctx)
        return float(given if given <= 1 else given / 100)


SHARE = _Share()


def memory(given: str | None) -> int | None:
    """The bytes that --max-memory says, None where it is not given."""
    from graphquant.calibration import parse_size

    return parse_size(given) if given is not None else None


def shard(given: str | None) -> tuple[int, int]:
    """What --shard says: which part, counted from 1, of how many."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", given or "1/1")
    part, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= part <= parts:
        raise UsageError(f"--shard {given} is no part of a whole. Write 2/8 for the second of eight.")
    return part, parts
