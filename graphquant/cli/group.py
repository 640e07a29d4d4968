"""How every command ends: a message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import click

from graphquant.errors import GraphQuantError, InternalError, UsageError, printable

INTERRUPTED = 130

LONGEST_LINE = 2_000
"""Characters of an error's line that are shown: a name in a model may have millions."""


class Group(click.Group):
    """Turns every ending into a message and an exit code; a traceback would be our own fault."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except GraphQuantError as error:
            click.echo(f"Error: {_told(error)}", err=True)
            raise click.exceptions.Exit(error.exit_code) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has enough; click ends quietly
                raise
            raise _failed(error) from error
        except KeyboardInterrupt as error:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from error
        except MemoryError as error:
            click.echo("Error: there is not enough memory for this model. Try a machine with more.", err=True)
            raise click.exceptions.Exit(InternalError.exit_code) from error


def _failed(error: OSError) -> click.exceptions.Exit:
    """Tells what the system refused where no file is read or written: a name too long, a full standard output."""
    name = f"{error.filename} cannot be used" if error.filename else "The result cannot be written to standard output"
    told = _told(UsageError(f"{name}: {error.strerror}. Give another path, or make room."))
    click.echo(f"Error: {told}", err=True)
    if not error.filename and sys.stdout is sys.__stdout__:  # what is still buffered would fail again at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return click.exceptions.Exit(UsageError.exit_code)


def _told(error: GraphQuantError) -> str:
    """What the error says, fit for a terminal."""
    lines = [printable(line) for line in str(error).split("\n")]
    more = [f" ... ({len(line) - LONGEST_LINE} more characters)" if len(line) > LONGEST_LINE else "" for line in lines]
    return "\n".join(line[:LONGEST_LINE] + rest for line, rest in zip(lines, more, strict=True))
