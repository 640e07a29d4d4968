"""Options that several commands have."""

from __future__ import annotations

import errno
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from graphquant.errors import GraphQuantError, InternalError, UsageError, escape_unprintable

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])


def selection_options(command: CommandFunction) -> CommandFunction:
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


ALGORITHM = click.option(
    "--correct",
    multiple=True,
    metavar="NAME",
    help="A correction of weights or biases beside those of the rules, or 'not NAME'; see docs/corrections.md.",
)


def require_finite(_ctx: click.Context, param: click.Parameter, number: float | None) -> float | None:
    """A callback that refuses NaN and infinity, which any comparison would take for met or for missed."""
    if number is not None and not math.isfinite(number):
        raise click.BadParameter(f"{number} is no number that anything can be compared with.", param=param)
    return number


class ShareType(click.ParamType[float]):
    """A share of all: 0.99, or 99 for percent."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The share, 0 to 1."""
        number = click.FloatRange(0, 100).convert(value, param, ctx)
        return float(number if number <= 1 else number / 100)


SHARE = ShareType()


def parse_max_memory(text: str | None) -> int | None:
    """The bytes that --max-memory says, None where it is not given."""
    from graphquant.calibration import parse_size

    return parse_size(text) if text is not None else None


def parse_shard(text: str | None) -> tuple[int, int]:
    """What --shard says: which part, counted from 1, of how many."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text or "1/1")
    position, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= position <= count:
        raise UsageError(f"--shard {text} is no part of a whole. Write 2/8 for the second of eight.")
    return position, count


# How every command ends: a message and an exit code.

INTERRUPTED = 130

LONGEST_LINE = 2_000
"""Characters of an error's line that are shown: a name in a model may have millions."""


class ErrorHandlingGroup(click.Group):
    """Turns every ending into a message and an exit code; a traceback would be our own fault."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except GraphQuantError as error:
            click.echo(f"Error: {_terminal_message(error)}", err=True)
            raise click.exceptions.Exit(error.exit_code) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has enough; click ends quietly
                raise
            raise _report_os_error(error) from error
        except KeyboardInterrupt as error:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from error
        except MemoryError as error:
            click.echo("Error: there is not enough memory for this model. Try a machine with more.", err=True)
            raise click.exceptions.Exit(InternalError.exit_code) from error


def _report_os_error(error: OSError) -> click.exceptions.Exit:
    """Tells what the system refused where no file is read or written: a name too long, a full standard output."""
    name = f"{error.filename} cannot be used" if error.filename else "The result cannot be written to standard output"
    message = _terminal_message(UsageError(f"{name}: {error.strerror}. Give another path, or make room."))
    click.echo(f"Error: {message}", err=True)
    if not error.filename and sys.stdout is sys.__stdout__:  # what is still buffered would fail again at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return click.exceptions.Exit(UsageError.exit_code)


def _terminal_message(error: GraphQuantError) -> str:
    """What the error says, fit for a terminal."""
    lines = [escape_unprintable(line) for line in str(error).split("\n")]
    truncation_notes = [
        f" ... ({len(line) - LONGEST_LINE} more characters)" if len(line) > LONGEST_LINE else "" for line in lines
    ]
    return "\n".join(line[:LONGEST_LINE] + note for line, note in zip(lines, truncation_notes, strict=True))
